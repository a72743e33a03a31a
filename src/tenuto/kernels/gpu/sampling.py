"""Samples tokens on a CUDA device, in two launches and without sorting.

The first finds the highest logit of each block of the vocabulary, by many programs per row, and the second chooses a
token, by one program per row. Weights are probabilities relative to the likeliest token's; they are computed in float32
and added up in the same order for the same logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
"""The number of logits that a program looks at at a time."""


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Does what `torch_sampling.sample` does, with the options of `sampling.Choice` on the device: `top_k` integers,
    the others floats, float64 for `uniform` unless its rounding does not matter; all [rows]. `logits` is [rows, vocab]
    with contiguous rows. Returns int64 [rows].

    Among equally likely tokens at the edge of top-k or top-p, the first ones are kept.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    peaks = torch.empty((rows, blocks), device=logits.device, dtype=torch.float32)
    firsts = torch.empty((rows, blocks), device=logits.device, dtype=torch.int32)
    found = torch.empty(rows, device=logits.device, dtype=torch.int64)
    _find_peaks[(rows, blocks)](logits, peaks, firsts, vocab, logits.stride(0), BLOCK=_BLOCK, num_warps=8)
    _choose[(rows,)](
        logits,
        peaks,
        firsts,
        temperature,
        top_k,
        top_p,
        min_p,
        uniform,
        found,
        vocab,
        logits.stride(0),
        BLOCK=_BLOCK,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        num_warps=16,
    )
    return found


@triton.jit
def _load(logits, first, vocab, BLOCK: tl.constexpr):
    """Returns a block of logits, float32, with minus infinity for NaN and behind the last logit."""
    at = first + tl.arange(0, BLOCK)
    values = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(values == values, values, float("-inf"))  # noqa: PLR0124 - only NaN differs from itself


@triton.jit
def _find_peaks(logits, peaks, firsts, vocab, stride, BLOCK: tl.constexpr):
    """A program finds the highest logit of a block, and the first token that has it. Its grid is [rows, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    values = _load(logits + row * stride, block * BLOCK, vocab, BLOCK)
    spot = row * tl.num_programs(1) + block
    tl.store(peaks + spot, tl.max(values, axis=0))
    tl.store(firsts + spot, block * BLOCK + tl.argmax(values, axis=0))


@triton.jit
def _key(value):
    """Returns an int32 that has the order of floats."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # both zeros are equal
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """Returns the float whose `_key` is `key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weight(values, peak, scale):
    return tl.exp2((values - peak) * scale)


@triton.jit
def _search(logits, vocab, peak, scale, low, need, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the highest logit such that the tokens that are at least as likely have a measure of at least `need`: their
    number if COUNTED, or else their weight. Returns it and the measure of likelier tokens, float64. If all tokens from
    the key `low` have a smaller measure, it returns the least likely of them."""
    low = low.to(tl.int64)
    high = _key(peak).to(tl.int64) + 1
    above = tl.full((), 0.0, tl.float64)
    # Invariant: the result's key is at least `low` and less than `high`, and `above` is the measure from `high`.
    while high - low > 1:
        # Three keys divide what is left into four parts. The least and the highest key of a token in it narrow it too.
        key1 = low + (high - low) // 4
        key2 = low + (high - low) // 2
        key3 = high - (high - low) // 4
        at1 = _value(key1.to(tl.int32))
        at2 = _value(key2.to(tl.int32))
        at3 = _value(key3.to(tl.int32))
        from1 = tl.zeros([BLOCK], tl.float32)
        from2 = tl.zeros([BLOCK], tl.float32)
        from3 = tl.zeros([BLOCK], tl.float32)
        least = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        most = tl.full([BLOCK], -0x7FFFFFFF, tl.int32)
        for first in range(0, vocab, BLOCK):
            values = _load(logits, first, vocab, BLOCK)
            weights = tl.where(values > float("-inf"), 1.0, 0.0) if COUNTED else _weight(values, peak, scale)
            from1 += tl.where(values >= at1, weights, 0.0)
            from2 += tl.where(values >= at2, weights, 0.0)
            from3 += tl.where(values >= at3, weights, 0.0)
            keys = _key(values)
            least = tl.where(keys >= low, tl.minimum(least, keys), least)
            most = tl.where(keys < high, tl.maximum(most, keys), most)
        sum1 = tl.sum(from1.to(tl.float64), axis=0)
        sum2 = tl.sum(from2.to(tl.float64), axis=0)
        sum3 = tl.sum(from3.to(tl.float64), axis=0)
        lowest = tl.min(least, axis=0).to(tl.int64)
        highest = tl.max(most, axis=0).to(tl.int64)
        low = tl.maximum(tl.maximum(low, lowest), tl.where(sum1 >= need, key1, low))
        low = tl.where(sum2 >= need, tl.maximum(low, key2), low)
        low = tl.where(sum3 >= need, tl.maximum(low, key3), low)
        high = tl.minimum(high, highest + 1)
        above = tl.where(sum3 < need, sum3, above)
        high = tl.where(sum3 < need, tl.minimum(high, key3), high)
        above = tl.where(sum2 < need, sum2, above)
        high = tl.where(sum2 < need, tl.minimum(high, key2), high)
        above = tl.where(sum1 < need, sum1, above)
        high = tl.where(sum1 < need, tl.minimum(high, key1), high)
    return _value(low.to(tl.int32)), above


@triton.jit
def _measure(logits, vocab, peak, scale, least, BLOCK: tl.constexpr):
    """Returns the weight of all tokens that are likelier than `least`, float64."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        values = _load(logits, first, vocab, BLOCK)
        sums += tl.where(values > least, _weight(values, peak, scale), 0.0)
    return tl.sum(sums.to(tl.float64), axis=0)


@triton.jit
def _draw(
    logits,
    vocab,
    peak,
    scale,
    least,
    ties,
    floor,
    number,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Inverts the cumulative distribution, in order of ids, over the tokens that are likelier than `least`, and the
    first `ties` of those that are as likely, if they weigh at least `floor`. `number` is from [0, 1)."""
    index = tl.arange(0, PADDED)
    weights = tl.zeros([PADDED], tl.float64)
    equal = tl.zeros([PADDED], tl.int32)
    for block in range(BLOCKS):
        values = _load(logits, block * BLOCK, vocab, BLOCK)
        each = _weight(values, peak, scale)
        total = tl.sum(tl.where((values > least) & (each >= floor), each, 0.0).to(tl.float64), axis=0)
        weights = tl.where(index == block, total, weights)
        equal = tl.where(index == block, tl.sum((values == least).to(tl.int32), axis=0), equal)
    # Ties are kept block by block, in order.
    before = tl.cumsum(equal, axis=0) - equal
    tie = _weight(least, peak, scale)
    tie = tl.where(tie >= floor, tie, 0.0).to(tl.float64)
    weights += tl.minimum(tl.maximum(ties - before, 0), equal).to(tl.float64) * tie
    until = tl.cumsum(weights, axis=0)
    target = tl.sum(tl.where(index == PADDED - 1, until, 0.0), axis=0) * number
    block = tl.min(tl.where((until > target) & (weights > 0), index, PADDED), axis=0)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)
    block = tl.minimum(block, last)  # rounding may leave the target at the very end
    here = index == block
    target -= tl.sum(tl.where(here, until - weights, 0.0), axis=0)
    ties -= tl.sum(tl.where(here, before, 0), axis=0)

    values = _load(logits, block * BLOCK, vocab, BLOCK)
    each = _weight(values, peak, scale)
    tied = (values == least) & (tl.cumsum((values == least).to(tl.int32), axis=0) <= ties)
    each = tl.where(((values > least) | tied) & (each >= floor), each, 0.0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.min(tl.where((tl.cumsum(each.to(tl.float64), axis=0) > target) & (each > 0), at, vocab), axis=0)
    return tl.minimum(found, tl.max(tl.where(each > 0, at, 0), axis=0))


@triton.jit
def _choose(
    logits,
    peaks,
    firsts,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    found,
    vocab,
    stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A program chooses the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    index = tl.arange(0, PADDED)
    highest = tl.load(peaks + row * BLOCKS + index, mask=index < BLOCKS, other=float("-inf"))
    peak = tl.max(highest, axis=0)
    candidates = tl.load(firsts + row * BLOCKS + index, mask=index < BLOCKS, other=vocab)
    chosen = tl.min(tl.where(highest == peak, candidates, vocab), axis=0)
    heat = tl.load(temperature + row).to(tl.float64)
    if (heat > 0) & (tl.abs(peak) < float("inf")):
        # The factor, log2(e) / temperature, is bounded so that its product with zero is never NaN.
        scale = tl.minimum(1.4426950408889634 / heat, 1e30).to(tl.float32)
        least = tl.full((), float("-inf"), tl.float32)
        ties = tl.full((), 0, tl.int32)
        k = tl.load(top_k + row)
        if (k > 0) & (k < vocab):
            least, above = _search(logits, vocab, peak, scale, _key(least), k, COUNTED=True, BLOCK=BLOCK)
            ties = k.to(tl.int32) - above.to(tl.int32)
        p = tl.load(top_p + row).to(tl.float64)
        if p < 1:
            share = _measure(logits, vocab, peak, scale, least, BLOCK=BLOCK)
            share = p * (share + ties.to(tl.float64) * _weight(least, peak, scale).to(tl.float64))
            kept, above = _search(logits, vocab, peak, scale, _key(least), share, COUNTED=False, BLOCK=BLOCK)
            # The quotient is rounded up.
            needed = (share - above) / tl.maximum(_weight(kept, peak, scale).to(tl.float64), 1e-60)
            whole = tl.minimum(needed, vocab).to(tl.int32)
            whole += (whole < needed).to(tl.int32)
            ties = tl.where(kept == least, tl.minimum(ties, whole), whole)
            least = kept
        floor = tl.load(min_p + row).to(tl.float32)
        number = tl.load(uniform + row).to(tl.float64)
        chosen = _draw(
            logits,
            vocab,
            peak,
            scale,
            least,
            ties,
            floor,
            number,
            BLOCK=BLOCK,
            BLOCKS=BLOCKS,
            PADDED=PADDED,
        )
    tl.store(found + row, chosen.to(tl.int64))
