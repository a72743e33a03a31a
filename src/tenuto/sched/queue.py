"""Turns that wait for a row: by priority, raised by waiting."""

from __future__ import annotations

import heapq
from itertools import count

from tenuto.session.turn import Turn, TurnState

DRAFT_PENALTY = 1e12
"""Seconds by which a draft ranks behind every turn that someone waits for."""

Rank = tuple[float, int]


def rank(turn: Turn, aging_seconds: float) -> Rank:
    """Sorts turns, waiting or running: the lower rank runs first and yields last.

    A turn's effective priority is its priority plus one for every `aging_seconds` since it arrived. All turns age
    alike, so the order of two turns never changes, and arrival minus `aging_seconds` times priority sorts them once and
    for all."""
    behind = DRAFT_PENALTY if turn.state is TurnState.DRAFTING else 0.0
    return turn.arrival - turn.priority * aging_seconds + behind, turn.number


class WaitingQueue:
    """A heap of turns that want a row. Entries of turns that were removed or moved are skipped when they surface."""

    def __init__(self, aging_seconds: float) -> None:
        self.aging_seconds = aging_seconds
        self._heap: list[tuple[Rank, int, Turn]] = []
        self._live: dict[int, int] = {}  # turn number -> its live entry
        self._drafts: set[int] = set()
        self._entries = count()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def submitted(self) -> int:
        """How many of them are no drafts."""
        return len(self._live) - len(self._drafts)

    def __contains__(self, turn: Turn) -> bool:
        return turn.number in self._live

    def push(self, turn: Turn) -> None:
        """Queue it at its present rank."""
        entry = next(self._entries)
        heapq.heappush(self._heap, (rank(turn, self.aging_seconds), entry, turn))
        self._live[turn.number] = entry
        if turn.state is TurnState.DRAFTING:
            self._drafts.add(turn.number)
        else:
            self._drafts.discard(turn.number)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [item for item in self._heap if self._live.get(item[2].number) == item[1]]
            heapq.heapify(self._heap)

    def remove(self, turn: Turn) -> None:
        """It no longer waits."""
        self._live.pop(turn.number, None)
        self._drafts.discard(turn.number)

    def first(self) -> Turn | None:
        """The next to run, left in the queue."""
        while self._heap:
            _, entry, turn = self._heap[0]
            if self._live.get(turn.number) == entry:
                return turn
            heapq.heappop(self._heap)
        return None
