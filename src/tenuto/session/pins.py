"""Memory that is reserved for pinned sessions, which never yield it."""

from __future__ import annotations

import numpy as np

from tenuto.base.errors import Overloaded
from tenuto.memory.memory import Memory, session_units
from tenuto.memory.rows import Longs


class Pins:
    """Units of each group that are reserved for pinned sessions: for each session, the units it needs at its greatest
    allowed length.

    Invariant: the longest possible turn fits beside the reserved units. So no turn ever waits for a pinned session to
    yield.
    """

    def __init__(self, memory: Memory, context_length: int) -> None:
        self._memory = memory
        longest = min(context_length, memory.max_length)
        turn = memory.turn_units(longest, generates=True)
        self._most = np.array([pool.capacity - n for pool, n in zip(memory.pools, turn, strict=True)], np.int64)
        self._taken = np.zeros(len(memory.pools), np.int64)

    def of(self, limit: int) -> Longs:
        """Returns the units of each group for a session of up to `limit` tokens, int64 [groups]."""
        spec = self._memory.spec
        return np.array([session_units(group, spec.page_size, limit) for group in spec.groups], np.int64)

    def require(self, limit: int) -> None:
        """Raises `Overloaded` unless one more session of up to `limit` tokens may be pinned."""
        wanted = self._taken + self.of(limit)
        for pool, units, most in zip(self._memory.pools, wanted.tolist(), self._most.tolist(), strict=True):
            if units > most:
                raise Overloaded(
                    f"pinned sessions would take {units} units of {pool.name}; allowed: {max(0, most)}, so that any"
                    " turn fits beside them; close a pinned session, or use a smaller max_tokens"
                )

    def add(self, limit: int) -> None:
        """Reserves the units of a pinned session of up to `limit` tokens, which has been opened."""
        self._taken += self.of(limit)

    def remove(self, limit: int) -> None:
        """Frees the units of a pinned session of up to `limit` tokens, which has been closed."""
        self._taken -= self.of(limit)
