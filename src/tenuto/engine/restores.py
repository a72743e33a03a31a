"""Restores: the parked memory of sessions comes back when their turns start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tenuto.engine.parking import FAILURES, Parking
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.rows import Longs
from tenuto.memory.tiers.moves import Move
from tenuto.sched.batch import is_computed
from tenuto.session.session import Session
from tenuto.session.turn import Turn


@dataclass(frozen=True, slots=True)
class Arrival:
    """Memory that is arriving for a turn's session; it is complete when all `moves` have ended."""

    turn: Turn
    moves: Sequence[Move]


class Restores:
    """Restores the sessions of starting turns. A turn gets its row at once, and waits in it until the memory of its
    session has arrived. Without tiers, no turn waits for memory."""

    holder_kind: ClassVar[HolderKind] = "copy"
    holder_name = "copies to the device"

    def __init__(self, parking: Parking) -> None:
        self._parking = parking
        self._tiers = parking.tiers
        self._arriving: dict[Session, Arrival] = {}  # sessions whose open turns wait in their rows
        self._planned: tuple[Turn | None, int] = None, 0
        self.restored = 0  # total number of sessions restored

    def leases(self) -> list[Lease]:
        """Returns no leases: the session gets units at once, before their contents have arrived."""
        return []

    @property
    def possible(self) -> bool:
        """See `Restoring`."""
        return self._parking.restores

    def plan(self, turn: Turn) -> int:
        """See `Restoring`."""
        self._planned = turn, self._parking.restorable(turn.session, turn.resume_position)
        return self._planned[1]

    def units(self, turn: Turn, *, alone: bool = False) -> Longs:
        """See `Restoring`."""
        return self._parking.lacking(turn.session, self._planned[1], alone=alone)

    def restore(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Begins to restore the memory that `plan` found for the turn, into `slots`, the units reserved for the turn's
        start, and free units. The session has these units at once, but if the turn `awaits` them, they have no contents
        until `arrivals` returns the turn."""
        planned, position = self._planned
        self._planned = None, 0
        if planned is not turn or not position or is_computed(turn):  # it may have found more elsewhere
            return
        session, parking = turn.session, self._parking
        leases = parking.acquire(session, position, self, slots)
        if leases is None:
            parking.failed(session, "no room")
            return
        arrival = Arrival(turn, parking.bring_back(session, position, leases))
        session.memory.drop()
        session.memory.receive(position, leases, parking.lineage(session))
        if arrival.moves:
            self._arriving[session] = arrival
        else:
            self.restored += 1

    def awaits(self, turn: Turn) -> bool:
        """Whether the turn has to wait because its session's memory is arriving."""
        return turn.session in self._arriving

    def begun(self, turn: Turn) -> None:
        """Records that the waiting turn has begun on its session's memory; no other turn may until it has arrived."""
        turn.session.memory.arriving = True

    def arrivals(self) -> list[tuple[Turn, bool]]:
        """Returns the turns whose sessions' memory has arrived since the last call, or with `False` those for which it
        has failed to arrive; that memory must be given up and computed again."""
        if self._tiers.writes:
            self._tiers.take_written()
        if not self._arriving and not self._tiers.moves:
            return []
        self._tiers.take_moved()
        done = [each for each in self._arriving.values() if not any(move in self._tiers.moves for move in each.moves)]
        return [(each.turn, self._arrived(each)) for each in done]

    def _arrived(self, arrival: Arrival) -> bool:
        session = arrival.turn.session
        failures = [move.failure for move in arrival.moves if not move.usable]
        if failures:
            self._parking.failed(session, FAILURES.get(failures[0], "unreadable"))
            return False
        del self._arriving[session]
        session.memory.arriving = False
        self.restored += 1
        return True

    def give_up(self, turn: Turn) -> None:
        """Gives up the arriving memory of a turn that has left its row and released its own. The session keeps no
        memory on the device; its parked memory stays."""
        session = turn.session
        for move in self._arriving.pop(session).moves:
            self._tiers.moves.give_up(move)
        session.memory.arriving = False
        session.memory.drop()
        session.memory.lost = "parked"
