"""Edits of logits on a CUDA device: biases, tokens that are masked or not allowed, and penalties, with tokens counted
there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import cdiv

NO_EDITS = -1
"""In `EditedRows.masked_before`: a row without edits."""
SEEN, MASKED, REFUSED, ONCE = 1, 2, 4, 8
"""The parts of `EditedRows.words`: whether the token is in the prompt, masked before a position, and not allowed; and
what each occurrence in the output adds."""
PENALTIES = 3
"""The penalties of a row: repetition, presence, frequency; see `base.sampling.Sampling`."""

_SEEN, _MASKED, _REFUSED = tl.constexpr(SEEN), tl.constexpr(MASKED), tl.constexpr(REFUSED)
_COUNT_BITS = tl.constexpr(ONCE.bit_length() - 1)
_ONCE, _PENALTIES = tl.constexpr(ONCE), tl.constexpr(PENALTIES)
_BLOCK = 1024
"""The number of logits that a program edits."""


@dataclass(frozen=True, slots=True)
class EditedRows:
    """The edits of rows by id, on the device. `words`, int32 [row ids, vocab]: see `SEEN`. `biases`, float32 [row ids,
    vocab]. `penalties`, float32 [row ids, PENALTIES]. `masked_before`, int32 [row ids]: the first position at which
    masked tokens may be sampled, or `NO_EDITS`."""

    words: torch.Tensor
    biases: torch.Tensor
    penalties: torch.Tensor
    masked_before: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The samples of a step, on the device, int32 [samples] each: `rows`, row ids, or -1 for no sample; `positions` of
    the sampled tokens; `guesses`, the token before each sample if that is a guess, otherwise -1, as for the first one
    of a row."""

    rows: torch.Tensor
    positions: torch.Tensor
    guesses: torch.Tensor


def edit(logits: torch.Tensor, edited: EditedRows, samples: SampledRows) -> None:
    """Edits the logits of samples, float32 [samples, vocab] with contiguous rows, in place, in the order of
    `base.sampling.Sampling`. Guesses before a sample count as the row's output."""
    many, vocab = logits.shape
    _edit[(many, cdiv(vocab, _BLOCK))](
        logits,
        samples.rows,
        samples.positions,
        samples.guesses,
        edited.words,
        edited.biases,
        edited.penalties,
        edited.masked_before,
        vocab,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def count(edited: EditedRows, samples: SampledRows, tokens: torch.Tensor) -> None:
    """Adds the sampled `tokens`, int64 [samples], to those of their rows, except for samples after a wrong guess."""
    given = samples.rows, samples.guesses, tokens, edited.words, edited.masked_before
    _count[(len(tokens),)](*given, edited.words.shape[1], num_warps=1)


@triton.jit
def _edit(
    logits,
    rows,
    positions,
    guesses,
    words,
    biases,
    penalties,
    masked_before,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """A program edits BLOCK logits of one sample. Its grid is [samples, blocks]."""
    sample = tl.program_id(0)
    row = tl.load(rows + sample).to(tl.int64)
    before = tl.load(masked_before + row, row >= 0, -1)
    if before >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = at < vocab
        spot = logits + sample.to(tl.int64) * stride + at
        word = tl.load(words + row * vocab + at, there, 0)
        value = tl.load(spot, there, 0.0) + tl.load(biases + row * vocab + at, there, 0.0)
        masked = ((word & _MASKED) != 0) & (tl.load(positions + sample) < before)
        value = tl.where(masked, float("-inf"), value)
        times = word >> _COUNT_BITS
        place = sample
        guess = tl.load(guesses + place)
        while guess >= 0:
            times += (at == guess).to(tl.int32)
            place -= 1
            guess = tl.load(guesses + place)
        repetition = tl.load(penalties + row * _PENALTIES)
        presence = tl.load(penalties + row * _PENALTIES + 1)
        frequency = tl.load(penalties + row * _PENALTIES + 2)
        penalised = tl.where(value > 0, value / repetition, value * repetition)
        penalised -= frequency * times.to(tl.float32)
        penalised -= tl.where(times > 0, presence, 0.0)
        value = tl.where(((word & _SEEN) != 0) | (times > 0), penalised, value)
        tl.store(spot, tl.where((word & _REFUSED) != 0, float("-inf"), value), there)


@triton.jit
def _count(rows, guesses, tokens, words, masked_before, vocab):
    """A program counts one sample. Its grid is [samples]."""
    place = tl.program_id(0)
    row = tl.load(rows + place).to(tl.int64)
    token = tl.load(tokens + place)
    counted = tl.load(masked_before + row, row >= 0, -1) >= 0
    guess = tl.load(guesses + place)
    while guess >= 0:
        place -= 1
        counted = counted & (tl.load(tokens + place) == guess)
        guess = tl.load(guesses + place)
    tl.atomic_add(words + row * vocab + token, _ONCE, counted)
