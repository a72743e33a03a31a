"""Checkpoints: leases on resumable positions, and the budgeted cache of those nobody needs to keep."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tenuto.base.errors import InvariantError
from tenuto.memory.pool import Holder, Lease, Pool


class Checkpoint:
    """What resuming at `position` needs in every group but full attention, whose pages the sequence itself holds.

    `parts[g]` is the lease in group g of the memory spec: a sliding window's pages, a state slot, or `None` for full
    attention. `home` is the list of the session or turn it belongs to.
    """

    __slots__ = ("_owner", "home", "parts", "position")

    def __init__(self, position: int, owner: Holder, home: list[Checkpoint]) -> None:
        self.position = position
        self.parts: list[Lease | None] = []  # filled by whoever makes it, once
        self.home = home
        self._owner = owner

    @property
    def holder_name(self) -> str:
        return f"checkpoint {self.position} of {self._owner.holder_name}"

    def leases(self) -> Iterator[Lease]:
        return (part for part in self.parts if part is not None)

    def units(self, group: int) -> int:
        """Units it holds in group `group`."""
        part = self.parts[group]
        return 0 if part is None else len(part)

    def give_up(self, group: int) -> Lease:
        """Its lease in group `group`, which is no part of it any more."""
        part, self.parts[group] = self.parts[group], None
        if part is None:
            raise InvariantError(f"{self.holder_name} holds nothing of group {group}")
        return part

    def move(self, owner: Holder, home: list[Checkpoint]) -> None:
        """Change hands: from the turn that made it to its session."""
        self._owner, self.home = owner, home

    def release(self) -> None:
        for lease in self.leases():
            lease.release()


class CheckpointCache:
    """Every checkpoint that only saves work, oldest first. Holds at most `budget[g]` units of group g, counted by
    leases, and gives up the oldest under pressure."""

    def __init__(self, pools: Sequence[Pool], budget: Sequence[int]) -> None:
        self._budget = tuple(budget)
        self._held = [0] * len(pools)
        self._entries: OrderedDict[Checkpoint, None] = OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._entries

    def add(self, checkpoint: Checkpoint) -> None:
        """Take it in as the newest. Nothing is evicted before `trim`."""
        self._entries[checkpoint] = None
        for group in range(len(self._held)):
            self._held[group] += checkpoint.units(group)

    def trim(self) -> None:
        """Evict what exceeds the budget."""
        while self.over_budget:
            self.evict()

    @property
    def over_budget(self) -> bool:
        """Whether some group has more units in here than it may."""
        return any(held > budget for held, budget in zip(self._held, self._budget, strict=True))

    def discard(self, checkpoint: Checkpoint) -> None:
        """It is needed again, or about to be released: no longer evictable."""
        if checkpoint in self._entries:
            del self._entries[checkpoint]
            for group in range(len(self._held)):
                self._held[group] -= checkpoint.units(group)

    def evict(self) -> bool:
        """Give up the oldest; False if there is none."""
        if not self._entries:
            return False
        checkpoint = next(iter(self._entries))
        self.discard(checkpoint)
        checkpoint.home.remove(checkpoint)
        checkpoint.release()
        self.evicted += 1
        return True
