"""Recurrent state: one slot holds the state after all tokens so far. A position is resumable if a slot holds the state
there."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.groups import GroupSpec
from tenuto.base.plan import NO_SLOT, StateMoves
from tenuto.memory.kinds.group import NOWHERE, Group, Growth, Mask, MemoryChanges, Table
from tenuto.memory.pool import Holder, Lease, Pool
from tenuto.memory.rows import Longs, Rows
from tenuto.memory.shape import Shape


class StateGroup(Group):
    """A group of state slots. Its arrays have one entry per row; those of slots are int32.

    The `current` slot holds the state after the row's `scheduled` tokens, except the last `Rows.kept` ones; the
    `alternate` one, if `alternate_at` >= 0, the state at position `alternate_at`. A `frozen` row's current slot belongs
    to a checkpoint and is not written.

    Invariant: no slot ever holds a state to which a token in doubt contributed. A step with guesses writes the state
    before its first token, and the executor keeps the inputs of its tokens. Once it is settled which of them belong to
    the sequence, the row's next step absorbs exactly these. If the turn leaves its row before, they are computed again.
    """

    stands_at_step_ends = True

    def __init__(self, index: int, spec: GroupSpec, pool: Pool, page_size: int, shape: Shape, rows: Rows) -> None:
        super().__init__(index, spec, pool, page_size, shape, rows)
        self.current = np.full(shape.max_running, NO_SLOT, np.int32)
        self.alternate = np.full(shape.max_running, NO_SLOT, np.int32)
        self.alternate_at = np.full(shape.max_running, NOWHERE, np.int64)
        self.frozen = np.zeros(shape.max_running, np.bool_)
        self.spare: dict[int, list[int]] = {}  # own slots not used yet, by row

    def table(self, holder: Holder) -> StateTable:
        return StateTable(self)

    @staticmethod
    def turn_units(spec: GroupSpec, page_size: int, shape: Shape, end: int, *, generates: bool) -> int:
        """Returns the number of working slots, plus one that stays at the end of the input while the turn generates."""
        if not generates:
            return 1
        return 3 if shape.overlap else 2

    @staticmethod
    def session_units(spec: GroupSpec, page_size: int, computed: int) -> int:
        return 1

    @property
    def units_at_start(self) -> int:
        return self.turn_units(self.spec, self.page_size, self.shape, 0, generates=True)

    def advance(self, rows: Longs, starts: Longs, keeps: Mask, grown: Sequence[Growth], moves: MemoryChanges) -> None:
        """Each row reads its current slot and writes its alternate one, or the current one if it has no alternate."""
        frozen, reads, other = self.frozen[rows], self.current[rows], self.alternate[rows]
        kept = self.rows.kept[rows]
        swapped = other != NO_SLOT
        if (frozen & ~swapped).any():
            raise InvariantError("a row would write a state slot that a checkpoint holds")
        writes = np.where(swapped, other, reads)
        back = swapped & ~frozen & self.shape.overlap
        self.current[rows] = writes
        self.alternate[rows] = np.where(back, reads, NO_SLOT)
        self.alternate_at[rows] = np.where(back, starts - kept, NOWHERE)
        self.frozen[rows] = False
        moves.states.append(StateMoves(reads, writes, kept.astype(np.int32), keeps.astype(np.int32)))
        for row in rows[frozen].tolist():
            moves.left[row] = None
            if self.shape.overlap:
                self._renew_alternate(row)

    def write_elsewhere(self, row: int) -> None:
        self.frozen[row] = True
        self._renew_alternate(row)

    def _renew_alternate(self, row: int) -> None:
        if self.alternate[row] == NO_SLOT and self.spare[row]:
            self.alternate[row] = self.spare[row].pop()

    def live(self, row: int) -> int:
        """Returns the position of the row's current slot, where the turn can go on; `NOWHERE` if the slot is a
        checkpoint's, or if a step with guesses, which may fail, is still to write it."""
        if self.frozen[row] or self.rows.uncertain[row]:
            return NOWHERE
        return int(self.rows.scheduled[row] - self.rows.kept[row])


