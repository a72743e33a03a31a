"""Rotary position embedding: Su et al., arXiv:2104.09864."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import ModelError


@dataclass(frozen=True, slots=True)
class Rope:
    """How heads are rotated: of `n` pairs, as many as divisors, pair `i` by `theta ** (-i / n) / divisors[i]` radians a
    token. Every supported kind of rope scaling is a set of divisors. Elements of a head beyond its pairs stay as they
    are. Rotated ones are multiplied by `magnitude`. `long_divisors`, if there are any, take the place of `divisors`
    where contexts may be longer than `original_context` tokens."""

    theta: float
    divisors: tuple[float, ...] = field(repr=False)
    magnitude: float = 1.0
    long_divisors: tuple[float, ...] = field(default=(), repr=False)
    original_context: int = 0

    def __post_init__(self) -> None:
        if not self.theta > 0:  # NaN is refused, too
            raise ModelError(f"the model's rope theta is {self.theta}; allowed: more than 0")
        if not self.divisors or min(*self.divisors, *self.long_divisors, 1.0) <= 0:
            raise ModelError("the model's rope divisors are not all there and more than 0")
        if self.long_divisors and len(self.long_divisors) != len(self.divisors):
            raise ModelError(
                f"the model has {len(self.divisors)} rope divisors for short contexts and {len(self.long_divisors)} "
                "for long ones; expected: as many"
            )

    def within(self, context: int) -> Rope:
        """The rope where no session has more than `context` tokens. It is chosen once and not by a session's length:
        keys in memory were rotated by what it was when they were computed."""
        chosen = self.long_divisors if self.long_divisors and context > self.original_context else self.divisors
        return Rope(self.theta, chosen, self.magnitude)

    @property
    def rotated(self) -> int:
        """The leading elements of a head that are rotated."""
        return 2 * len(self.divisors)

    def frequencies(self) -> npt.NDArray[np.float32]:
        """Radians a token of each pair, float32 [pairs]."""
        exponents = np.arange(0, self.rotated, 2, dtype=np.float32) / np.float32(self.rotated)
        # In float32 and in this order of operations, as the reference the checkpoints were trained with.
        powers = np.power(self.theta, exponents, dtype=np.float64).astype(np.float32)
        frequencies: npt.NDArray[np.float32] = 1 / powers / np.array(self.divisors, np.float32)
        return frequencies


MOST_ROTATED = 2**16
"""Elements of a head. No model comes near, and there is a divisor for every other one."""


def linear_divisors(rotated: int, factor: float) -> tuple[float, ...]:
    """Divisors that slow every frequency by `factor` (position interpolation, arXiv:2306.15595); 1.0 is no scaling."""
    if not 2 <= rotated <= MOST_ROTATED or rotated % 2:
        raise ModelError(
            f"{rotated} elements of a head are to be rotated; allowed: an even number from 2 to {MOST_ROTATED}"
        )
    return (float(factor),) * (rotated // 2)


def llama3_divisors(
    rotated: int, theta: float, factor: float, low_factor: float, high_factor: float, original_context: int
) -> tuple[float, ...]:
    """Divisors of the Llama 3.1 rope scaling.

    Waves longer than `original_context / low_factor` tokens are slowed by `factor`, those shorter than
    `original_context / high_factor` are kept, and frequencies between are interpolated linearly in the number of
    turns they make within the original context. Source: `apply_scaling` in Meta's `llama-models`.
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
    """Divisors of YaRN (Peng et al., arXiv:2309.00071, section 3.2).

    Pairs that make more than `fast` turns within the original context are kept, those that make fewer than `slow` are
    slowed by `factor`, and those between are interpolated linearly in their number; with `whole` the numbers where that
    begins and ends are rounded outwards.
    """
    pairs = len(linear_divisors(rotated, 1.0))
    first, last = (
        rotated * math.log(original_context / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (fast, slow)
    )
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first if last != first else 0.001  # as the reference: no division by zero
    kept = [1 - min(max((i - first) / width, 0.0), 1.0) for i in range(pairs)]
    return tuple(1 / ((1 - share) / factor + share) for share in kept)


def yarn_magnitude(factor: float, scale: float | None = None, scale_all: float | None = None) -> float:
    """What YaRN multiplies queries and keys by (section 3.4): the ratio of two such numbers if both scales are given,
    as DeepSeek's files have them."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return of(scale) / of(scale_all) if scale and scale_all else of(1.0)


def longrope_magnitude(factor: float, original_context: int) -> float:
    """What LongRoPE (Ding et al., arXiv:2402.13753) multiplies queries and keys by, if a model does not say, `factor`
    being how many times the context has been extended."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0
