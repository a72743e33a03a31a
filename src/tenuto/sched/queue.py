"""The queue of turns that wait for a row. Each tenant's turns are ordered by priority, which rises while they wait."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from tenuto.session.turn import Rank, Turn

Entry = tuple[Rank, int, Turn]


class WaitingQueue:
    """One heap of waiting turns per tenant. Entries of turns that were removed or queued again are skipped when they
    reach the top, and dropped when there are many, since a turn may have a long input."""

    def __init__(self, aging_seconds: float) -> None:
        self.aging_seconds = aging_seconds
        self._heaps: dict[str, list[Entry]] = {}  # by tenant; empty heaps are removed
        self._live: dict[int, int] = {}  # turn number -> its live entry
        self._drafts: set[int] = set()
        self._listed = 0  # entries in all heaps
        self._entries = count()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def submitted(self) -> int:
        """Number of waiting turns, excluding drafts."""
        return len(self._live) - len(self._drafts)

    def __contains__(self, turn: Turn) -> bool:
        return turn.number in self._live

    def push(self, turn: Turn) -> None:
        """Queues a turn at its present rank; a turn queued before moves."""
        entry = next(self._entries)
        heap = self._heaps.setdefault(turn.session.policy.tenant, [])
        heapq.heappush(heap, (turn.rank(self.aging_seconds), entry, turn))
        self._listed += 1
        self._live[turn.number] = entry
        if turn.drafting:
            self._drafts.add(turn.number)
        else:
            self._drafts.discard(turn.number)
        self._tidy()

    def _tidy(self) -> None:
        """Drops the entries of turns that are gone if there are many, or if nothing waits."""
        if self._listed > (2 * len(self._live) + 64 if self._live else 0):
            self._rebuild()

    def _rebuild(self) -> None:
        live = {tenant: [item for item in heap if self._is_live(item)] for tenant, heap in self._heaps.items()}
        self._heaps = {tenant: heap for tenant, heap in live.items() if heap}
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._listed = sum(map(len, self._heaps.values()))

    def remove(self, turn: Turn) -> None:
        """Removes a turn; does nothing if it is not queued."""
        self._live.pop(turn.number, None)
        self._drafts.discard(turn.number)
        self._tidy()

    def heads(self) -> Iterator[Turn]:
        """Yields the first turn of each tenant without removing it."""
        for tenant, heap in list(self._heaps.items()):
            while heap and not self._is_live(heap[0]):
                heapq.heappop(heap)
                self._listed -= 1
            if heap:
                yield heap[0][2]
            else:
                self._heaps.pop(tenant, None)

    def _is_live(self, item: Entry) -> bool:
        _, entry, turn = item
        return self._live.get(turn.number) == entry
