"""What an open turn holds besides its session: what it started from, and the units it writes into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tenuto.base.errors import InvariantError
from tenuto.base.plan import NO_SLOT
from tenuto.memory.checkpoint import Checkpoint, Checkpoints
from tenuto.memory.full import FullTable
from tenuto.memory.paged import Growth, PagedTable
from tenuto.memory.pool import Holder, Lease
from tenuto.memory.session_memory import SessionMemory
from tenuto.memory.sliding import SlidingTable
from tenuto.memory.state import StateTable


@dataclass(frozen=True, slots=True)
class Taken:
    """A page table's entries for a turn that takes a row: entry `index` on is `pages`."""

    group: int
    growth: Growth


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A turn has left its row while step `step` was in flight, which computes tokens of it up to `position`."""

    step: int
    position: int


class TurnMemory:
    """What an open turn holds: what it started from, and the units it writes into.

    It begins at `start`, a resumable position of its session, and is attached to a row while it runs.
    """

    def __init__(self, session: SessionMemory, name: str, target: int, slots: tuple[Lease, ...]) -> None:
        """Begin at the highest resumable position at or below `target`; `slots`: reserved state slots, one lease a
        state group, moved here."""
        if session.turn is not None:
            raise InvariantError(f"{session.holder_name} already has a turn in memory")
        self.session = session
        self.memory = session.memory
        self.holder_name = name
        self.start = session.resumable(target)
        self.checkpoints = Checkpoints(self.memory.cache)  # of its own; needed is the last, where it reads
        self._end_of_input: Checkpoint | None = None  # the one of them whose slots admission has counted
        self.source = session.share_checkpoint(self.start, self)  # pinned
        self.row = -1
        self._scheduled = self.start  # while detached: where it would go on
        self._settled = self.start  # while detached: how far that is certain
        self.unsettled: Unsettled | None = None  # what it left a row with; written by `_leave`, `settle` and `truncate`
        at_end = self.start == session.computed
        reserved = iter(slots)
        for group, table in enumerate(session.tables):
            part = self.source.parts[group] if self.source is not None else None
            if isinstance(table, FullTable):
                table.begin(self, self.start, at_end=at_end)
            elif isinstance(table, SlidingTable):
                table.begin(self, self.start, part, at_end=at_end)
            else:
                table.begin(part, next(reserved).transfer(self))
        session.turn = self

    def leases(self) -> Iterator[Lease]:
        if self.session.turn is not self:  # it has ended, and what the tables have open is another's
            return
        for table in self.session.tables:
            if table.own is not None:
                yield table.own

    def holders(self) -> Iterator[Holder]:
        yield self
        if self.source is not None:
            yield self.source
        yield from self.checkpoints

    def own_units(self) -> list[int]:
        """Units of each group that admission has counted for it: those it may write, and what its checkpoint at the end
        of the input holds."""
        own = [len(t.own) if t.own is not None else 0 for t in self.session.tables]
        if self._end_of_input is not None:
            for group in self.memory.states:
                own[group] += len(self._end_of_input.units_of(group))
        return own

    @property
    def computed(self) -> int:
        """Leading tokens of the sequence whose state is in memory, settled."""
        return int(self.memory.rows.computed[self.row]) if self.row >= 0 else self._settled

    @property
    def scheduled(self) -> int:
        """Leading tokens whose state is in memory once the steps in flight have settled: where it goes on."""
        return int(self.memory.rows.scheduled[self.row]) if self.row >= 0 else self._scheduled

    @property
    def _paged(self) -> list[PagedTable]:
        return [t for t in self.session.tables if isinstance(t, PagedTable)]

    @property
    def _states(self) -> list[StateTable]:
        return [t for t in self.session.tables if isinstance(t, StateTable)]

    # -- rows

    def attach(self, row: int) -> list[Taken]:
        """Move the registers into `row`. Returns the page table entries the executor has to learn."""
        rows = self.memory.rows
        self.row = row
        rows.computed[row], rows.scheduled[row] = self._settled, self._scheduled
        rows.frozen[row] = bool(self._states) and self._frozen()
        rows.alternate_at[row] = -1
        for i, state in enumerate(self._states):
            if self.memory.shape.double_buffered and state.alternate == NO_SLOT and state.spare:
                state.alternate = state.spare.pop()
            rows.current[i, row], rows.alternate[i, row] = state.current, state.alternate
        taken = []
        for i, table in enumerate(self._paged):
            rows.capacity[i, row] = table.capacity
            first, pages = table.view()
            taken.append(Taken(i, Growth(first, pages, -1, 0)))
        return taken

    def _frozen(self) -> bool:
        state = self._states[0]
        return state.current == NO_SLOT or state.current not in state.opened.units

    def detach(self) -> None:
        """Leave the row and keep everything."""
        rows, row = self.memory.rows, self.row
        for i, state in enumerate(self._states):
            state.current, state.alternate = int(rows.current[i, row]), int(rows.alternate[i, row])
        self._leave(self.scheduled)

    def _leave(self, position: int) -> None:
        """Leave the row, if it has one, to go on at `position`, which a step in flight may still have to compute."""
        rows, row = self.memory.rows, self.row
        if row >= 0:
            if rows.scheduled[row] > rows.computed[row]:
                self.unsettled = Unsettled(int(rows.step[row]), int(rows.scheduled[row]))
            self._settled = int(rows.computed[row])
            rows.give_back(row)
            self.row = -1
        self._scheduled, self._settled = position, min(position, self._settled)
        if self.unsettled is not None:
            self.unsettled = replace(self.unsettled, position=min(position, self.unsettled.position))
            if self.unsettled.position <= self._settled:
                self.unsettled = None

    def settle(self) -> None:
        """The step has settled that was in flight when the turn left its row."""
        if self.unsettled is None:
            raise InvariantError(f"{self.holder_name} waits for no step")
        position, self.unsettled = self.unsettled.position, None
        if self.row >= 0:
            computed = self.memory.rows.computed
            computed[self.row] = max(int(computed[self.row]), position)
        else:
            self._settled = max(self._settled, position)
        self.slide()

    def grow(self, end: int) -> list[tuple[int, Growth]]:
        """Acquire pages for slots up to `end` in every paged group that lacks some."""
        grown = []
        for i, table in enumerate(self._paged):
            if end > table.capacity:
                grown.append((i, table.grow(end)))
                self.memory.rows.capacity[i, self.row] = table.capacity
        return grown

    def slide(self) -> None:
        """Give back own pages that have left the window of every position that can still be accepted."""
        for table in self.session.tables:
            if isinstance(table, SlidingTable):
                table.slide(self.computed)

    def add_slots(self, slots: tuple[Lease, ...]) -> None:
        """More state slots to write, reserved for the turn: a draft that starts to generate."""
        for state, lease in zip(self._states, slots, strict=True):
            state.extend(lease)

    def renew_alternate(self) -> None:
        """After a step wrote the alternate slot because the current one belongs to a checkpoint: a spare one
        follows."""
        rows, row = self.memory.rows, self.row
        for i, state in enumerate(self._states):
            if rows.alternate[i, row] == NO_SLOT and state.spare:
                rows.alternate[i, row] = state.spare.pop()

    def left_checkpoint(self) -> None:
        """The plan just made reads a slot that a checkpoint holds, and writes another: from now on the checkpoint only
        saves work, unless it is the one at the end of the input."""
        if self.checkpoints.needed is not self._end_of_input:
            self.checkpoints.relax()
        if self.memory.shape.double_buffered:
            self.renew_alternate()

    # -- checkpoints

    def checkpoint(self, position: int) -> Checkpoint:
        """Hold on to the live `position`, which the turn has scheduled; pinned."""
        made = Checkpoint(position, self.holder_name)
        for group, table in enumerate(self.session.tables):
            if isinstance(table, SlidingTable):
                made.parts.append(table.keep(position, made))
            elif isinstance(table, StateTable):
                made.parts.append(table.keep(self._slot_at(group, position), made))
            else:
                made.parts.append(None)
        self.memory.cache.pin(made)
        return made

    def _slot_at(self, group: int, position: int) -> int:
        rows, row, state = self.memory.rows, self.row, self.memory.states.index(group)
        if row < 0:
            return self._states[state].current
        current = position == rows.scheduled[row]
        return int((rows.current if current else rows.alternate)[state, row])

    def mark(self, position: int, *, end_of_input: bool = False) -> None:
        """Make a checkpoint at `position`, where the plan just applied ends; the row writes elsewhere. Until a later
        step has been planned it cannot be evicted: its slot is where the turn reads."""
        self.checkpoints.push(self.checkpoint(position))
        if end_of_input:
            self._end_of_input = self.checkpoints.needed
        if self._states:
            self.memory.rows.frozen[self.row] = True
            self.renew_alternate()

    def lacks_checkpoint(self, position: int) -> bool:
        """Whether the turn stands at `position`, by its own computing, and could not come back there."""
        return self.start < position == self.scheduled and self._checkpoint_at(position) is None

    def spare_slot(self) -> bool:
        """Acquire one more state slot a group for a checkpoint that is not needed; False if there is none."""
        if any(state.pool.free == 0 for state in self._states):
            return False
        for state in self._states:
            state.opened.grow(1)
            state.spare.append(state.opened.units[-1])
        return True

    def cut_to(self, target: int, *, in_flight: bool = False) -> int:
        """The highest resumable position at or below `target` that this turn can be cut to, of those settled or, with
        `in_flight`, also of those that steps in flight are computing. Changes nothing."""
        if target < self.start:
            raise InvariantError(f"{self.holder_name} began at {self.start} and cannot be cut to {target}")
        target = min(target, self.scheduled if in_flight else self.computed)
        began = self.first_position
        live = [p for p in self._live_positions(target) if p > began]  # the pages of its source are not its to write
        resumable = [began, *(c.position for c in self.checkpoints)]
        resumable += [p for p in live if all(self._live(table, p) for table in self.session.tables)]
        return max((p for p in resumable if p <= target), default=self.start)

    def _live_positions(self, target: int) -> list[int]:
        if not self._states:
            return [target]
        if self.row < 0:
            return [self._scheduled]
        rows, row = self.memory.rows, self.row
        here = [] if rows.frozen[row] else [int(rows.scheduled[row])]
        return [*here, int(rows.alternate_at[row])]

    @staticmethod
    def _live(table: object, position: int) -> bool:
        return not isinstance(table, SlidingTable) or table.live(position)

    # -- ends

    def truncate(self, position: int) -> None:
        """Cut the turn to `position`, an answer of `cut_to`, and leave the row: what it has computed from there on is
        not wanted any more, or did not come about."""
        moved = self._checkpoint_at(position)
        again = moved is self.source and position == self.first_position
        slots = [self._slot_at(group, position) for group in self.memory.states] if moved is None else []
        self._leave(position)
        if self._end_of_input is not None and self._end_of_input.position > position:
            self._take_back_slots(self._end_of_input)
        self.checkpoints.cut(position + 1)
        if moved is not None and moved is not self.source:
            self._release_source()
            self.source = self.checkpoints.take(position)
        states = iter(slots)
        for group, table in enumerate(self.session.tables):
            part = moved.parts[group] if moved is not None else None
            if isinstance(table, StateTable):
                table.stand_on(part.units[0] if part is not None else NO_SLOT if again else next(states))
            elif isinstance(table, SlidingTable) and again:
                table.restart()
            elif isinstance(table, SlidingTable) and part is not None:
                table.resume_from(part, position)
            else:
                table.truncate_turn(position)

    def _take_back_slots(self, checkpoint: Checkpoint) -> None:
        """Undo a checkpoint whose slots were counted at admission: they can be written again."""
        self._end_of_input = None
        self.checkpoints.take(checkpoint.position)
        parts = self.memory.cache.undo(checkpoint)
        for table, part in zip(self.session.tables, parts, strict=True):
            if part is not None and isinstance(table, StateTable):
                table.opened.absorb(part)
            elif part is not None:
                part.release()

    @property
    def first_position(self) -> int:
        """Where it began, or began again when it was cut to a checkpoint of its own."""
        return self.source.position if self.source is not None else self.start

    def _checkpoint_at(self, position: int) -> Checkpoint | None:
        if self.source is not None and self.source.position == position:
            return self.source
        return self.checkpoints.at(position)

    def commit(self, target: int) -> None:
        """Move everything up to the highest resumable position at or below `target` to the session; release the
        rest."""
        session, position = self.session, self.cut_to(target)
        if position == self.start:  # nothing to move: not even a page copied for it may have been filled
            self._roll_back(position)
            return
        current = self._take_checkpoint(position)
        if current is None and self.memory.spec.needs_checkpoints:
            current = self.checkpoint(position)
        self.checkpoints.cut(position)
        for group, table in enumerate(session.tables):
            table.commit(position, current.parts[group] if current is not None else None)
        self._release_source()
        session.checkpoints.cut(self.start + 1)
        session.checkpoints.absorb(self.checkpoints)
        session.stand_at(position, current)
        self._end()

    def _take_checkpoint(self, position: int) -> Checkpoint | None:
        """Move out the checkpoint at `position`, pinned, if there is one."""
        if self.source is not None and self.source.position == position:
            taken, self.source = self.source, None
            return taken
        return self.checkpoints.take(position)

    def _roll_back(self, position: int) -> None:
        """Release everything and cut the session to `position`, where the turn began; its source stays, if it is there,
        for the session's own checkpoint may have been evicted."""
        session, source = self.session, self.source
        if source is None or source.position != position:
            self.abort()
            session.truncate(position)
            return
        self.source = None
        self.abort()
        session.cut(position, source)

    def abort(self) -> None:
        """Release everything: the session is what it was."""
        for table in self.session.tables:
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
        self.session.turn = None
