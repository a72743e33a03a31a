"""Statistics of repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of `values`. Raises `statistics.StatisticsError` if they are empty."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_median(cls, values: Sequence[float]) -> Spread:
        """Returns the median of `values`, and the bounds between which the median of all possible measurements lies 95
        times of 100, whatever their distribution (the sign test's interval); the extremes if there are too few."""
        ordered, outside = sorted(values), 0
        while sum(math.comb(len(ordered), k) for k in range(outside + 1)) <= 0.025 * 2 ** len(ordered):
            outside += 1
        least = max(0, outside - 1)
        return cls(statistics.median(ordered), ordered[least], ordered[-1 - least])

    def scaled(self, factor: float) -> Spread:
        """Returns the spread multiplied by `factor`, to change the unit."""
        return Spread(factor * self.median, factor * self.low, factor * self.high)

    def shown(self, form: str = ".1f") -> str:
        """Formats the median, followed by minimum and maximum in brackets if they differ."""
        if self.low == self.high:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


def repeated(measure: Callable[[], float], times: int) -> Spread:
    """Returns the spread of `times` measurements, after one that does not count."""
    measure()
    return Spread.of([measure() for _ in range(times)])
