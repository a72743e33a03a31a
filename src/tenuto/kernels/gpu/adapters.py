"""Changes of projections by adapters (LoRA) on a CUDA device, for steps whose tokens have different ones.

Tokens are ordered by adapter and cut into tiles of one adapter each, as pairs are by `experts`. Kernels find an
adapter's matrices by their addresses in a table, so that a captured step computes with whatever is loaded later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton import cdiv

from tenuto.kernels.gpu.experts import Order, ordered, tile_of

SLOTS = 64
"""The number of slots of adapters in a table, with slot 0, which has none."""
FIELDS = 3
"""In a table: the addresses of `down`, float32 [rank, inputs], and of `up`, float32 [outputs, rank], and the rank, or 0
for a projection that the adapter does not change."""

_FIELDS, _SLOTS = tl.constexpr(FIELDS), tl.constexpr(SLOTS)
_RANKS = 16
"""The number of ranks that a program computes at a time."""
_SHARES = 4
"""The number of programs among which the ranks of a tile are divided."""
_OUTPUTS = 128
"""The number of outputs that a program changes."""
_INPUTS = 64
"""The number of inputs that a program multiplies at a time."""


def by_adapter(slots: torch.Tensor) -> Order:
    """Orders tokens by the `slots` of their adapters, int64 [tokens], which are less than `SLOTS`."""
    return ordered(slots, SLOTS)


def change_projections(
    projected: torch.Tensor,
    x: torch.Tensor,
    table: torch.Tensor,
    first: int,
    outputs: Sequence[int],
    order: Order,
    most_rank: int,
) -> None:
    """Adds the changes of each token's adapter to `projected`, [tokens, sum of outputs], in place. `x`, [tokens,
    inputs], is the input of projections with these numbers of `outputs`, at most three, whose lines in `table`, int64
    [projections, SLOTS, FIELDS], begin at `first`. No adapter's rank is more than `most_rank`. Rows of both are
    contiguous. Sums are float32."""
    parts = len(outputs)
    begins = [sum(outputs[:part]) for part in range(1, 3)]
    inner = torch.empty((len(order.pairs), parts, most_rank), device=x.device, dtype=torch.float32)
    given = table, order.pairs, order.firsts, order.tiles, inner
    _shrink[(order.most, parts, _SHARES)](
        x,
        *given,
        x.shape[1],
        x.stride(0),
        first,
        EVEN=x.shape[1] % _INPUTS == 0,
        MOST=most_rank,
        TILE=order.size,
        RANKS=_RANKS,
        SHARES=_SHARES,
        INPUTS=_INPUTS,
        num_warps=4,
    )
    _expand[(cdiv(max(outputs), _OUTPUTS), order.most, parts)](
        projected,
        *given,
        *begins,
        sum(outputs),
        projected.stride(0),
        first,
        MOST=most_rank,
        TILE=order.size,
        RANKS=_RANKS,
        OUTPUTS=_OUTPUTS,
        num_warps=4,
    )


@triton.jit
def _line(table, projection, slot):
    """Returns the matrices and the rank in a projection's line of the table. Tensors begin at multiples of 16 bytes."""
    line = table + (projection * _SLOTS + slot) * _FIELDS
    down = tl.multiple_of(tl.load(line), 16).to(tl.pointer_type(tl.float32))
    up = tl.multiple_of(tl.load(line + 1), 16).to(tl.pointer_type(tl.float32))
    return down, up, tl.load(line + 2).to(tl.int32)


@triton.jit(do_not_specialize=["first"])
def _shrink(
    x,
    table,
    pairs,
    firsts,
    tiles,
    inner,
    inputs,
    stride,
    first,
    EVEN: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A program multiplies a tile by a share of the rows of `down`. Its grid is [most tiles, parts, SHARES]."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    slot, token, present = tile_of(tl.program_id(0), pairs, firsts, tiles, _SLOTS, _SLOTS, TILE)
    if (slot > 0) & (slot < _SLOTS):
        weights, _, rank = _line(table, first + part, slot)
        values = x + token[:, None] * stride
        for begin in range(tl.program_id(2) * RANKS, rank, RANKS * SHARES):
            row = begin + tl.arange(0, RANKS)
            sums = tl.zeros([TILE, RANKS], tl.float32)
            for place in range(0, inputs, INPUTS):
                at = place + tl.arange(0, INPUTS)
                inside = (at < inputs) | EVEN
                v = tl.load(values + at[None, :], mask=present[:, None] & inside[None, :], other=0.0)
                spots = weights + row[None, :] * inputs + at[:, None]
                w = tl.load(spots, mask=(row < rank)[None, :] & inside[:, None], other=0.0)
                sums = tl.dot(v.to(tl.float32), w, sums, input_precision="ieee")
            found = inner + (token[:, None] * parts + part) * MOST + row[None, :]
            tl.store(found, sums, mask=present[:, None] & (row < rank)[None, :])


@triton.jit(do_not_specialize=["first"])
def _expand(
    projected,
    table,
    pairs,
    firsts,
    tiles,
    inner,
    second,
    third,
    whole,
    stride,
    first,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """A program changes OUTPUTS outputs of a part of a tile. Its grid is [blocks, most tiles, parts]. The second part
    begins at output `second` of the `whole`, the third at `third`."""
    part, parts = tl.program_id(2), tl.num_programs(2)
    slot, token, present = tile_of(tl.program_id(1), pairs, firsts, tiles, _SLOTS, _SLOTS, TILE)
    begin = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    end = tl.where(part == parts - 1, whole, tl.where(part == 0, second, third))
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < end - begin
    if (slot > 0) & (slot < _SLOTS):
        _, weights, rank = _line(table, first + part, slot)
        if rank > 0:
            sums = tl.zeros([TILE, OUTPUTS], tl.float32)
            for place in range(0, rank, RANKS):
                row = place + tl.arange(0, RANKS)
                spots = inner + (token[:, None] * parts + part) * MOST + row[None, :]
                v = tl.load(spots, mask=present[:, None] & (row < rank)[None, :], other=0.0)
                w = tl.load(
                    weights + output[None, :] * rank + row[:, None],
                    mask=inside[None, :] & (row < rank)[:, None],
                    other=0.0,
                )
                sums = tl.dot(v, w, sums, input_precision="ieee")
            spots = projected + token[:, None] * stride + begin + output[None, :]
            changed = present[:, None] & inside[None, :]
            before = tl.load(spots, mask=changed, other=0.0)
            tl.store(spots, before + sums.to(before.dtype), mask=changed)
