"""Whether to move memory or to compute it again."""

from __future__ import annotations


class Rates:
    """What moving and computing have cost so far, in seconds, as moving averages; `None` until measured."""

    WEIGHT = 0.2

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def note(self, what: str, amount: int, seconds: float) -> None:
        """`amount` tokens or bytes took `seconds`."""
        if amount > 0 and seconds > 0:
            new = seconds / amount
            self._seconds[what] = (1 - self.WEIGHT) * self._seconds.get(what, new) + self.WEIGHT * new

    def get(self, what: str) -> float | None:
        """Seconds for one token or byte."""
        return self._seconds.get(what)

    def worth(self, tier: str, size: int, tokens: int) -> bool:
        """Whether bringing back `size` bytes from a tier takes less time than computing `tokens`. Nothing is ruled out
        before it is measured."""
        copying, computing = self._seconds.get(tier), self._seconds.get("compute")
        return copying is None or computing is None or size * copying < tokens * computing
