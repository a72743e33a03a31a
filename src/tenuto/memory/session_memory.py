"""What a session keeps in memory of its history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tenuto.base.errors import InvariantError
from tenuto.memory.checkpoint import Checkpoint
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
    `computed` and is not in the cache, while all others are; without such groups there are no checkpoints.
    """

    def __init__(self, memory: Memory, name: str) -> None:
        self.memory = memory
        self.holder_name = name
        self.computed = 0
        self.lost = ""  # why there is less than the history; written by whoever takes it away
        self.tables = [memory.table(g, self) for g in range(len(memory.spec.groups))]
        self.checkpoints: list[Checkpoint] = []  # by position
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

    def units(self, group: int) -> int:
        """Units the session cannot be rid of without losing its place: its checkpoints in the cache do not count."""
        table = self.tables[group]
        if isinstance(table, FullTable):
            return len(table.base)
        return self.checkpoints[-1].units(group) if self.checkpoints and self.computed else 0

    def resumable(self, target: int) -> int:
        """The highest resumable position at or below `target`. Changes nothing."""
        return self._resumable(target)[0]

    def _resumable(self, target: int) -> tuple[int, Checkpoint | None]:
        """That position, and the checkpoint that covers it."""
        target = min(target, self.computed)
        if not self.memory.spec.needs_checkpoints or target == 0:
            return target, None
        below = None
        for checkpoint in self.checkpoints:
            if checkpoint.position >= target:
                if self._covers(checkpoint, target):
                    return target, checkpoint
                break
            below = checkpoint
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

    def share_checkpoint(self, position: int, owner: Holder, home: list[Checkpoint]) -> Checkpoint | None:
        """A second lease on the resumable `position`; `None` where nothing but full attention or no token is there."""
        at, source = self._resumable(position)
        if at != position:
            raise InvariantError(f"{self.holder_name}: {position} is not resumable")
        if source is None:
            return None
        checkpoint = Checkpoint(position, owner, home)
        for table, part in zip(self.tables, source.parts, strict=True):
            if part is None:
                checkpoint.parts.append(None)
            elif isinstance(table, SlidingTable):
                skip = table.first_entry(position) - table.first_entry(source.position)
                checkpoint.parts.append(part.share(skip, skip + table.span(position), checkpoint))
            else:
                checkpoint.parts.append(part.share(0, len(part), checkpoint))
        return checkpoint

    def fork(self, child: SessionMemory, target: int) -> None:
        """Give the fresh `child` a share of everything up to the highest resumable position at or below `target`."""
        position = self.resumable(target)
        for mine, its in zip(self.tables, child.tables, strict=True):
            if isinstance(mine, FullTable) and isinstance(its, FullTable):
                mine.fork(its, position)
        for older in [c.position for c in self.checkpoints if c.position < position]:
            child._adopt(self.share_checkpoint(older, child, child.checkpoints))
        child._adopt(self.share_checkpoint(position, child, child.checkpoints))
        child.computed = position
        for group, mine in enumerate(self.tables):
            if isinstance(mine, SlidingTable) and child.checkpoints:
                mine.lend(last_page(child.checkpoints[-1].parts[group]), position)
        for checkpoint in child.checkpoints[:-1]:
            self.memory.cache.add(checkpoint)

    def _adopt(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            self.checkpoints.append(checkpoint)

    def truncate(self, target: int) -> None:
        """Cut every group to the highest resumable position at or below `target`."""
        if self.turn is not None:
            raise InvariantError(f"{self.holder_name} is cut under its open turn")
        position = self.resumable(target)
        self.cut(position, self.share_checkpoint(position, self, self.checkpoints))

    def cut(self, position: int, checkpoint: Checkpoint | None) -> None:
        """Cut every group to `position`, where `checkpoint`, moved here, stands."""
        self.settle_checkpoints(position, checkpoint)
        for group, table in enumerate(self.tables):
            table.truncate(position, checkpoint.parts[group] if checkpoint is not None else None)
        self.computed = position
        self.lost = "no checkpoint"

    def settle_checkpoints(self, position: int, current: Checkpoint | None) -> None:
        """Release checkpoints at or past `position`, where `current` now stands; older ones are cached."""
        cache = self.memory.cache
        while self.checkpoints and self.checkpoints[-1].position >= position:
            gone = self.checkpoints.pop()
            cache.discard(gone)
            gone.release()
        last = self.checkpoints[-1] if self.checkpoints else None
        if current is not None:
            self.checkpoints.append(current)
        if last is not None and last not in cache:
            cache.add(last)

    def drop(self) -> None:
        """Keep only tokens: everything is released, to be computed again when it is wanted."""
        self.truncate(0)
