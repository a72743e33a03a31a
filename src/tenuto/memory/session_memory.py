"""What a session keeps in memory of its history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tenuto.base.errors import InvariantError
from tenuto.memory.checkpoint import Checkpoint, Checkpoints
from tenuto.memory.full import FullTable
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Holder, Lease
from tenuto.memory.sliding import SlidingTable, last_page
from tenuto.memory.state import StateTable

if TYPE_CHECKING:
    from tenuto.memory.turn_memory import TurnMemory


class SessionMemory:
    """What a session keeps of its history: the state of its first `computed` tokens, and older checkpoints.

    Invariant: if the model has groups other than full attention and `computed` > 0, the last checkpoint stands at
    `computed` and is needed, while all others only save work; without such groups there are no checkpoints.
    """

    def __init__(self, memory: Memory, name: str) -> None:
        self.memory = memory
        self.holder_name = name
        self.computed = 0
        self.lost = ""  # why there is less than the history; written by whoever takes it away
        self.tables = [memory.table(g, self) for g in range(len(memory.spec.groups))]
        self.checkpoints = Checkpoints(memory.cache)
        self.turn: TurnMemory | None = None  # of the open turn, while it holds anything

    def leases(self) -> Iterator[Lease]:
        for table in self.tables:
            if isinstance(table, FullTable):
                yield from table.leases()

    def holders(self) -> Iterator[Holder]:
        """Everything that holds leases on this session's account."""
        yield self
        yield from self.checkpoints
        if self.turn is not None:
            yield from self.turn.holders()

    def essential_leases(self) -> Iterator[tuple[int, Lease]]:
        """By group, what the session and its open turn cannot give up without losing their places. Checkpoints in the
        cache are left out."""
        for group, table in enumerate(self.tables):
            if isinstance(table, FullTable):
                yield group, table.base
        kept = [self.checkpoints.needed]
        if self.turn is not None:
            kept += [self.turn.source, self.turn.checkpoints.needed]
            yield from ((group, table.own) for group, table in enumerate(self.tables) if table.own is not None)
        for checkpoint in kept:
            if checkpoint is not None:
                yield from ((group, part) for group, part in enumerate(checkpoint.parts) if part is not None)

    def frees(self, group: int) -> bool:
        """Whether giving up the open turn's memory, or without one the session's, frees a unit of `group`. An upper
        guess for a turn: cached checkpoints may hold its units too."""
        table = self.tables[group]
        if self.turn is not None:
            return table.own is not None and len(table.own) > 0
        if isinstance(table, FullTable):  # who holds a page holds all before it
            return len(table.base) > 0 and table.pool.counts[table.base.units[-1]] == 1
        needed = self.checkpoints.needed
        if needed is None or needed.references > 1:
            return False
        mine = Counter(unit for c in self._overlapping(needed, group) for unit in c.units_of(group))
        return any(table.pool.counts[unit] == count for unit, count in mine.items())

    def _overlapping(self, needed: Checkpoint, group: int) -> Iterator[Checkpoint]:
        """`needed` and those before it that share units of `group` with it, as far as only this session refers to
        them."""
        units = set(needed.units_of(group))
        for checkpoint in reversed(list(self.checkpoints)):
            if not units.intersection(checkpoint.units_of(group)):
                return
            if checkpoint.references == 1:
                yield checkpoint

    def resumable(self, target: int) -> int:
        """The highest resumable position at or below `target`. Changes nothing."""
        return self._resumable(target)[0]

    def _resumable(self, target: int) -> tuple[int, Checkpoint | None]:
        """That position, and the checkpoint that covers it."""
        target = min(target, self.computed)
        if not self.memory.spec.needs_checkpoints or target == 0:
            return target, None
        at_or_after = self.checkpoints.from_on(target)
        if at_or_after is not None and self._covers(at_or_after, target):
            return target, at_or_after
        below = self.checkpoints.below(target)
        return (below.position, below) if below is not None else (0, None)

    def _covers(self, checkpoint: Checkpoint, position: int) -> bool:
        if checkpoint.position == position:
            return True
        for table in self.tables:
            if isinstance(table, StateTable):
                return False
            if isinstance(table, SlidingTable) and table.first_entry(position) < table.first_entry(checkpoint.position):
                return False
        return True

    def share_checkpoint(self, position: int, owner: Holder) -> Checkpoint | None:
        """A pinned reference to a checkpoint at the resumable `position`, for `owner`; `None` where nothing but full
        attention or no token is there."""
        at, source = self._resumable(position)
        if at != position:
            raise InvariantError(f"{self.holder_name}: {position} is not resumable")
        if source is not None and source.position != position:  # its window covers this one
            source = self._part_of(source, position, owner)
        if source is not None:
            self.memory.cache.pin(source)
        return source

    def _part_of(self, source: Checkpoint, position: int, owner: Holder) -> Checkpoint:
        """A checkpoint at `position`, which the windows in `source` cover."""
        made = Checkpoint(position, owner.holder_name)
        for table, part in zip(self.tables, source.parts, strict=True):
            if part is None or not isinstance(table, SlidingTable):
                made.parts.append(None)
            else:
                skip = table.first_entry(position) - table.first_entry(source.position)
                made.parts.append(part.share(skip, skip + table.span(position), made))
        return made

    def fork(self, child: SessionMemory, target: int) -> None:
        """Give the fresh `child` a share of everything up to the highest resumable position at or below `target`.
        Checkpoints are not copied: it refers to the same."""
        position = self.resumable(target)
        for mine, its in zip(self.tables, child.tables, strict=True):
            if isinstance(mine, FullTable) and isinstance(its, FullTable):
                mine.fork(its, position)
        child.checkpoints.refer_to(self.checkpoints, position)
        kept = self.share_checkpoint(position, child)
        for mine, part in zip(self.tables, kept.parts if kept is not None else (), strict=False):
            if isinstance(mine, SlidingTable):
                mine.lend(last_page(part), position)
        child.stand_at(position, kept)
        child.lost = self.lost

    def truncate(self, target: int) -> None:
        """Cut every group to the highest resumable position at or below `target`."""
        if self.turn is not None:
            raise InvariantError(f"{self.holder_name} is cut under its open turn")
        position = self.resumable(target)
        self.cut(position, self.share_checkpoint(position, self))

    def cut(self, position: int, checkpoint: Checkpoint | None) -> None:
        """Cut every group to `position`, where `checkpoint`, pinned and moved here, stands."""
        self.checkpoints.cut(position)
        for group, table in enumerate(self.tables):
            table.truncate(position, checkpoint.parts[group] if checkpoint is not None else None)
        self.stand_at(position, checkpoint)

    def stand_at(self, position: int, checkpoint: Checkpoint | None) -> None:
        """The memory now ends at `position`, where `checkpoint`, pinned and moved here, stands."""
        if checkpoint is not None:
            self.checkpoints.push(checkpoint)
        self.computed = position
        self.lost = "no checkpoint"  # whoever takes more away says so afterwards

    def drop(self) -> None:
        """Keep only tokens: everything is released, to be computed again when it is wanted."""
        self.truncate(0)


def all_holders(memories: Iterable[SessionMemory]) -> Iterator[Holder]:
    """Everything that holds leases on account of these sessions; checkpoints that several refer to come once."""
    shared: set[Checkpoint] = set()
    for memory in memories:
        for holder in memory.holders():
            if isinstance(holder, Checkpoint) and holder.references > 1:
                if holder in shared:
                    continue
                shared.add(holder)
            yield holder
