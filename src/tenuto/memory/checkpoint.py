"""Checkpoints: leases on resumable positions, shared by all sequences that resume there, and the budgeted cache of
those that nobody needs."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import ClassVar, overload

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError
from tenuto.memory.pool import HolderKind, Lease, Pool

_position = attrgetter("position")


class Checkpoint:
    """What resuming at `position` needs in every group but full attention, whose pages the sequence itself holds.

    `parts[g]` is the lease in group g of the memory spec: a sliding window's pages, a state slot, or `None` for full
    attention. It does not change until its end, when it holds nothing. Any number of sequences may refer to it; each
    unit is held once for all of them.

    Invariant: `references` counts the sequences that refer to it, and `pins` those that need it; it is in the cache if
    it has references and no pins. It ends with its last reference, or earlier when it is evicted, which `evicted` tells
    those that still refer to it. Both counts are written by the cache.
    """

    holder_kind: ClassVar[HolderKind] = "checkpoint"
    __slots__ = ("_maker", "evicted", "parts", "pins", "position", "references")

    def __init__(self, position: int, maker: str) -> None:
        """`maker`: the name of the session or turn that made it."""
        self.position = position
        self.parts: list[Lease | None] = []  # filled by whoever makes it, once
        self.references = 0
        self.pins = 0
        self.evicted = False
        self._maker = maker

    @property
    def holder_name(self) -> str:
        return f"checkpoint {self.position} of {self._maker}"

    def leases(self) -> Iterator[Lease]:
        return (part for part in self.parts if part is not None)

    def units_of(self, group: int) -> Sequence[int]:
        """The units it holds in group `group`."""
        part = self.parts[group]
        return () if part is None else part.units

    def count_now(self) -> None:
        """Have an audit in progress count its leases before who refers to it changes."""
        for lease in self.leases():
            lease.count_now()

    def release(self) -> None:
        """End it."""
        for lease in self.leases():
            lease.release()
        self.parts = []


class _CachedUnits:
    """How many cached checkpoints hold each unit of one pool, and how many units they hold."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._counts = np.zeros(pool.capacity, np.int32)
        self.distinct = 0

    def add(self, lease: Lease) -> None:
        index = np.frombuffer(lease.units, dtype=np.int32)
        self.distinct += int((self._counts[index] == 0).sum())
        self._counts[index] += 1

    def remove(self, lease: Lease) -> None:
        index = np.frombuffer(lease.units, dtype=np.int32)
        self._counts[index] -= 1
        self.distinct -= int((self._counts[index] == 0).sum())

    def leases(self) -> npt.NDArray[np.int32]:
        """How many cached checkpoints hold each unit, int32 [capacity], a copy."""
        return self._counts.copy()

    def reclaimable(self) -> int:
        """Units that only cached checkpoints hold."""
        counts = np.frombuffer(self._pool.counts, dtype=np.int32)
        return int(((self._counts > 0) & (self._counts == counts)).sum())

    def reclaims(self, lease: Lease) -> tuple[bool, bool]:
        """Whether releasing `lease` frees a unit at once, and whether it would if the whole cache were evicted."""
        index = np.frombuffer(lease.units, dtype=np.int32)
        counts = np.frombuffer(self._pool.counts, dtype=np.int32)[index]
        return bool((counts == 1).any()), bool((counts == self._counts[index]).any())