class StateTable(Table):
    """The state slots an open turn works with in one group. The session keeps its slots in its checkpoints.

    A step reads the current slot and writes the alternate one, or the current one if there is no alternate. A slot that
    a checkpoint holds is never written. While a turn is running, `current` and `alternate` are in its row.
    """

    _group: StateGroup

    def __init__(self, group: StateGroup) -> None:
        super().__init__(group)
        self.current = NO_SLOT
        self.alternate = NO_SLOT
        self.spare: list[int] = []  # own slots not used yet

    def need(self, worst_case: int, held: int, start: int, end: int, *, at_end: bool) -> int:
        return max(0, worst_case - held)

    def counted(self, kept: Lease | None) -> int:
        return len(self.opened) + (len(kept) if kept is not None else 0)

    def kept_ranges(self, position: int, skip: int = 0) -> Iterator[tuple[int, int]]:
        if not skip:
            yield position, position

    def kept_units(self, position: int) -> int:
        return 1

    # -- the open turn

    def begin(self, units: Lease, start: int, part: Lease | None, *, at_end: bool) -> None:
        """Opens a turn that starts from the state in `part` (`None`: the zero state) and writes to `units`."""
        self.take_up(units)
        self.spare = list(units.units)
        self.current = part.units[0] if part is not None else NO_SLOT
        self.alternate = self.spare.pop() if self.spare else NO_SLOT

    def extend(self, units: Lease) -> None:
        self.spare.extend(units.units)
        super().extend(units)

    def attach(self, row: int) -> None:
        super().attach(row)
        group = self._group
        if group.shape.overlap and self.alternate == NO_SLOT and self.spare:
            self.alternate = self.spare.pop()
        group.current[row], group.alternate[row], group.alternate_at[row] = self.current, self.alternate, NOWHERE
        group.spare[row] = self.spare
        group.frozen[row] = self.current not in self.opened.units

    def leave(self) -> None:
        group, row = self._group, self.row
        if row >= 0:
            self.current, self.alternate = int(group.current[row]), int(group.alternate[row])
        super().leave()

    def live_below(self, target: int, scheduled: int) -> int:
        group, row = self._group, self.row
        places = (group.live(row), int(group.alternate_at[row])) if row >= 0 else (scheduled,)
        return max((position for position in places if position <= target), default=NOWHERE)

    def stood_on(self, position: int) -> array[int]:
        return array("i", [self.current])

    def truncate_turn(self, position: int, part: Lease | None, *, again: bool) -> None:
        """Makes an own slot, a checkpoint's slot or the zero state current; all other own slots can be written."""
        slot = part.units[0] if part is not None else NO_SLOT if again else self._slot_at(position)
        self.leave()
        self.current = slot
        self.spare = [unit for unit in self.opened.units if unit != slot]
        self.alternate = self.spare.pop() if slot not in self.opened.units else NO_SLOT

    def _slot_at(self, position: int) -> int:
        """Returns the slot that holds the state at a live `position`."""
        group, row = self._group, self.row
        if row < 0:
            return self.current
        if position == group.live(row):
            return int(group.current[row])
        if position == group.alternate_at[row]:
            return int(group.alternate[row])
        raise InvariantError(f"{self.pool.name}: no slot of row {row} holds the state at {position}")

    def abort(self) -> None:
        super().abort()
        self.current = self.alternate = NO_SLOT
        self.spare = []

    # -- checkpoints

    def keep(self, position: int, holder: Holder) -> Lease:
        """Moves the slot at `position` to a checkpoint; from now on it is only read."""
        at = self.opened.units.index(self._slot_at(position))
        return self.opened.take(at, at + 1, holder)

    def take_back(self, part: Lease) -> None:
        for slot in part.units:
            self.pool.take_alone(slot, 0)
        self.opened.absorb(part)

    @property
    def can_spare(self) -> bool:
        return self.pool.free > 0

    def take_spare(self) -> None:
        self.opened.grow(1)
        self.spare.append(self.opened.units[-1])
