"""Multiplication of a few rows by a weight matrix on a CUDA device, limited by how fast the weights can be read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16
"""A program computes this many rows: the least that tensor cores do. More rows read the weights again."""
_SLICES = 4
"""The inputs of a block are divided among this many warps, so that few outputs already make much to load at once."""
_BYTES = 128
"""The size of a slice of a row of weights that is loaded at a time."""
_FEW_ROWS = 4
"""For more rows, a block has twice as many outputs: inputs are read once for each block."""
_WIDE = 16384
"""A matrix with as many outputs makes enough programs also with blocks of twice as many outputs."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies `x` [rows, inputs] by the transpose of `weight` [outputs, inputs], of the same element type, and adds
    `bias` [outputs]. Sums are float32, in an order that depends on the number of inputs alone. The rows of `x` are
    contiguous, as is `weight`. Returns [rows, outputs] in the element type of `x`."""
    rows, inputs = x.shape
    outputs, slice_inputs = len(weight), _BYTES // x.element_size()
    block = 16 * (1 + (rows > _FEW_ROWS)) * (1 + (outputs >= _WIDE))
    found = torch.empty((rows, outputs), device=x.device, dtype=x.dtype)
    _linear[(triton.cdiv(outputs, block), triton.cdiv(rows, _ROWS))](
        x,
        weight,
        bias,
        found,
        rows,
        inputs,
        outputs,
        x.stride(0),
        EVEN=inputs % (_SLICES * slice_inputs) == 0,
        BLOCK=block,
        ROWS=_ROWS,
        SLICES=_SLICES,
        INPUTS=slice_inputs,
        num_warps=_SLICES,
        num_stages=4 if block < 64 else 3,
    )
    return found


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    found,
    rows,
    inputs,
    outputs,
    stride,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A program computes BLOCK outputs of ROWS rows. Each warp adds up every SLICES-th piece of the inputs."""
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Outputs behind the last are computed like it, and not stored.
    weights = weight + tl.minimum(output, outputs - 1).to(tl.int64)[None, :, None] * inputs
    values = x + row.to(tl.int64)[None, None, :] * stride
    present = (row < rows)[None, None, :]
    piece = tl.arange(0, SLICES)[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :]
    sums = tl.zeros([SLICES, BLOCK, ROWS], tl.float32)
    for first in range(0, inputs, SLICES * INPUTS):
        at = first + piece
        if EVEN:
            w = tl.load(weights + at[:, None, :])
            v = tl.load(values + at[:, :, None], mask=present, other=0.0)
        else:
            w = tl.load(weights + at[:, None, :], mask=at[:, None, :] < inputs, other=0.0)
            v = tl.load(values + at[:, :, None], mask=present & (at[:, :, None] < inputs), other=0.0)
        sums = tl.dot(w, v, sums, input_precision="ieee")
    total = tl.sum(sums, axis=0)
    if bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    spots = found + row.to(tl.int64)[None, :] * outputs + output[:, None]
    inside = (row < rows)[None, :] & (output < outputs)[:, None]
    tl.store(spots, total.to(found.dtype.element_ty), mask=inside)
