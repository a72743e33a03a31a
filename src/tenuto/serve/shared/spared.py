"""Open turns that count at other replicas."""

from __future__ import annotations

import asyncio
from collections import Counter

from tenuto.serve.shared.live_turn import LiveTurn


class SparedTurns:
    """Open turns that this replica does not count, since another one does: those that have moved there, and for a while
    those that have come from there.

    Invariant: `counts` has the number of `_turns`, by tenant.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.after = 0.0  # seconds after which a turn that came counts here; set by the fleet
        self._turns: set[LiveTurn] = set()

    def add(self, turn: LiveTurn) -> None:
        """Spares a turn that has moved to another replica, unless it has ended."""
        if not turn.ended and turn not in self._turns:
            self._turns.add(turn)
            self.counts[turn.tenant] += 1

    def came(self, turn: LiveTurn) -> None:
        """Spares a turn that has come from another replica, which may have told the fleet of it a moment ago. So it
        counts here a little later."""
        self.add(turn)
        asyncio.get_running_loop().call_later(self.after, self.count, turn)

    def count(self, turn: LiveTurn) -> None:
        """Counts a turn that was spared, unless it runs at another replica."""
        if turn in self._turns and (turn.ended or turn.elsewhere is None):
            self._turns.remove(turn)
            self.counts[turn.tenant] -= 1
