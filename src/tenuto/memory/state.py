"""Recurrent state: one slot holds the state after all tokens so far. A position is resumable where a slot stands."""

from __future__ import annotations

from tenuto.base.errors import InvariantError
from tenuto.base.plan import NO_SLOT
from tenuto.memory.pool import Holder, Lease, Pool


class StateTable:
    """The state slots an open turn works with in one group. What the session keeps is in its checkpoints.

    A step reads the current slot and writes the alternate one if there is one, else the current in place. A slot that a
    checkpoint holds is never written. While a turn is running, `current` and `alternate` live in its row.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.own: Lease | None = None  # slots this turn may write
        self.current = NO_SLOT
        self.alternate = NO_SLOT
        self.spare: list[int] = []  # own slots in no use yet

    def begin(self, source: Lease | None, slots: Lease) -> None:
        """Open a turn that starts from the state in `source` (`None`: the zero state) and may write `slots`."""
        if self.own is not None:
            raise InvariantError(
                f"{self.pool.name}: {slots.holder.holder_name} begins on a table another turn has open"
            )
        self.own = slots
        self.spare = list(slots.units)
        self.current = source.units[0] if source is not None else NO_SLOT
        self.alternate = self.spare.pop() if self.spare else NO_SLOT

    @property
    def opened(self) -> Lease:
        """The open turn's own slots."""
        if self.own is None:
            raise InvariantError(f"{self.pool.name}: no turn is open on this table")
        return self.own

    def extend(self, slots: Lease) -> None:
        """Add reserved slots to those the turn may write."""
        self.spare.extend(slots.units)
        self.opened.absorb(slots)

    def stand_on(self, slot: int) -> None:
        """Cut the turn back to the state in `slot`, an own one or a checkpoint's; all other own slots can be
        written."""
        self.current = slot
        self.spare = [unit for unit in self.opened.units if unit != slot]
        self.alternate = self.spare.pop() if slot not in self.opened.units else NO_SLOT

    def keep(self, slot: int, holder: Holder) -> Lease:
        """Move the own slot `slot` to a checkpoint; from now on it is only read."""
        at = self.opened.units.index(slot)
        return self.opened.take(at, at + 1, holder)

    def commit(self, _position: int, _kept: Lease | None) -> None:
        """The turn commits: a checkpoint has moved the slot it keeps out of this table."""
        self.abort()

    def truncate(self, _position: int, _kept: Lease | None) -> None:
        """The session is cut: all it keeps is in its checkpoints."""

    def abort(self) -> None:
        """The turn gives back what it acquired."""
        self.opened.release()
        self.own = None
        self.current = self.alternate = NO_SLOT
        self.spare = []
