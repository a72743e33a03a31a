"""Room that is set aside for pinned sessions, whose memory never yields."""

from __future__ import annotations

import numpy as np

from tenuto.base.errors import Overloaded
from tenuto.memory.memory import Memory, session_units
from tenuto.memory.rows import Longs


class Pins:
    """Units set aside of each group: for every pinned session, what it takes when it is as long as it may become.

    Invariant: beside them the longest turn fits that any session may have. So nobody ever waits for a pinned session to
    yield.
    """

    def __init__(self, memory: Memory, context_length: int) -> None:
        self._memory = memory
        longest = min(context_length, memory.max_length)
        turn = memory.turn_units(longest, generates=True)
        self._most = np.array([pool.capacity - n for pool, n in zip(memory.pools, turn, strict=True)], np.int64)
        self._taken = np.zeros(len(memory.pools), np.int64)

    def of(self, limit: int) -> Longs:
        """Units of each group for a session of up to `limit` tokens, int64 [groups]."""
        spec = self._memory.spec
        return np.array([session_units(group, spec.page_size, limit) for group in spec.groups], np.int64)

    def require(self, limit: int) -> None:
        """Raises `Overloaded` unless one more session of up to `limit` tokens may be pinned."""
        wanted = self._taken + self.of(limit)
        for pool, units, most in zip(self._memory.pools, wanted.tolist(), self._most.tolist(), strict=True):
            if units > most:
                raise Overloaded(
                    f"pinned sessions would take {units} units of {pool.name}; allowed: {max(0, most)}, so that any"
                    " turn fits beside them; close one, or give fewer max_tokens"
                )

    def add(self, limit: int) -> None:
        """A pinned session of up to `limit` tokens is open now."""
        self._taken += self.of(limit)

    def remove(self, limit: int) -> None:
        """It is closed."""
        self._taken -= self.of(limit)
