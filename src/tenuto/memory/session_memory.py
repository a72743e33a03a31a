"""The memory of a session: the state of its history, and the memory of its open turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.committed import CommittedMemory
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Holder, Lease
from tenuto.memory.rows import Longs
from tenuto.memory.turn_memory import TurnMemory


class SessionMemory(CommittedMemory):
    """The memory of a session: the state of its history, and the memory of its open turn."""

    def __init__(self, memory: Memory, name: str) -> None:
        super().__init__(memory, name)
        self._turn: TurnMemory | None = None

    @property
    def turn(self) -> TurnMemory | None:
        """The open turn's memory; `None` if no turn holds memory."""
        return self._turn if self._turn is not None and not self._turn.ended else None

    def begin(self, name: str, target: int, slots: tuple[Lease, ...]) -> TurnMemory:
        """Begins a turn called `name`; see `TurnMemory`."""
        if self.turn is not None:
            raise InvariantError(f"{self.holder_name} already has a turn in memory")
        self._turn = TurnMemory(self, name, target, slots)
        return self._turn

    def holders(self) -> Iterator[Holder]:
        """Yields all holders of leases that belong to this session: itself, its checkpoints and its turn."""
        yield self
        yield from self.checkpoints
        if self.turn is not None:
            yield from self.turn.holders()

    def kept_leases(self) -> Iterator[tuple[int, Lease]]:
        """Yields the leases, each with its group, that the session cannot give up without losing its position."""
        for group, table in enumerate(self.tables):
            yield from ((group, lease) for lease in table.leases())
        if self.checkpoints.needed is not None:
            yield from ((group, part) for group, part in enumerate(self.checkpoints.needed.parts) if part is not None)

    def essential_leases(self) -> Iterator[tuple[int, Lease]]:
        """Yields the leases, each with its group, that the session and its open turn cannot give up without losing
        their positions. Cached checkpoints are left out."""
        yield from self.kept_leases()
        if self.turn is None:
            return
        yield from ((group, table.own) for group, table in enumerate(self.tables) if table.own is not None)
        for checkpoint in (self.turn.source, self.turn.checkpoints.needed):
            if checkpoint is not None:
                yield from ((group, part) for group, part in enumerate(checkpoint.parts) if part is not None)

    def frees(self, group: int) -> bool:
        """Whether giving up the open turn's memory, or without a turn the session's, frees a unit of `group`. For a
        turn this may be wrongly true, because checkpoints may hold its units too."""
        table = self.tables[group]
        if self.turn is not None:
            return table.own_frees()
        if table.frees():
            return True
        needed = self.checkpoints.needed
        if needed is None or needed.references > 1:
            return False
        mine = Counter(unit for c in self._overlapping(needed, group) for unit in c.units_of(group))
        return any(table.pool.counts[unit] == count for unit, count in mine.items())

    def _overlapping(self, needed: Checkpoint, group: int) -> Iterator[Checkpoint]:
        """Yields `needed` and the checkpoints before it that share units of `group` with it, except those to which
        other sequences refer too."""
        units = set(needed.units_of(group))
        for checkpoint in reversed(list(self.checkpoints)):
            if not units.intersection(checkpoint.units_of(group)):
                return
            if checkpoint.references == 1:
                yield checkpoint

    def need(self, target: int, end: int, *, generates: bool, restored: int = 0) -> Longs:
        """Returns an upper bound on the units to acquire, int64 [groups], to compute up to `end`: for the open turn, or
        without one for a turn that begins at or below `target`. If `restored` is not 0, that turn begins there, where
        the memory ends once it is restored."""
        start = restored or self.resumable(target)
        worst_case = self.memory.turn_units(end, generates=generates)
        held = self.turn.own_units() if self.turn is not None else [0] * len(worst_case)
        at_end = start == (restored or self.computed)
        units = zip(self.tables, worst_case, held, strict=True)
        return np.array([table.need(n, had, start, end, at_end=at_end) for table, n, had in units], np.int64)

    def truncate(self, target: int) -> None:
        """Cuts every group to the highest resumable position at or below `target`."""
        if self.turn is not None:
            raise InvariantError(f"{self.holder_name} is cut while its turn is open")
        super().truncate(target)

    def drop(self) -> None:
        """Releases everything: only the tokens remain, to be computed again when needed."""
        self.truncate(0)


def all_holders(memories: Iterable[SessionMemory]) -> Iterator[Holder]:
    """Yields all holders of leases that belong to these sessions, each shared checkpoint once."""
    shared: set[Checkpoint] = set()
    for memory in memories:
        for holder in memory.holders():
            if isinstance(holder, Checkpoint) and holder.references > 1:
                if holder in shared:
                    continue
                shared.add(holder)
            yield holder
