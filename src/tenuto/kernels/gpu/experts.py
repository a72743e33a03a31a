"""Mixtures of experts on a CUDA device: every expert multiplies the tokens that chose it, of which the host does not
know how many there are.

A token and one of its experts are a pair. Pairs are ordered by expert and cut into tiles of one expert each, by the
device. There are as many programs as there can be tiles at most. Quantized weights become numbers just before they are
multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tenuto.kernels.gpu.activations import gated
from tenuto.kernels.gpu.quantized import REGISTERS, add_chunk, constants_of, many_constants
from tenuto.kernels.linear import Matrix
from tenuto.kernels.quantized import LANES, Quantized

_COUNTED = 1024
"""The number of pairs that are counted at a time."""
_PLACED = 32
"""The number of pairs that a program puts into order."""
_LANES = tl.constexpr(LANES)
_COMBINED = 1024
"""The number of results that a program adds up."""
_FEW = 16
"""The pairs of a tile if experts have few: the least that tensor cores multiply."""
_MANY = 64
"""The pairs of a tile if experts have this many or more on average."""


@dataclass(frozen=True, slots=True)
class Order:
    """Pairs in order. `experts`: the number of all experts. `pairs`, int32 [pairs]: the pairs' numbers, those of an
    expert together. `firsts`, int32 [experts + 1]: where each expert's begin. `tiles`, int32 [experts]: the number of
    tiles up to each expert's last. `size`: the most pairs of a tile. `most`: the most tiles."""

    experts: int
    pairs: torch.Tensor
    firsts: torch.Tensor
    tiles: torch.Tensor
    size: int
    most: int


def mix_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    inner: Matrix,
    down: Matrix,
    experts: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    activation: str,
) -> torch.Tensor:
    """Returns the sum of the experts' outputs for `x`, both [tokens, hidden]. Of each token they are those in `chosen`,
    int64, multiplied by `weights`, both [tokens, chosen]. An expert multiplies by its part of `inner`, [experts * parts
    * width, hidden], applies `activation`, see `activations.gated`, and multiplies by its part of `down`, [experts *
    hidden, width]. `biases` are those of `inner` and `down`, [experts, ...]. Sums are float32. Rows of `x` are
    contiguous, as are matrices."""
    order = ordered(chosen, experts)
    first, second = biases if biases is not None else (None, None)
    activated = gated(activation, _product(x, inner, first, order, chosen.shape[1]))
    return _combined(_product(activated, down, second, order, 1), weights)


