"""Measured costs, which decide whether to move memory or to compute it again."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median_low


class Rates:
    """The costs of moving and computing, in seconds: medians of the last measurements, so that a single slow one (a
    page fault, a pause of the machine) has no effect. `None` until measured.

    A tier that seems too slow is used again from time to time, since it would otherwise never be measured again; see
    `retry`.
    """

    KEPT = 9
    """The number of measurements of each kind."""
    RETRIED = 16
    """The number of rejections after which a tier is used again."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        self._refused: Counter[str] = Counter()

    def note(self, what: str, amount: int, seconds: float) -> None:
        """Records that `amount` tokens or bytes took `seconds`."""
        if amount > 0 and seconds > 0:
            self._recent.setdefault(what, deque(maxlen=self.KEPT)).append(seconds / amount)

    def get(self, what: str) -> float | None:
        """Returns the seconds for one token or byte."""
        recent = self._recent.get(what)
        return median_low(recent) if recent else None

    def worth(self, tier: str, size: int, tokens: int) -> bool:
        """Whether bringing back `size` bytes from a tier takes less time than computing `tokens`; True until both are
        measured."""
        copying, computing = self.get(tier), self.get("compute")
        return copying is None or computing is None or size * copying < tokens * computing

    def retry(self, tier: str) -> bool:
        """Counts a rejection of a tier, and returns whether to use the tier nevertheless, to measure it again."""
        self._refused[tier] += 1
        return self._refused[tier] % self.RETRIED == 0
