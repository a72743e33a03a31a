"""The order of eviction of cached checkpoints: first the one whose loss adds the least replay, relative to its age."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import log2

from tenuto.memory.checkpoints.checkpoint import Checkpoint

PER_OCTAVE = 4
"""The number of classes for gaps whose sizes differ by less than a factor of two."""
DEAD_ENTRIES = 64
"""The number of dead entries that may stay in the heaps, in addition to one for each live entry."""

Entry = tuple[int, int, Checkpoint]
"""The time at which the checkpoint's age begins, by which entries are sorted; the number of the entry, which is live if
`Thinning._numbers` has that number; and the checkpoint."""


class Thinning:
    """The order in which cached checkpoints are evicted.

    The checkpoints of a sequence and its forks form a tree; a path in it is a *line*. Without a checkpoint, a sequence
    that resumes between the one *below* it on its line and the one *above* replays up to the whole *gap* between these.
    The order is by gap divided by *age*: the tokens that all sequences have computed since the checkpoint above was
    made and this one was last needed. So gaps grow in proportion to their age, and a long session keeps checkpoints
    from all of its parts. Ties evict the older checkpoint, regardless of session.

    A bound follows. Let a session of L tokens have k checkpoints left, not counting those in its last turn of T tokens.
    Some gap is then at most ((L / T) ^ (2 / k) - 1) times its distance from the end, since k / 2 disjoint gaps that are
    all larger would together be longer than the session. So if no other session computes, a rewind by d tokens replays
    at most about that factor times d; see `tests/engine/test_thinning.py`.

    Checkpoints are in classes of about equal gaps, sorted by age, so only the oldest of a class can be first in the
    order. When a gap grows or an age begins anew, the checkpoint only moves back, so both are noticed when it is the
    first of its class. Each move raises its class or is paid for by the event that caused it. So one eviction costs
    work for every class, plus a logarithm.

    Invariant: `_numbers` has the checkpoints that may be evicted, with the number of their live entry. For a checkpoint
    that has not ended, `branches` counts the checkpoints right above it on all lines. `reach` is at least the position
    of the farthest of these, and `reached` at least the time when the last was made. This class alone writes these
    fields.
    """

    def __init__(self) -> None:
        self._now = 0  # the time: total tokens between all checkpoints ever made and the ones below them
        self._classes: list[list[Entry]] = []  # heaps
        self._numbers: dict[Checkpoint, int] = {}
        self._next_number = count()
        self._entries = 0  # the number of entries in all heaps
        self.looked = 0  # total number of entries looked at or moved: a measure of work

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._numbers

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._numbers)

    # -- lines

    def made(self, checkpoint: Checkpoint) -> None:
        """Records a new checkpoint, which names the one below it."""
        below = self._below(checkpoint)
        self._now += checkpoint.position - (below.position if below is not None else 0)
        checkpoint.reach, checkpoint.reached = checkpoint.position, self._now
        if below is not None:
            below.branches += 1
            below.reach, below.reached = max(below.reach, checkpoint.position), self._now

    def ended(self, checkpoint: Checkpoint) -> None:
        """Records the end of a checkpoint: those above it now come after the one below."""
        checkpoint.ended = True
        below = self._below(checkpoint)
        if below is None:
            return
        below.branches += checkpoint.branches - 1
        if below.branches:
            below.reach = max(below.reach, checkpoint.reach)
            below.reached = max(below.reached, checkpoint.reached)
        else:
            below.reach = below.position
            if below in self:
                self._enter(below)  # its gap has shrunk

    def _below(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Returns the nearest checkpoint below on its line that has not ended. Shortens the path for later calls."""
        found = checkpoint.below
        while found is not None and found.ended:
            found = found.below
        passed: Checkpoint | None = checkpoint
        while passed is not None and passed.below is not found:
            passed.below, passed = found, passed.below
        return found

    # -- the order

    def add(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint that no sequence needs any more."""
        checkpoint.needed_at = self._now
        self._enter(checkpoint)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Removes a checkpoint that is needed again, evicted or skipped."""
        del self._numbers[checkpoint]

    def put_back(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint that was discarded only to skip it; its age is as before."""
        self._enter(checkpoint)

    def gap(self, checkpoint: Checkpoint) -> int:
        """Returns the most tokens that a sequence which resumes at or after the checkpoint replays without it."""
        below = self._below(checkpoint)
        return checkpoint.reach - (below.position if below is not None else 0)

    def age(self, checkpoint: Checkpoint) -> int:
        """Returns the number of tokens computed since it was last needed and the one above it was made."""
        return self._now - self._since(checkpoint)

    @staticmethod
    def _since(checkpoint: Checkpoint) -> int:
        return max(checkpoint.needed_at, checkpoint.reached)

    def heads(self) -> list[Checkpoint]:
        """Returns the oldest checkpoint of every class of gaps, in the order of eviction."""
        heads = []
        place = 0
        while place < len(self._classes):  # entries may move to a later class meanwhile
            head = self._head(place)
            if head is not None:
                heads.append(head)
            place += 1
        return sorted(heads, key=lambda head: self.gap(head) / (self.age(head) + 1))

    def _head(self, place: int) -> Checkpoint | None:
        """Returns the oldest checkpoint of a class. Removes dead entries before it, and moves those whose class or age
        has changed."""
        heap = self._classes[place]
        while heap:
            self.looked += 1
            since, number, checkpoint = heap[0]
            if self._numbers.get(checkpoint) == number:
                if since == self._since(checkpoint) and place == self._class(checkpoint):
                    return checkpoint
                self._enter(checkpoint)  # the old entry is dead
                continue
            heappop(heap)
            self._entries -= 1
        return None

    def _class(self, checkpoint: Checkpoint) -> int:
        return int(PER_OCTAVE * log2(self.gap(checkpoint)))

    def _enter(self, checkpoint: Checkpoint) -> None:
        """Makes the checkpoint's live entry; an earlier entry is dead from now on."""
        place = self._class(checkpoint)
        self._classes += [[] for _ in range(place + 1 - len(self._classes))]
        self._numbers[checkpoint] = number = next(self._next_number)
        heappush(self._classes[place], (self._since(checkpoint), number, checkpoint))
        self._entries += 1
        self.looked += 1
        if self._entries > 2 * len(self._numbers) + DEAD_ENTRIES:
            self._bury()

    def _bury(self) -> None:
        """Removes all dead entries."""
        self.looked += self._entries
        for heap in self._classes:
            heap[:] = [entry for entry in heap if self._numbers.get(entry[2]) == entry[1]]
            heapify(heap)
        self._entries = len(self._numbers)
