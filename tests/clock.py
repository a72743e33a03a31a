"""A clock for tests and simulation."""

from __future__ import annotations


class ManualClock:
    """A clock that only moves by `advance`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1e9 + self._now

    def advance(self, seconds: float) -> None:
        """Jumps forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
