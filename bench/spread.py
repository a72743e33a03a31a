"""Statistics of repeated measurements."""

from __future__ import annotations

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
