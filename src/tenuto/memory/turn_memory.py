"""The memory of an open turn: leases on the units it started from and on those it writes to."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from tenuto.base.errors import InvariantError
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.checkpoints.sequence import Checkpoints
from tenuto.memory.committed import CommittedMemory
from tenuto.memory.kinds.group import NOWHERE, Growth
from tenuto.memory.lineage import extended, is_pure
from tenuto.memory.pool import Holder, HolderKind, Lease


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The state of a turn that left its row while step `step`, in flight, was computing its tokens up to `position`."""

    step: int
    position: int


class TurnMemory:
    """The memory of an open turn: leases on the units it started from and on those it writes to.

    It begins at `start`, a resumable position of its session, and is attached to a row while the turn runs.
    """

    holder_kind: ClassVar[HolderKind] = "turn"

    def __init__(self, session: CommittedMemory, name: str, target: int, slots: tuple[Lease, ...]) -> None:
        """Begins at the highest resumable position at or below `target`. `slots`: the units that admission has reserved
        for the turn's start, one lease per group, moved here."""
        self.session = session
        self.memory = session.memory
        self.holder_name = name
        self.ended = False  # if True, it holds nothing, and another turn may be open on the tables
        self.start = session.resumable(target)
        self.checkpoints = Checkpoints(self.memory.cache)  # its own; the needed one is the last, which it reads
        self._end_of_input: Checkpoint | None = None  # the checkpoint whose slots admission counted
        self.source = session.share_checkpoint(self.start, self)  # pinned
        self.row = -1
        self.lineage = session.lineage  # of its tokens; where it goes on, the rest is replaced when it gets a row
        self._scheduled = self.start  # while detached: the position where it goes on
        self._settled = self.start  # while detached: the settled position, at most `_scheduled`
        self.unsettled: Unsettled | None = None  # set by `_leave`; also written by `settle` and `truncate`
        self._tables = session.tables
        at_end = self.start == session.computed
        for group, (table, reserved) in enumerate(zip(self._tables, slots, strict=True)):
            part = self.source.parts[group] if self.source is not None else None
            table.begin(reserved.transfer(self), self.start, part, at_end=at_end)

    def leases(self) -> Iterator[Lease]:
        if not self.ended:
            yield from (table.opened for table in self._tables)

    def holders(self) -> Iterator[Holder]:
        yield self
        if self.source is not None:
            yield self.source
        yield from self.checkpoints

    def own_units(self) -> list[int]:
        """Returns the units of each group that admission counted for the turn: those it may write, and those it gave to
        its checkpoint at the end of the input."""
        parts = self._end_of_input.parts if self._end_of_input is not None else [None] * len(self._tables)
        return [table.counted(part) for table, part in zip(self._tables, parts, strict=True)]

    @property
    def computed(self) -> int:
        """The number of leading tokens whose state is in memory and settled."""
        return int(self.memory.rows.computed[self.row]) if self.row >= 0 else self._settled

    @property
    def scheduled(self) -> int:
        """The number of leading tokens whose state is in memory once the steps in flight settle. The turn goes on
        there."""
        return int(self.memory.rows.scheduled[self.row]) if self.row >= 0 else self._scheduled

    # -- rows

    def attach(self, row: int) -> list[Growth]:
        """Moves the registers into `row`. Returns the page table entries to send to the executor."""
        rows = self.memory.rows
        self.row = row
        self.lineage = extended(self.lineage, self._scheduled, self.memory.weights)
        rows.computed[row], rows.scheduled[row], rows.kept[row] = self._settled, self._scheduled, 0
        return [growth for table in self._tables if (growth := table.attach(row)) is not None]

    @property
    def is_current(self) -> bool:
        """Whether all of its state was computed with the weights in use."""
        return is_pure(self.lineage, self.memory.weights)

    def detach(self) -> None:
        """Leaves the row and keeps all units."""
        self._leave(self.scheduled)

    def _leave(self, position: int) -> None:
        """Leaves the row, if it has one, to go on at `position`, up to which a step in flight may still compute."""
        rows, row = self.memory.rows, self.row
        if row >= 0:
            if rows.scheduled[row] > rows.computed[row]:
                self.unsettled = Unsettled(int(rows.step[row]), int(rows.scheduled[row]))
            self._settled = int(rows.computed[row])
            rows.give_back(row)
            self.row = -1
            for table in self._tables:
                table.leave()
        self._scheduled, self._settled = position, min(position, self._settled)
        if self.unsettled is not None:
            self.unsettled = replace(self.unsettled, position=min(position, self.unsettled.position))
            if self.unsettled.position <= self._settled:
                self.unsettled = None

    def settle(self) -> None:
        """Settles the step that was in flight when the turn left its row."""
        if self.unsettled is None:
            raise InvariantError(f"{self.holder_name} does not wait for a step")
        position, self.unsettled = self.unsettled.position, None
        if self.row >= 0:
            computed = self.memory.rows.computed
            computed[self.row] = max(int(computed[self.row]), position)
        else:
            self._settled = max(self._settled, position)
        self.slide()

    def lacking(self, end: int) -> list[int]:
        """Returns the units of each group to acquire to compute up to `end`."""
        return [table.lacking(end) for table in self._tables]

    def slide(self) -> None:
        """Gives back own units that are needed by no position where the turn may still go on."""
        position = int(self.memory.rows.stands(self.row)) if self.row >= 0 else self._settled
        for table in self._tables:
            table.slide(position)

    def add_slots(self, slots: tuple[Lease, ...]) -> None:
        """Adds units reserved for the turn, a draft that begins to generate."""
        for table, lease in zip(self._tables, slots, strict=True):
            table.extend(lease)

    def left_checkpoint(self) -> None:
        """Unpins the last checkpoint, unless it is the one at the end of the input: the plan just made reads its units
        and writes elsewhere, so from now on it only saves work."""
        if self.checkpoints.needed is not self._end_of_input:
            self.checkpoints.relax()

    # -- checkpoints

    def checkpoint(self, position: int) -> Checkpoint:
        """Returns a new, pinned checkpoint at the live `position`, up to which the turn is scheduled."""
        made = Checkpoint(position, self.holder_name, self.checkpoints.below(position) or self.source)
        for table in self._tables:
            made.parts.append(table.keep(position, made))
        self.memory.cache.pin(made)
        return made

    def mark(self, position: int, *, end_of_input: bool = False) -> None:
        """Makes a checkpoint at `position`, where the plan just applied ends; the row then writes elsewhere. The
        checkpoint cannot be evicted until a later step has been planned, since the turn reads it."""
        self.checkpoints.push(self.checkpoint(position))
        if end_of_input:
            self._end_of_input = self.checkpoints.needed
        for group in self.memory.groups:
            group.write_elsewhere(self.row)

    def lacks_checkpoint(self, position: int) -> bool:
        """Whether the turn stands at `position`, past its beginning, without a checkpoint to return to there."""
        return self.start < position == self.scheduled and self._checkpoint_at(position) is None

    def spare_slot(self) -> bool:
        """Acquires the units of an optional checkpoint; returns False if some group has no unit to spare. In groups
        that then have no free unit, cached checkpoints make room for the next one, but only once the present plan,
        which may read them, has been submitted."""
        spared = all(table.can_spare for table in self._tables)
        for table in self._tables if spared else ():
            table.take_spare()
        self.memory.cache.wanted.update(group for group, table in enumerate(self._tables) if not table.can_spare)
        return spared

    def cut_to(self, target: int, *, in_flight: bool = False) -> int:
        """Returns the highest resumable position at or below `target` to which this turn can be cut. Only settled
        positions count; with `in_flight`, also those that steps in flight compute. Changes nothing."""
        if target < self.start:
            raise InvariantError(f"{self.holder_name} began at {self.start} and cannot be cut to {target}")
        target = min(target, self.scheduled if in_flight else self.computed)
        began = self.first_position
        resumable = [began, *(c.position for c in self.checkpoints)]
        live = self._live_below(target)
        if live > began:  # the turn must not write to its source's pages
            resumable.append(live)
        return max((p for p in resumable if p <= target), default=self.start)

    def kept(self) -> list[array[int]]:
        """Returns the units of each group that hold the state where the turn, which has left its row and is settled,
        goes on; it has computed tokens."""
        if self.row >= 0 or self.unsettled is not None or self._settled <= self.start:
            raise InvariantError(f"{self.holder_name} does not stand on memory of its own")
        return [table.stood_on(self._settled) for table in self._tables]

    # -- sharing with other sequences

    def shareable(self, target: int) -> int:
        """Returns the highest settled position at or below `target`, past the turn's beginning, at which another
        sequence can begin; 0 if it cannot begin anywhere. `target` is within the turn's input, which the turn never
        gives up while it keeps any state. Changes nothing."""
        target = min(target, self.computed)
        if self.memory.needs_checkpoints:
            found = self.checkpoints.at(target) or self.checkpoints.below(target)
            target = found.position if found is not None else 0
        return target if target > self.start else 0

    def fork(self, child: CommittedMemory, position: int) -> None:
        """Shares everything up to `position`, which `shareable` has returned, with the fresh `child`."""
        child.checkpoints.refer_to(self.session.checkpoints, self.start + 1)
        child.checkpoints.refer_to(self.checkpoints, position)
        kept = self.checkpoints.at(position) if self.memory.needs_checkpoints else None
        if kept is not None:
            self.memory.cache.pin(kept)
        for mine, its in zip(self._tables, child.tables, strict=True):
            mine.fork_turn(its, position)
        child.lineage = self.lineage
        child.stand_at(position, kept)
        child.lost = self.session.lost

    @property
    def has_begun(self) -> bool:
        """Whether the turn has computed tokens, or acquired units to compute them."""
        computing = self.scheduled > self.start or self.unsettled is not None
        return computing or any(table.has_grown for table in self._tables)

    def withdraw(self) -> tuple[Lease, ...]:
        """Ends a turn that has not begun, and returns the units it was given to start with."""
        units = tuple(table.opened.take(0, len(table.opened), self) for table in self._tables)
        self.abort()
        return units

    def _live_below(self, target: int) -> int:
        """Returns the highest position at or below `target` from which every group can go on."""
        position = min(table.live_below(target, self.scheduled) for table in self._tables)
        return position if position in (target, NOWHERE) else self._live_below(position)

    # -- ends

    def truncate(self, position: int) -> None:
        """Cuts the turn to `position`, which `cut_to` has returned, and leaves the row: the tokens computed from there
        on are no longer wanted, or their step failed."""
        moved = self._checkpoint_at(position)
        again = moved is self.source and position == self.first_position
        if self._end_of_input is not None and self._end_of_input.position > position:
            self._take_back_slots(self._end_of_input)
        self.checkpoints.cut(position + 1)
        if moved is not None and moved is not self.source:
            self._release_source()
            self.source = self.checkpoints.take(position)
        for group, table in enumerate(self._tables):
            table.truncate_turn(position, moved.parts[group] if moved is not None else None, again=again)
        self._leave(position)

    def _take_back_slots(self, checkpoint: Checkpoint) -> None:
        """Undoes the checkpoint at the end of the input, so that its slots, which admission counted, can be written
        again."""
        self._end_of_input = None
        self.checkpoints.take(checkpoint.position)
        parts = self.memory.cache.undo(checkpoint)
        for table, part in zip(self._tables, parts, strict=True):
            if part is not None:
                table.take_back(part)

    @property
    def first_position(self) -> int:
        """The position where the turn began, or began again when it was cut to one of its checkpoints."""
        return self.source.position if self.source is not None else self.start

    def _checkpoint_at(self, position: int) -> Checkpoint | None:
        if self.source is not None and self.source.position == position:
            return self.source
        return self.checkpoints.at(position)

    def commit(self, target: int, base: int) -> None:
        """Moves everything up to the highest resumable position at or below `target` to the session, and releases the
        rest. The turn builds on the session's first `base` tokens; if the session's own memory of them reaches as far,
        that memory stays instead."""
        session = self.session
        if target < self.start:  # a moved turn, which began behind what it keeps
            self._roll_back(session.resumable(target))
            return
        position = self.cut_to(target)
        kept = session.resumable(min(target, base))
        if position == self.start or position <= kept:  # nothing to move; a copied page may not even be filled
            self._roll_back(max(position, kept))
            return
        current = self._take_checkpoint(position)
        if current is None and self.memory.needs_checkpoints:
            current = self.checkpoint(position)
        self.checkpoints.cut(position)
        for group, table in enumerate(self._tables):
            table.commit(position, current.parts[group] if current is not None else None)
        self._release_source()
        session.checkpoints.cut(self.start + 1)
        session.checkpoints.absorb(self.checkpoints)
        session.lineage = self.lineage
        session.stand_at(position, current)
        self._end()

    def _take_checkpoint(self, position: int) -> Checkpoint | None:
        """Takes out the checkpoint at `position`, pinned, if there is one."""
        if self.source is not None and self.source.position == position:
            taken, self.source = self.source, None
            return taken
        return self.checkpoints.take(position)

    def _roll_back(self, position: int) -> None:
        """Releases everything and cuts the session to `position`. A source at `position` is kept, since the session's
        own checkpoint may have been evicted."""
        session, source = self.session, self.source
        if source is None or source.position != position:
            self.abort()
            session.truncate(position)
            return
        self.source = None
        self.abort()
        session.cut(position, source)

    def abort(self) -> None:
        """Releases everything, which leaves the session as it was before the turn."""
        for table in self._tables:
            table.abort()
        self._release_source()
        self.checkpoints.cut(0)
        self._end()

    def _release_source(self) -> None:
        if self.source is not None:
            self.memory.cache.release_pinned(self.source)
            self.source = None

    def _end(self) -> None:
        self._leave(self.scheduled)
        self.ended = True