class CheckpointCache:
    """Counts who refers to each checkpoint, and keeps those that only save work, oldest first: at most `budget[g]`
    units of group g, each counted once. Under pressure it evicts the oldest, for everybody who refers to it."""

    def __init__(self, pools: Sequence[Pool], budget: Sequence[int]) -> None:
        self._budget = tuple(budget)
        self._held = tuple(_CachedUnits(pool) for pool in pools)
        self._entries: OrderedDict[Checkpoint, None] = OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._entries

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._entries)

    # -- references

    def refer(self, checkpoint: Checkpoint) -> None:
        """One more sequence refers to it, to save work."""
        if not checkpoint.references:
            raise InvariantError(f"{checkpoint.holder_name} is referred to after its end")
        checkpoint.references += 1

    def pin(self, checkpoint: Checkpoint) -> None:
        """One more sequence refers to it and needs it: it cannot be evicted."""
        checkpoint.references += 1
        self.require(checkpoint)

    def require(self, checkpoint: Checkpoint) -> None:
        """A sequence that refers to it needs it from now on."""
        if checkpoint.evicted:
            raise InvariantError(f"{checkpoint.holder_name} is needed after it was evicted")
        checkpoint.pins += 1
        if checkpoint in self._entries:
            self._remove(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        """A sequence that refers to it no longer needs it. Once nobody does, it is the newest in the cache; nothing is
        evicted before `trim`."""
        checkpoint.pins -= 1
        if checkpoint.pins < 0:
            raise InvariantError(f"{checkpoint.holder_name} is unpinned but nobody needs it")
        if not checkpoint.pins:
            self._entries[checkpoint] = None
            for held, part in zip(self._held, checkpoint.parts, strict=True):
                if part is not None:
                    held.add(part)

    def release(self, checkpoint: Checkpoint) -> None:
        """Drop a reference that is not pinned; the last one gives the units back."""
        checkpoint.references -= 1
        if checkpoint.references < checkpoint.pins:
            raise InvariantError(f"{checkpoint.holder_name} is released but nobody refers to it")
        checkpoint.count_now()
        if not checkpoint.references and not checkpoint.evicted:
            self._remove(checkpoint)
            checkpoint.release()

    def release_pinned(self, checkpoint: Checkpoint) -> None:
        """Drop a pinned reference."""
        self.unpin(checkpoint)
        self.release(checkpoint)

    def undo(self, checkpoint: Checkpoint) -> list[Lease | None]:
        """End it and hand its leases to the only sequence that refers to it, which has pinned it."""
        if (checkpoint.pins, checkpoint.references) != (1, 1):
            raise InvariantError(f"{checkpoint.holder_name} is undone while others refer to it")
        checkpoint.pins = checkpoint.references = 0
        parts, checkpoint.parts = checkpoint.parts, []
        return parts

    def _remove(self, checkpoint: Checkpoint) -> None:
        del self._entries[checkpoint]
        for held, part in zip(self._held, checkpoint.parts, strict=True):
            if part is not None:
                held.remove(part)

    # -- eviction

    @property
    def over_budget(self) -> bool:
        """Whether the cache holds more units of some group than its budget."""
        return any(held.distinct > budget for held, budget in zip(self._held, self._budget, strict=True))

    def trim(self) -> None:
        """Evict what exceeds the budget."""
        while self.over_budget:
            self.evict()

    def evict(self) -> bool:
        """Evict the oldest; False if there is none."""
        if not self._entries:
            return False
        self._evict(next(iter(self._entries)))
        return True

    def reclaimable(self, group: int) -> int:
        """Units of `group` that would become free if the whole cache were evicted."""
        return self._held[group].reclaimable()

    def leases(self, group: int) -> npt.NDArray[np.int32]:
        """How many cached checkpoints hold each unit of `group`, int32 [capacity], a copy."""
        return self._held[group].leases()

    def evict_for(self, groups: Iterable[int]) -> bool:
        """Free a unit of one of `groups` by evicting the oldest checkpoint that frees one. Where several cached
        checkpoints hold each unit, they go oldest first. False, evicting nothing, if no eviction would free any."""
        wanted = [group for group in groups if self.reclaimable(group)]
        if not wanted:
            return False
        while True:
            helpful: Checkpoint | None = None
            for checkpoint in self._entries:
                now, later = self._frees(checkpoint, wanted)
                if now:
                    self._evict(checkpoint)
                    return True
                if later and helpful is None:
                    helpful = checkpoint
            if helpful is None:
                raise InvariantError("units are counted for cached checkpoints, but none of these holds them")
            self._evict(helpful)

    def _frees(self, checkpoint: Checkpoint, groups: Sequence[int]) -> tuple[bool, bool]:
        """Whether evicting it frees a unit of `groups` at once, and whether it does once others are evicted too."""
        later = False
        for group in groups:
            part = checkpoint.parts[group]
            if part is not None:
                at_once, among_others = self._held[group].reclaims(part)
                if at_once:
                    return True, True
                later |= among_others
        return False, later

    def _evict(self, checkpoint: Checkpoint) -> None:
        self._remove(checkpoint)
        checkpoint.evicted = True
        checkpoint.release()
        self.evicted += 1


class Checkpoints(Sequence[Checkpoint]):
    """The checkpoints that one sequence refers to, by position. `needed` is the one it has pinned, if any; any other
    may be evicted at any time, and is then no longer listed."""

    def __init__(self, cache: CheckpointCache) -> None:
        self._cache = cache
        self._listed: list[Checkpoint] = []  # evicted ones too, until a lookup meets them
        self.needed: Checkpoint | None = None

    def __iter__(self) -> Iterator[Checkpoint]:
        return (checkpoint for checkpoint in self._listed if not checkpoint.evicted)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Checkpoint: ...

    @overload
    def __getitem__(self, index: slice) -> list[Checkpoint]: ...

    def __getitem__(self, index: int | slice) -> Checkpoint | list[Checkpoint]:
        return list(self)[index]

    # -- looking one up

    def below(self, position: int) -> Checkpoint | None:
        """The last one before `position`."""
        end = start = bisect_left(self._listed, position, key=_position)
        while start and self._listed[start - 1].evicted:
            start -= 1
        self._forget(start, end)
        return self._listed[start - 1] if start else None

    def from_on(self, position: int) -> Checkpoint | None:
        """The first one at or after `position`."""
        start = end = bisect_left(self._listed, position, key=_position)
        while end < len(self._listed) and self._listed[end].evicted:
            end += 1
        self._forget(start, end)
        return self._listed[start] if start < len(self._listed) else None

    def at(self, position: int) -> Checkpoint | None:
        """The one at `position`."""
        found = self.from_on(position)
        return found if found is not None and found.position == position else None

    def _forget(self, start: int, stop: int) -> None:
        """Take out entries [start, stop), all of them evicted."""
        if start < stop:
            del self._listed[start:stop]

    # -- changing them

    def push(self, checkpoint: Checkpoint) -> None:
        """Append the pinned `checkpoint` and take over its reference. The one needed before now only saves work."""
        self.relax()
        self._listed.append(checkpoint)
        self.needed = checkpoint

    def relax(self) -> None:
        """None of them is needed from now on."""
        if self.needed is not None:
            needed, self.needed = self.needed, None
            self._cache.unpin(needed)

    def take(self, position: int) -> Checkpoint | None:
        """Move out the one at `position`, pinned."""
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
        """Drop those at or past `position`."""
        if self.needed is not None and self.needed.position >= position:
            self.relax()
        start = bisect_left(self._listed, position, key=_position)
        for checkpoint in self._listed[start:]:
            self._cache.release(checkpoint)
        del self._listed[start:]

    def absorb(self, other: Checkpoints) -> None:
        """Move all of `other`, which come after these, to the end."""
        other.relax()
        self._listed += other._listed
        other._listed = []

    def refer_to(self, others: Checkpoints, position: int) -> None:
        """Refer to those of `others` before `position` that are not evicted."""
        for checkpoint in others._listed[: bisect_left(others._listed, position, key=_position)]:
            if not checkpoint.evicted:
                self._cache.refer(checkpoint)
                self._listed.append(checkpoint)
