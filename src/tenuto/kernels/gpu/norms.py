"""Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467) on a CUDA device, computed in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 2048
"""A program normalises as many rows as have this many elements together, and at least one."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, groups: int = 1) -> torch.Tensor:
    """Returns `x`, [..., width], normalised and multiplied by `weight`, float32 [width], in the element type of `x`.
    Each of `groups` equal parts of a row is normalised separately. Rows are contiguous."""
    width = x.shape[-1] // groups
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    _rms_norm[_grid(len(flat) * groups, width)](
        flat, weight, out, epsilon, len(flat) * groups, flat.stride(0), width, GROUPS=groups, **_blocks(width)
    )
    return out


def add_rms_norm(
    x: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum `x + scale * branch`, and this sum normalised as in `rms_norm`, both of the element type of `x`.
    `x` and `branch` are [..., width], contiguous, and `weight` is float32 [width]."""
    width = x.shape[-1]
    rows = x.numel() // width
    total, out = torch.empty_like(x), torch.empty_like(x)
    _add_rms_norm[_grid(rows, width)](x, branch, weight, total, out, scale, epsilon, rows, width, **_blocks(width))
    return total, out


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float = 0.0,
    groups: int = 1,
    *,
    gate_first: bool = False,
    gate_scale: float = 1.0,
) -> torch.Tensor:
    """Normalises each of `groups` equal parts of a row of `x`, multiplies it by `weight`, and multiplies the row by
    SiLU of `gate_scale * gate`, before the norm if `gate_first`. Without `weight` there is no norm.

    `x` is [rows, width], contiguous. `gate` is [rows, parts, width / parts] with contiguous parts, which need not be
    side by side. `weight` is float32 [width], or shorter if parts share it. Returns [rows, width] in the element type
    of `gate`."""
    rows, width = len(x), x.shape[1] // groups
    out = torch.empty(x.shape, device=x.device, dtype=gate.dtype)
    _gated_norm[_grid(rows * groups, width)](
        x,
        gate,
        weight,
        out,
        epsilon,
        gate_scale,
        rows * groups,
        width,
        gate.stride(0),
        gate.stride(1),
        GROUPS=groups,
        PART=gate.shape[2],
        WEIGHTS=len(weight) if weight is not None else 1,
        GATE_FIRST=gate_first,
        **_blocks(width),
    )
    return out


def _blocks(width: int) -> dict[str, int]:
    """Returns the numbers of rows and of elements of a program, and of its warps. They depend on the width alone."""
    padded = triton.next_power_of_2(width)
    return {
        "ROWS": max(_ELEMENTS // padded, 1),
        "PADDED": padded,
        "num_warps": min(max(padded, _ELEMENTS) // 512, 16),
    }


def _grid(rows: int, width: int) -> tuple[int]:
    return (triton.cdiv(rows, _blocks(width)["ROWS"]),)


@triton.jit
def _normalised(values, weights, epsilon, width):
    """Returns the rows `values`, float32 [ROWS, PADDED], normalised. Elements behind `width` are zero."""
    mean = tl.sum(values * values, axis=1) / width
    return values * tl.rsqrt(mean + epsilon)[:, None] * weights


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, weight, out, epsilon, rows, stride, width, GROUPS: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr
):
    """A program normalises ROWS parts of rows."""
    part = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, PADDED)[None, :]
    inside = (part < rows) & (at < width)
    begin = part % GROUPS * width + at
    values = tl.load(x + part // GROUPS * stride + begin, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + begin, mask=inside, other=0.0)
    found = _normalised(values, weights, epsilon, width)
    tl.store(out + part * width + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(x, branch, weight, total, out, scale, epsilon, rows, width, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """A program adds and normalises ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, PADDED)[None, :]
    inside = (row < rows) & (at < width)
    spots = row * width + at
    values = tl.load(x + spots, mask=inside, other=0.0).to(tl.float32)
    values += scale * tl.load(branch + spots, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + spots, rounded, mask=inside)
    weights = tl.load(weight + at, mask=at < width, other=0.0)
    found = _normalised(rounded.to(tl.float32), weights, epsilon, width)
    tl.store(out + spots, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x,
    gate,
    weight,
    out,
    epsilon,
    gate_scale,
    rows,
    width,
    stride,
    part_stride,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,
    WEIGHTS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A program computes ROWS parts of rows."""
    part = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, PADDED)[None, :]
    inside = (part < rows) & (at < width)
    channel = part % GROUPS * width + at
    found = tl.load(x + part * width + at, mask=inside, other=0.0).to(tl.float32)
    spots = gate + part // GROUPS * stride + channel // PART * part_stride + channel % PART
    opened = gate_scale * tl.load(spots, mask=inside, other=0.0).to(tl.float32)
    opened *= tl.sigmoid(opened)
    if GATE_FIRST:
        found *= opened
    if weight is not None:
        weights = tl.load(weight + channel % WEIGHTS, mask=inside, other=0.0)
        found = _normalised(found, weights, epsilon, width)
    if not GATE_FIRST:
        found *= opened
    tl.store(out + part * width + at, found.to(out.dtype.element_ty), mask=inside)
