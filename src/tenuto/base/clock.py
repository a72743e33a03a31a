"""Time is passed in, so that tests and the simulator can jump it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes back."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, as clocks on walls tell it: comparable between processes, but it may be set
        back."""
        ...


class SystemClock:
    """The operating system's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
