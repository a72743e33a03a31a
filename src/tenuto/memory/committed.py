"""The state of committed history that is in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Self

from tenuto.base.errors import InvariantError
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.checkpoints.sequence import Checkpoints
from tenuto.memory.lineage import Lineage, cut, is_pure
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Holder, HolderKind, Lease


class CommittedMemory:
    """A session's history in memory: the state of its first `computed` tokens, and older checkpoints. The open turn
    uses the same tables.

    Invariants: if the model has groups other than full attention and `computed` > 0, the last checkpoint stands at
    `computed` and is needed, while all others only save work; without such groups there are no checkpoints. `lineage`
    says with which weights each of the `computed` tokens was computed.
    """

    def __init__(self, memory: Memory, name: str) -> None:
        self.memory = memory
        self.holder_kind: HolderKind = "session"  # or "prefix", once the session is closed
        self.holder_name = name
        self.computed = 0
        self.lineage: Lineage = ()
        self.arriving = False  # whether its units are still being copied in, so a turn waits; written by `Restores`
        self.lost = ""  # why less than the history is in memory; written by the code that takes memory away
        self.tables = [group.table(self) for group in memory.groups]
        self.checkpoints = Checkpoints(memory.cache)

    def leases(self) -> Iterator[Lease]:
        for table in self.tables:
            yield from table.leases()

    @property
    def is_current(self) -> bool:
        """Whether all of its state was computed with the weights in use, so that it means the same for any sequence."""
        return is_pure(self.lineage, self.memory.weights)

    def resumable(self, target: int) -> int:
        """Returns the highest resumable position at or below `target`. Changes nothing."""
        return self._resumable(target)[0]

    def replayed(self, target: int) -> int:
        """Returns the number of tokens in memory that a cut or fork at `target` loses: those between the highest
        resumable position and `target`, which are then computed again. Changes nothing."""
        return min(self.computed, target) - self.resumable(target) if not self.arriving else 0

    def _resumable(self, target: int) -> tuple[int, Checkpoint | None]:
        """Returns the position that `resumable` returns, and the checkpoint that covers it."""
        target = min(target, self.computed) if not self.arriving else 0
        if not self.memory.needs_checkpoints or target == 0:
            return target, None
        at_or_after = self.checkpoints.from_on(target)
        if at_or_after is not None and self._covers(at_or_after, target):
            return target, at_or_after
        below = self.checkpoints.below(target)
        return (below.position, below) if below is not None else (0, None)

    def _covers(self, checkpoint: Checkpoint, position: int) -> bool:
        at = checkpoint.position
        return at == position or all(table.covers(at, position) for table in self.tables)

    def share_checkpoint(self, position: int, owner: Holder) -> Checkpoint | None:
        """Returns a pinned checkpoint at the resumable `position`, for `owner`; `None` at position 0, or if the model
        has only full attention."""
        at, source = self._resumable(position)
        if at != position:
            raise InvariantError(f"{self.holder_name}: {position} is not resumable")
        if source is not None and source.position != position:  # its window covers that of `position`
            source = self._part_of(source, position, owner)
        if source is not None:
            self.memory.cache.pin(source)
        return source

    def _part_of(self, source: Checkpoint, position: int, owner: Holder) -> Checkpoint:
        """Returns a new checkpoint at `position`, which `source` covers."""
        made = Checkpoint(position, owner.holder_name, self.checkpoints.below(position))
        for table, part in zip(self.tables, source.parts, strict=True):
            shared = table.share_part(part, source.position, position, made) if part is not None else None
            made.parts.append(shared)
        return made

    def fork(self, child: Self, target: int) -> None:
        """Shares everything up to the highest resumable position at or below `target` with the fresh `child`, which
        then refers to the same checkpoints."""
        position = self.resumable(target)
        child.checkpoints.refer_to(self.checkpoints, position)
        kept = self.share_checkpoint(position, child)
        for mine, its in zip(self.tables, child.tables, strict=True):
            mine.fork(its, position)
        child.lineage = self.lineage
        child.stand_at(position, kept)
        child.lost = self.lost

    def truncate(self, target: int) -> None:
        """Cuts every group to the highest resumable position at or below `target`."""
        position = self.resumable(target)
        self.cut(position, self.share_checkpoint(position, self))

    def cut(self, position: int, checkpoint: Checkpoint | None) -> None:
        """Cuts every group to `position`. `checkpoint`, pinned, stands there and is moved here."""
        self.checkpoints.cut(position)
        for group, table in enumerate(self.tables):
            table.truncate(position, checkpoint.parts[group] if checkpoint is not None else None)
        self.stand_at(position, checkpoint)

    def check_floors(self) -> None:
        """Raises `InvariantError` if another sequence may write slots that this one reads; for the audit."""
        needed = self.checkpoints.needed
        for group, table in enumerate(self.tables):
            table.check_floors(self.computed, needed.parts[group] if needed is not None else None)

    def check_lineage(self) -> None:
        """Raises `InvariantError` unless it is known with which weights each token was computed; for the audit."""
        starts = [stamp.start for stamp in self.lineage]
        if starts[:1] != [0][: self.computed] or any(a >= b for a, b in pairwise([*starts, self.computed])):
            raise InvariantError(f"{self.holder_name}: {self.computed} tokens were computed, with {self.lineage}")

    # -- leaving the device and coming back

    def kept(self) -> list[array[int]]:
        """Returns the units of each group kept for `computed`, which is not 0. Older checkpoints are left out."""
        needed = self.checkpoints.needed
        parts = needed.parts if needed is not None else [None] * len(self.tables)
        return [table.kept(part).units for table, part in zip(self.tables, parts, strict=True)]

    @property
    def kept_units(self) -> int:
        """The number of units in `kept()`; 0 if no token is in memory."""
        return sum(map(len, self.kept())) if self.computed else 0

    def receive(self, position: int, units: Sequence[Lease], lineage: Lineage) -> None:
        """Fills the empty memory up to `position` with `units`, one lease per group, which contain the state there, of
        this lineage. The sequence reads these units but has not written them."""
        for lease in units:
            lease.pool.add_reader(lease.units, lease.pool.reads(position))
        made = Checkpoint(position, self.holder_name) if self.memory.needs_checkpoints else None
        holder = made if made is not None else self
        parts = [table.receive(lease, holder) for table, lease in zip(self.tables, units, strict=True)]
        if made is not None:
            made.parts = parts
            self.memory.cache.pin(made)
        self.lineage = lineage
        self.stand_at(position, made)

    def stand_at(self, position: int, checkpoint: Checkpoint | None) -> None:
        """Ends the memory at `position`. `checkpoint`, pinned, stands there and is moved here."""
        if checkpoint is not None:
            self.checkpoints.push(checkpoint)
        self.computed, self.lineage = position, cut(self.lineage, position)
        self.lost = "no checkpoint"  # overwritten by the code that takes more away
