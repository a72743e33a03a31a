"""Activation functions of feed-forward networks on a CUDA device, computed in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
"""The number of results that a program computes."""
_KINDS = {"silu": 0, "gelu_tanh": 1, "clamped": 2, "relu2": 3}
_UNGATED = ("relu2",)


def gated(activation: str, gate_up: torch.Tensor, gate_scale: float = 1.0) -> torch.Tensor:
    """Applies an activation, one of `models.block.GATES` or `UNGATED`, by its name. `gate_up` is [tokens, parts *
    width]: the gate, unless ungated, which is multiplied by `gate_scale`, then the up projection; rows are contiguous.
    Returns [tokens, width]."""
    rows, inputs = gate_up.shape
    width = inputs if activation in _UNGATED else inputs // 2
    out = torch.empty((rows, width), device=gate_up.device, dtype=gate_up.dtype)
    _gated[(rows, triton.cdiv(width, _BLOCK))](
        gate_up, out, gate_up.stride(0), width, gate_scale, KIND=_KINDS[activation], BLOCK=_BLOCK
    )
    return out


@triton.jit
def _tanh(x):
    small = tl.exp(-2 * tl.abs(x))  # never overflows
    return tl.where(x < 0, -1.0, 1.0) * (1 - small) / (1 + small)


@triton.jit
def _gated(x, out, stride, width, gate_scale, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes BLOCK results of one token."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    first = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 3:  # relu2
        positive = tl.maximum(first, 0.0)
        found = positive * positive
    else:
        gate = first * gate_scale
        up = tl.load(x + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == 0:  # silu
            found = gate * tl.sigmoid(gate) * up
        elif KIND == 1:  # gelu_tanh: 0.79788... is the square root of 2 / pi
            found = 0.5 * gate * (1 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
        else:  # clamped, with the constants of `models.block`
            gate = tl.minimum(gate, 7.0)
            up = tl.minimum(tl.maximum(up, -7.0), 7.0)
            found = gate * tl.sigmoid(1.702 * gate) * (up + 1)
    tl.store(out + row * width + at, found.to(out.dtype.element_ty), mask=inside)
