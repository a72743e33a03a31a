"""Rotary position embedding: Su et al., arXiv:2104.09864."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import ModelError


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of heads: pair `i` of `n` is rotated by `theta ** (-i / n) / divisors[i]` radians per token, where
    `n` is the number of divisors. Every supported kind of rope scaling is a set of divisors. Rotated elements are
    multiplied by `magnitude`; elements beyond the pairs are unchanged. `long_divisors`, if given, replace `divisors`
    for contexts longer than `original_context` tokens."""

    theta: float
    divisors: tuple[float, ...] = field(repr=False)
    magnitude: float = 1.0
    long_divisors: tuple[float, ...] = field(default=(), repr=False)
    original_context: int = 0

    def __post_init__(self) -> None:
        if not self.theta > 0:  # NaN is refused, too
            raise ModelError(f"the model's rope theta is {self.theta}; allowed: more than 0")
        if not self.divisors or min(*self.divisors, *self.long_divisors, 1.0) <= 0:
            raise ModelError("the model's rope divisors are missing or not all positive")
        if self.long_divisors and len(self.long_divisors) != len(self.divisors):
            raise ModelError(
                f"the model has {len(self.divisors)} rope divisors for short contexts and {len(self.long_divisors)} "
                "for long ones; expected: the same number"
            )

    def within(self, context: int) -> Rope:
        """Returns the rope for sessions of at most `context` tokens. It must not depend on a session's present length,
        because keys in memory keep the rotation they were computed with."""
        chosen = self.long_divisors if self.long_divisors and context > self.original_context else self.divisors
        return Rope(self.theta, chosen, self.magnitude)

    @property
    def rotated(self) -> int:
        """Number of leading elements of a head that are rotated."""
        return 2 * len(self.divisors)

    def frequencies(self) -> npt.NDArray[np.float32]:
        """Returns the rotation of each pair in radians per token, float32 [pairs]."""
        exponents = np.arange(0, self.rotated, 2, dtype=np.float32) / np.float32(self.rotated)
        # Types and order of operations are those of the reference that the checkpoints were trained with.
        powers = np.power(self.theta, exponents, dtype=np.float64).astype(np.float32)
        frequencies: npt.NDArray[np.float32] = 1 / powers / np.array(self.divisors, np.float32)
        return frequencies


MOST_ROTATED = 2**16
"""Upper bound on the rotated elements of a head, far above any model's; it bounds the number of divisors."""


def linear_divisors(rotated: int, factor: float) -> tuple[float, ...]:
    """Returns divisors that slow every frequency by `factor` (position interpolation, arXiv:2306.15595); 1.0 means no
    scaling. Raises `ModelError` if `rotated` is odd or out of range."""
    if not 2 <= rotated <= MOST_ROTATED or rotated % 2:
        raise ModelError(
            f"the model's rope rotates {rotated} elements of a head; allowed: an even number from 2 to {MOST_ROTATED}"
        )
    return (float(factor),) * (rotated // 2)


def llama3_divisors(
    rotated: int, theta: float, factor: float, low_factor: float, high_factor: float, original_context: int
) -> tuple[float, ...]:
    """Returns the divisors of the Llama 3.1 rope scaling.

    Wavelengths above `original_context / low_factor` tokens are slowed by `factor`, and those below `original_context /
    high_factor` are kept. Between them, frequencies are interpolated linearly by the number of rotations within the
    original context. Source: `apply_scaling` in Meta's `llama-models`.
    """
    divisors = []
    for i in range(len(linear_divisors(rotated, 1.0))):
        turns = original_context * theta ** (-2 * i / rotated) / (2 * math.pi)
        kept = min(max((turns - low_factor) / (high_factor - low_factor), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / factor + kept))
    return tuple(divisors)


def yarn_divisors(
    rotated: int, theta: float, factor: float, original_context: int, fast: float, slow: float, *, whole: bool
) -> tuple[float, ...]:
    """Returns the divisors of YaRN (Peng et al., arXiv:2309.00071, section 3.2).

    Pairs that rotate more than `fast` times within the original context keep their frequency, and those that rotate
    fewer than `slow` times are slowed by `factor`. Frequencies between are interpolated linearly by the pair's index;
    with `whole`, the indices where interpolation begins and ends are rounded outwards.
    """
    pairs = len(linear_divisors(rotated, 1.0))
    first, last = (
        rotated * math.log(original_context / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (fast, slow)
    )
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first if last != first else 0.001  # as in the reference; avoids division by zero
    kept = [1 - min(max((i - first) / width, 0.0), 1.0) for i in range(pairs)]
    return tuple(1 / ((1 - share) / factor + share) for share in kept)


def yarn_magnitude(factor: float, scale: float | None = None, scale_all: float | None = None) -> float:
    """Returns YaRN's factor for queries and keys (section 3.4). If both scales are given, as in DeepSeek's files, it is
    the ratio of their two factors."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return of(scale) / of(scale_all) if scale and scale_all else of(1.0)


def longrope_magnitude(factor: float, original_context: int) -> float:
    """Returns LongRoPE's default factor for queries and keys (Ding et al., arXiv:2402.13753) for a context extended
    `factor` times."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0
