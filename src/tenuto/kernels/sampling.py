"""Options and random numbers for sampling tokens, and penalties on logits. `torch_sampling` and `native.sampling`
sample: each row by its own options, and by a random number that does not depend on other rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


OPTIONS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.int64),
    ]
)
"""Sampling options of a row, see `Choice`, and the seed of its random numbers."""

Options = npt.NDArray[np.void]
"""Records of `OPTIONS`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Sampling options and random numbers of a batch, one entry per row, on the host.

    `temperature` is float64 (0: greedy), `top_k` int64 (0: all), `top_p` float64 in (0, 1], `min_p` float64 in [0, 1]
    (0: all), and `uniform` float64 in [0, 1). Options are those of `base.sampling.Sampling`: temperature is applied
    first, then top-k. Top-p is a share of the probability that top-k leaves, and min-p is relative to the likeliest
    token.
    """

    temperature: Floats
    top_k: Longs
    top_p: Floats
    min_p: Floats
    uniform: Floats

    def rows(self, chosen: Longs) -> Choice:
        """Returns the options of some rows."""
        return Choice(
            self.temperature[chosen], self.top_k[chosen], self.top_p[chosen], self.min_p[chosen], self.uniform[chosen]
        )


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that some rows of a batch may sample: `rows`, int64 [n], and `words`, uint32 [n, words], in which bit
    `t % 32` of word `t // 32` allows token t. Tokens behind the last word are not allowed. On the host."""

    rows: Longs
    words: Words


def uniforms(seeds: Longs, positions: Longs) -> Floats:
    """Returns a random number in [0, 1), float64 [n], for each seed and position, both int64 [n] and at least 0.

    It is stateless: the number is element `position` of a SplitMix64 sequence (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014) that starts from the mixed seed. It has 52 bits, so that its product
    with a total weight is less than that total also after rounding.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seeds.astype(np.uint64) + step) + (positions.astype(np.uint64) + np.uint64(1)) * step
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Computes the output function of SplitMix64; arithmetic is modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def penalise(logits: Singles, counts: Longs, repetition: Singles, presence: Singles, frequency: Singles) -> Singles:
    """Applies the penalties of `base.sampling.Sampling` to logits of tokens in the history, input or output. All arrays
    have one entry per logit: `counts`, the occurrences of the token in this turn's output, and the penalties of its
    row."""
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    return repeated - frequency * counts.astype(np.float32) - presence * (counts > 0)
