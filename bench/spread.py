"""Repeated measurements as one figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several measurements, the smallest and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises `statistics.StatisticsError` if there are none."""
        return cls(statistics.median(values), min(values), max(values))

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(factor * self.median, factor * self.low, factor * self.high)

    def shown(self, form: str = ".1f") -> str:
        """Median, and smallest and greatest in brackets if they differ."""
        if self.low == self.high:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


def repeated(measure: Callable[[], float], times: int) -> Spread:
    """The spread of `times` measurements, after one that does not count."""
    measure()
    return Spread.of([measure() for _ in range(times)])
