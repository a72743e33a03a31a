"""Which checkpoint to give up first: the one whose loss adds the least replay, for how long ago it was."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import log2

from tenuto.memory.checkpoints.checkpoint import Checkpoint

PER_OCTAVE = 4
"""Classes of gaps whose sizes differ by less than a factor of two."""
DEAD_ENTRIES = 64
"""How many entries of checkpoints that have left may wait in the heaps, besides as many as there are others."""

Entry = tuple[int, int, Checkpoint]
"""What it is sorted by, its age's beginning; a number that tells whether it still counts; and the checkpoint."""


class Thinning:
    """The order in which cached checkpoints are given up.

    Without a checkpoint, whoever resumes between the one *below* it on its line and the one *above* replays up to that
    whole *gap*. The order is by gap over *age*: what has been computed, in tokens and by anybody, since the checkpoint
    above was made and this one was last needed. So the gaps that remain grow in proportion to how long ago they are, a
    long session keeps some checkpoints from everywhere in it, and of equal gaps the older goes first, whoever's it is.

    A bound follows. Let a session of L tokens have k checkpoints left, the last turn's apart, in which T tokens are.
    Some gap is then at most ((L / T) ^ (2 / k) - 1) times its distance from the end, since k / 2 disjoint gaps that are
    all larger would be longer than the session together. So if nobody else computes, a rewind by d tokens replays at
    most about that factor times d; see `tests/engine/test_thinning.py`.

    Checkpoints are sorted in classes of about equal gaps, by age within each: there only the oldest can be the first.
    A gap that grows, and an age that begins anew, are noticed when the checkpoint is the first of its class: both only
    move it back. Each of its moves raises its class or is paid for by the one that caused it, so giving one up takes
    work for every class there is, and a logarithm.

    Invariant: `_numbers` has the checkpoints that may be given up, with the number of the entry that counts. Of any
    checkpoint that has not ended `branches` counts those right above it, of all lines; `reach` and `reached` are at
    least the position of the farthest, and the time when the last of them was made. All are written here.
    """

    def __init__(self) -> None:
        self._now = 0  # tokens up to checkpoints from those below them, over all that were made
        self._classes: list[list[Entry]] = []  # heaps
        self._numbers: dict[Checkpoint, int] = {}
        self._next_number = count()
        self._entries = 0  # in all heaps
        self.looked = 0  # entries looked at or moved, ever: the work done

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._numbers

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._numbers)

    # -- lines

    def made(self, checkpoint: Checkpoint) -> None:
        """The checkpoint was made, after the one it names as below it."""
        below = self._below(checkpoint)
        self._now += checkpoint.position - (below.position if below is not None else 0)
        checkpoint.reach, checkpoint.reached = checkpoint.position, self._now
        if below is not None:
            below.branches += 1
            below.reach, below.reached = max(below.reach, checkpoint.position), self._now

    def ended(self, checkpoint: Checkpoint) -> None:
        """The checkpoint is no more: those above it come after the one below."""
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
        """The nearest one below on its line that has not ended. Shortens the way there for the next time."""
        found = checkpoint.below
        while found is not None and found.ended:
            found = found.below
        passed: Checkpoint | None = checkpoint
        while passed is not None and passed.below is not found:
            passed.below, passed = found, passed.below
        return found

    # -- the order

    def add(self, checkpoint: Checkpoint) -> None:
        """Nobody needs it from now on."""
        checkpoint.needed_at = self._now
        self._enter(checkpoint)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Somebody needs it, or it is given up."""
        del self._numbers[checkpoint]

    def put_back(self, checkpoint: Checkpoint) -> None:
        """It was passed over, that is discarded, and is there as before."""
        self._enter(checkpoint)

    def gap(self, checkpoint: Checkpoint) -> int:
        """The most tokens that are replayed without it, by whoever resumes at or after it."""
        below = self._below(checkpoint)
        return checkpoint.reach - (below.position if below is not None else 0)

    def age(self, checkpoint: Checkpoint) -> int:
        """Tokens that have been computed since it was last needed, and the one above it made."""
        return self._now - self._since(checkpoint)

    @staticmethod
    def _since(checkpoint: Checkpoint) -> int:
        return max(checkpoint.needed_at, checkpoint.reached)

    def heads(self) -> list[Checkpoint]:
        """The oldest of every class of gaps; those to be given up first come first."""
        heads = []
        place = 0
        while place < len(self._classes):  # entries may move to a later class meanwhile
            head = self._head(place)
            if head is not None:
                heads.append(head)
            place += 1
        return sorted(heads, key=lambda head: self.gap(head) / (self.age(head) + 1))

    def _head(self, place: int) -> Checkpoint | None:
        """The oldest of a class, once the entries before it that are dead or belong elsewhere have left."""
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
        """Make the entry that counts from now on."""
        place = self._class(checkpoint)
        self._classes += [[] for _ in range(place + 1 - len(self._classes))]
        self._numbers[checkpoint] = number = next(self._next_number)
        heappush(self._classes[place], (self._since(checkpoint), number, checkpoint))
        self._entries += 1
        self.looked += 1
        if self._entries > 2 * len(self._numbers) + DEAD_ENTRIES:
            self._bury()

    def _bury(self) -> None:
        """Take out the entries that do not count."""
        self.looked += self._entries
        for heap in self._classes:
            heap[:] = [entry for entry in heap if self._numbers.get(entry[2]) == entry[1]]
            heapify(heap)
        self._entries = len(self._numbers)
