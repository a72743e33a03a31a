"""The cache, with a budget, of checkpoints that only save work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.checkpoints.thinning import Thinning
from tenuto.memory.pool import Lease, Pool


class _CachedUnits:
    """Counts of the cached checkpoints that hold each unit of one pool; `distinct` is the number of units held."""

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

    @property
    def none_left(self) -> bool:
        """Whether no unit is free, now or when the steps in flight settle."""
        return not self._pool.free and not self._pool.limbo

    def leases(self) -> npt.NDArray[np.int32]:
        """Returns the number of cached checkpoints that hold each unit, int32 [capacity], as a copy."""
        return self._counts.copy()

    def reclaimable(self) -> int:
        """Returns the number of units that only cached checkpoints hold."""
        counts = np.frombuffer(self._pool.counts, dtype=np.int32)
        return int(((self._counts > 0) & (self._counts == counts)).sum())

    def reclaims(self, lease: Lease) -> tuple[bool, bool]:
        """Whether releasing `lease` frees a unit at once, and whether a unit of it becomes free if the whole cache is
        evicted."""
        index = np.frombuffer(lease.units, dtype=np.int32)
        counts = np.frombuffer(self._pool.counts, dtype=np.int32)[index]
        return bool((counts == 1).any()), bool((counts == self._counts[index]).any())


class CheckpointCache:
    """Counts the references to each checkpoint, and keeps those that only save work: at most `budget[g]` units of group
    g, each counted once. Checkpoints beyond the budget are evicted in the order of `Thinning`, even if several
    sequences refer to them."""

    def __init__(self, pools: Sequence[Pool], budget: Sequence[int]) -> None:
        self._budget = tuple(budget)
        self._held = tuple(_CachedUnits(pool) for pool in pools)
        self.order = Thinning()
        self.evicted = 0
        self.replaced = 0  # checkpoints evicted to make room for new ones
        self.wanted: set[int] = set()  # groups in which the next checkpoint needs a unit; written by `TurnMemory`

    def __len__(self) -> int:
        return len(self.order)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self.order

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self.order)

    # -- references

    def refer(self, checkpoint: Checkpoint) -> None:
        """Adds the reference of a sequence for which the checkpoint only saves work."""
        if not checkpoint.references:
            raise InvariantError(f"{checkpoint.holder_name} is referred to after its end")
        self._add_reference(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Adds the reference of a sequence that needs the checkpoint, so that it cannot be evicted. The first such
        reference is that of its maker."""
        if not checkpoint.references and not checkpoint.ended:
            self.order.made(checkpoint)
        self._add_reference(checkpoint)
        self.require(checkpoint)

    @staticmethod
    def _add_reference(checkpoint: Checkpoint) -> None:
        if checkpoint.references:
            checkpoint.share()
        checkpoint.references += 1

    def require(self, checkpoint: Checkpoint) -> None:
        """Records that a sequence that refers to the checkpoint needs it from now on."""
        if checkpoint.evicted:
            raise InvariantError(f"{checkpoint.holder_name} is needed after it was evicted")
        if not checkpoint.pins:
            checkpoint.count_now()  # while its kind is still `cached`
        checkpoint.pins += 1
        if checkpoint in self.order:
            self._remove(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        """Records that a sequence that refers to the checkpoint no longer needs it. The last unpin moves it to the
        cache; nothing is evicted before `trim`."""
        if checkpoint.pins == 1:
            checkpoint.count_now()  # while its kind is still `checkpoint`
        checkpoint.pins -= 1
        if checkpoint.pins < 0:
            raise InvariantError(f"{checkpoint.holder_name} is unpinned, but no sequence needs it")
        if not checkpoint.pins:
            self.order.add(checkpoint)
            for held, part in zip(self._held, checkpoint.parts, strict=True):
                if part is not None:
                    held.add(part)

    def release(self, checkpoint: Checkpoint) -> None:
        """Drops a reference that is not pinned; the last one gives the units back."""
        checkpoint.references -= 1
        if checkpoint.references < checkpoint.pins:
            raise InvariantError(f"{checkpoint.holder_name} is released, but no sequence refers to it")
        checkpoint.count_now()
        if not checkpoint.references and not checkpoint.evicted:
            self._remove(checkpoint)
            self._end(checkpoint)

    def release_pinned(self, checkpoint: Checkpoint) -> None:
        """Drops a pinned reference."""
        self.unpin(checkpoint)
        self.release(checkpoint)

    def undo(self, checkpoint: Checkpoint) -> list[Lease | None]:
        """Ends the checkpoint and hands its leases to the only sequence that refers to it, which has pinned it."""
        if (checkpoint.pins, checkpoint.references) != (1, 1):
            raise InvariantError(f"{checkpoint.holder_name} is undone while others refer to it")
        checkpoint.count_now()
        checkpoint.pins = checkpoint.references = 0
        self.order.ended(checkpoint)
        parts, checkpoint.parts = checkpoint.parts, []
        return parts

    def _remove(self, checkpoint: Checkpoint) -> None:
        self.order.discard(checkpoint)
        for held, part in zip(self._held, checkpoint.parts, strict=True):
            if part is not None:
                held.remove(part)

    def _end(self, checkpoint: Checkpoint) -> None:
        self.order.ended(checkpoint)
        checkpoint.release()

    # -- eviction

    @property
    def over_budget(self) -> bool:
        """Whether the cache holds more units of some group than its budget."""
        return any(held.distinct > budget for held, budget in zip(self._held, self._budget, strict=True))

    def trim(self) -> None:
        """Evicts checkpoints beyond the budget, and those that must make room for new ones."""
        while self.over_budget:
            self.evict()
        for group in self.wanted:
            if self._held[group].none_left:
                before = self.evicted
                self.evict_for([group])
                self.replaced += self.evicted - before
        self.wanted.clear()

    def evict(self) -> bool:
        """Evicts the first checkpoint of the order; returns False if the cache is empty."""
        heads = self.order.heads()
        if heads:
            self._evict(heads[0])
        return bool(heads)

    def reclaimable(self, group: int) -> int:
        """Returns the number of units of `group` that would become free if the whole cache were evicted."""
        return self._held[group].reclaimable()

    def leases(self, group: int) -> npt.NDArray[np.int32]:
        """Returns the number of cached checkpoints that hold each unit of `group`, int32 [capacity], as a copy."""
        return self._held[group].leases()

    def evict_for(self, groups: Iterable[int]) -> bool:
        """Frees a unit of one of `groups`. Looks at the first checkpoint of each class of gaps, and evicts the first
        that frees such a unit at once. Otherwise it evicts the first that shares a unit only with cached checkpoints,
        and looks again. Skips checkpoints that would free nothing. Returns False, evicting nothing, if no eviction
        would free a unit."""
        wanted = [group for group in groups if self._held[group].distinct]
        checked, passed = False, []
        try:
            while wanted:
                heads, helpful = self.order.heads(), None
                for checkpoint in heads:
                    now, later = self._frees(checkpoint, wanted)
                    if now:
                        self._evict(checkpoint)
                        return True
                    if later and helpful is None:
                        helpful = checkpoint
                if not checked:  # late, because `reclaimable` looks at every unit
                    wanted, checked = [group for group in wanted if self.reclaimable(group)], True
                elif helpful is not None:
                    self._evict(helpful)
                elif heads:
                    passed += heads
                    for checkpoint in heads:
                        self.order.discard(checkpoint)
                else:
                    raise InvariantError("units are counted as cached, but no cached checkpoint holds them")
        finally:
            for checkpoint in passed:
                self.order.put_back(checkpoint)
        return False

    def _frees(self, checkpoint: Checkpoint, groups: Sequence[int]) -> tuple[bool, bool]:
        """Whether evicting the checkpoint frees a unit of `groups` at once, and whether it does once others are evicted
        too."""
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
        self._end(checkpoint)
        self.evicted += 1
