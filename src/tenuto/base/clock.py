"""Clocks. They are passed in, so that tests and the simulator control time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes back."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""

    def wall(self) -> float:
        """Seconds since the epoch. They can be compared between processes, but may go back."""


class SystemClock:
    """The operating system's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
