"""The checkpoints that one sequence refers to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from tenuto.memory.checkpoints.cache import CheckpointCache
from tenuto.memory.checkpoints.checkpoint import Checkpoint

TIDY = 16
"""The number of evicted checkpoints that may always stay in the list."""
_position = attrgetter("position")


class Checkpoints:
    """The checkpoints that one sequence refers to, by position. `needed` is the one it has pinned, if any; the others
    may be evicted at any time, and are then left out."""

    def __init__(self, cache: CheckpointCache) -> None:
        self._cache = cache
        self._listed: list[Checkpoint] = []  # includes evicted ones until a lookup finds them, or there are many
        self._tidy_at = 2 * TIDY
        self.needed: Checkpoint | None = None

    def __iter__(self) -> Iterator[Checkpoint]:
        return (checkpoint for checkpoint in self._listed if not checkpoint.evicted)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Checkpoint:
        return list(self)[index]

    # -- lookup

    def below(self, position: int) -> Checkpoint | None:
        """Returns the last checkpoint before `position`."""
        end = start = bisect_left(self._listed, position, key=_position)
        while start and self._listed[start - 1].evicted:
            start -= 1
        del self._listed[start:end]  # evicted
        return self._listed[start - 1] if start else None

    def from_on(self, position: int) -> Checkpoint | None:
        """Returns the first checkpoint at or after `position`."""
        start = end = bisect_left(self._listed, position, key=_position)
        while end < len(self._listed) and self._listed[end].evicted:
            end += 1
        del self._listed[start:end]  # evicted
        return self._listed[start] if start < len(self._listed) else None

    def at(self, position: int) -> Checkpoint | None:
        """Returns the checkpoint at `position`."""
        found = self.from_on(position)
        return found if found is not None and found.position == position else None

    # -- changes

    def push(self, checkpoint: Checkpoint) -> None:
        """Appends the pinned `checkpoint` and takes over its reference. The one needed before now only saves work."""
        self.relax()
        self._listed.append(checkpoint)
        self.needed = checkpoint
        self._tidy()

    def _tidy(self) -> None:
        """Removes the evicted ones when they may be half of the list."""
        if len(self._listed) >= self._tidy_at:
            self._listed = list(self)
            self._tidy_at = 2 * max(TIDY, len(self._listed))

    def relax(self) -> None:
        """Unpins the needed checkpoint, if there is one; it only saves work from now on."""
        if self.needed is not None:
            needed, self.needed = self.needed, None
            self._cache.unpin(needed)

    def take(self, position: int) -> Checkpoint | None:
        """Takes out the checkpoint at `position`, pinned."""
        found = self.at(position)
        if found is None:
            return None
        if found is self.needed:
            self.needed = None
        else:
            self._cache.require(found)
        self._listed.remove(found)
        return found

    def cut(self, position: int) -> None:
        """Drops the checkpoints at or past `position`."""
        if self.needed is not None and self.needed.position >= position:
            self.relax()
        start = bisect_left(self._listed, position, key=_position)
        for checkpoint in self._listed[start:]:
            self._cache.release(checkpoint)
        del self._listed[start:]

    def absorb(self, other: Checkpoints) -> None:
        """Moves all checkpoints of `other`, which come after these, to the end."""
        other.relax()
        self._listed += other._listed
        other._listed = []
        self._tidy()

    def refer_to(self, others: Checkpoints, position: int) -> None:
        """Refers to those of `others` before `position` that are not evicted."""
        for checkpoint in others._listed[: bisect_left(others._listed, position, key=_position)]:
            if not checkpoint.evicted:
                self._cache.refer(checkpoint)
                self._listed.append(checkpoint)