def ordered(chosen: torch.Tensor, experts: int) -> Order:
    """Orders pairs by the experts that are `chosen` for them, int64, less than `experts`."""
    many, device = chosen.numel(), chosen.device
    size = _MANY if many >= _MANY * experts else _FEW
    pairs, free, firsts, tiles = (
        torch.empty(length, device=device, dtype=torch.int32) for length in (many, experts, experts + 1, experts)
    )
    chosen = chosen.contiguous()
    padded = triton.next_power_of_2(experts)
    _count[(1,)](
        chosen, free, firsts, tiles, many, COUNT=experts, EXPERTS=padded, TILE=size, BLOCK=_COUNTED, num_warps=8
    )
    _place[(triton.cdiv(many, _PLACED),)](chosen, free, pairs, many, BLOCK=_PLACED, num_warps=1)
    return Order(experts, pairs, firsts, tiles, size, min(many, many // size + experts))


def _product(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, order: Order, each: int) -> torch.Tensor:
    """Multiplies the row of each pair, which has the number of the pair divided by `each`, by the matrix of its expert.
    Returns [pairs, outputs]."""
    inputs, outputs = x.shape[1], len(weight) // order.experts
    found = torch.empty((len(order.pairs), outputs), device=x.device, dtype=x.dtype)
    given = bias, order.pairs, order.firsts, order.tiles, found, inputs, outputs, x.stride(0)
    constants = {
        "EACH": each,
        "COUNT": order.experts,
        "EXPERTS": triton.next_power_of_2(order.experts),
        "TILE": order.size,
    }
    if isinstance(weight, Quantized):
        block, _, warps, stages = many_constants(order.size, weight)
        chunks = weight.words.shape[1]
        _multiply_quantized[(triton.cdiv(outputs, block), order.most)](
            x,
            weight.words,
            weight.scales,
            weight.minima,
            *given,
            chunks,
            EVEN=inputs == chunks * weight.numbers.chunk,
            BLOCK=block,
            **constants,
            **constants_of(weight),
            num_warps=warps,
            num_stages=stages,
            maxnreg=REGISTERS,
        )
        return found
    many = order.size > _FEW
    block, step = 128 if many else 64, 128 // x.element_size()
    _multiply[(triton.cdiv(outputs, block), order.most)](
        x,
        weight,
        *given,
        EVEN=inputs % step == 0,
        BLOCK=block,
        INPUTS=step,
        **constants,
        num_warps=8 if many else 4,
        num_stages=3 if many else 4,
    )
    return found


def _combined(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Adds up the outputs of each token's pairs, [pairs, hidden], multiplied by `weights`, [tokens, chosen]."""
    tokens, chosen = weights.shape
    hidden = outputs.shape[1]
    found = torch.empty((tokens, hidden), device=outputs.device, dtype=outputs.dtype)
    grid = tokens, triton.cdiv(hidden, _COMBINED)
    _combine[grid](outputs, weights.contiguous(), found, hidden, CHOSEN=chosen, BLOCK=_COMBINED)
    return found


@triton.jit(do_not_specialize=["many"])
def _count(
    chosen,
    free,
    firsts,
    tiles,
    many,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A single program counts the pairs of all experts. It writes where each one's begin, also to `free`."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, many, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(chosen + pair, pair < many, 0).to(tl.int32), EXPERTS, mask=pair < many)
    ends = tl.cumsum(counts, axis=0)
    inside = expert < COUNT
    tl.store(firsts + expert, ends - counts, inside)
    tl.store(free + expert, ends - counts, inside)
    tl.store(firsts + COUNT, many)
    tl.store(tiles + expert, tl.cumsum((counts + TILE - 1) // TILE, axis=0), inside)


@triton.jit(do_not_specialize=["many"])
def _place(chosen, free, pairs, many, BLOCK: tl.constexpr):
    """A program puts BLOCK pairs into order. `free`, int32 [experts], is the next free place of each expert's."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = pair < many
    place = tl.atomic_add(free + tl.load(chosen + pair, given, 0), 1, given)
    tl.store(pairs + place, pair, given)


@triton.jit
def tile_of(tile, pairs, firsts, tiles, COUNT: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Returns the expert of a tile, or `COUNT` behind the last one, its pairs, int64 [TILE], and which of them are
    present; other pairs are 0."""
    index = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + index, index < COUNT, 2**30)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    there = expert < COUNT
    first = tl.load(firsts + expert, there, 0)
    place = first + (tile - tl.max(tl.where(ends <= tile, ends, 0), axis=0)) * TILE + tl.arange(0, TILE)
    present = place < tl.load(firsts + expert + 1, there, 0)
    return expert, tl.load(pairs + place, present, 0).to(tl.int64), present


@triton.jit
def _multiply(
    x,
    weight,
    bias,
    pairs,
    firsts,
    tiles,
    found,
    inputs,
    outputs,
    stride,
    EACH: tl.constexpr,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A program computes BLOCK outputs of a tile. Its grid is [blocks, most tiles]."""
    expert, pair, present = tile_of(tl.program_id(1), pairs, firsts, tiles, COUNT, EXPERTS, TILE)
    if expert < COUNT:
        output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        # Outputs behind the last are computed like it, and not stored.
        own = (expert.to(tl.int64) * outputs + tl.minimum(output, outputs - 1)) * inputs
        values, weights = x + (pair // EACH)[:, None] * stride, weight + own[None, :]
        sums = tl.zeros([TILE, BLOCK], tl.float32)
        for first in range(0, inputs, INPUTS):
            at = first + tl.arange(0, INPUTS)
            if EVEN:
                w = tl.load(weights + at[:, None])
                v = tl.load(values + at[None, :], mask=present[:, None], other=0.0)
            else:
                w = tl.load(weights + at[:, None], mask=at[:, None] < inputs, other=0.0)
                v = tl.load(values + at[None, :], mask=present[:, None] & (at < inputs)[None, :], other=0.0)
            sums = tl.dot(v, w, sums, input_precision="ieee")
        if bias is not None:
            line = bias + expert.to(tl.int64) * outputs + output
            sums += tl.load(line, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
        inside = present[:, None] & (output < outputs)[None, :]
        tl.store(found + pair[:, None] * outputs + output[None, :], sums.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_quantized(
    x,
    words,
    scales,
    minima,
    bias,
    pairs,
    firsts,
    tiles,
    found,
    inputs,
    outputs,
    stride,
    chunks,
    EACH: tl.constexpr,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Does what `_multiply` does, with a quantized matrix."""
    expert, pair, present = tile_of(tl.program_id(1), pairs, firsts, tiles, COUNT, EXPERTS, TILE)
    if expert < COUNT:
        output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        lane = tl.arange(0, _LANES)
        own = expert * outputs + tl.minimum(output, outputs - 1)
        values = x + (pair // EACH)[None, :] * stride + lane[:, None]
        read = words + own.to(tl.int64)[:, None] * chunks * _LANES + lane[None, :]
        sums = tl.zeros([BLOCK, TILE], tl.float32)
        for chunk in range(chunks):
            sums = add_chunk(
                sums,
                values,
                present,
                read,
                scales,
                minima,
                own,
                chunk,
                inputs,
                COUNT * outputs,
                KIND,
                GROUP,
                GROUPS,
                CHUNK,
                EVEN,
            )
        if bias is not None:
            sums += tl.load(bias + own).to(tl.float32)[:, None]
        inside = (output < outputs)[:, None] & present[None, :]
        tl.store(found + pair[None, :] * outputs + output[:, None], sums.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _combine(outputs, weights, found, hidden, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """A program adds up BLOCK results of one token. Its grid is [tokens, blocks]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    sums = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        pair = token * CHOSEN + i
        weight = tl.load(weights + pair).to(tl.float32)
        sums += weight * tl.load(outputs + pair * hidden + at, inside, 0.0).to(tl.float32)
    tl.store(found + token * hidden + at, sums.to(found.dtype.element_ty), inside)
