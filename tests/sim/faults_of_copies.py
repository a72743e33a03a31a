"""Faults of copies to the device that are made while steps run, planted one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.base.plan import Bytes
from tenuto.engine.restores import Restores
from tenuto.memory.pool import Lease, Pool
from tenuto.memory.tiers import moves
from tenuto.memory.tiers.contents import Contents
from tenuto.memory.tiers.disk import Disk, UnitCopy
from tenuto.memory.tiers.moves import Job, Move, MovesUnderWay
from tenuto.memory.tiers.parked import Parked
from tenuto.memory.tiers.tiers import Tiers
from tenuto.session.turn import Turn
from tests.sim.faults import replaced


def a_page_is_handed_out_while_a_copy_writes_it() -> Any:
    """When the turn that the copy was for is aborted, its units are handed out at once."""
    return replaced(Pool, "copy_begins", lambda original: lambda self, units: None)


def units_that_a_copy_wrote_are_never_freed() -> Any:
    """Units released while a copy writes them are never freed."""
    return replaced(Pool, "copy_ended", lambda original: lambda self, units: None)


def a_turn_starts_before_its_copies_have_arrived() -> Any:
    """A turn starts as soon as its session has the units, whether or not they are filled."""

    def make(original: Any) -> Any:
        def bring_back(self: Tiers, parked: Parked, leases: Sequence[Lease], names: Contents) -> list[Move]:
            original(self, parked, leases, names)
            return []

        return bring_back

    return replaced(Tiers, "bring_back", make)


def moves_that_another_session_began_are_not_waited_for() -> Any:
    """Two sessions share units: the one whose turn starts later waits only for its own moves."""

    def make(original: Any) -> Any:
        def bring_back(self: Tiers, parked: Parked, leases: Sequence[Lease], names: Contents) -> list[Move]:
            return [move for move in original(self, parked, leases, names) if move.wanted == 1]

        return bring_back

    return replaced(Tiers, "bring_back", make)


def a_move_that_another_waits_for_is_cancelled() -> Any:
    """A move is cancelled when the turn that began it ends, although others still wait for it."""

    def make(original: Any) -> Any:
        def give_up(self: MovesUnderWay, move: Move) -> None:
            move.wanted -= 1
            move.cancelled = True

        return give_up

    return replaced(MovesUnderWay, "give_up", make)


def a_failed_copy_counts_as_restored() -> Any:
    """The result of a move is never checked."""
    return replaced(Job, "usable", lambda original: property(lambda self: not self.cancelled))


def a_session_keeps_memory_that_has_not_arrived() -> Any:
    """A turn is aborted while its session's memory arrives, and the session keeps that memory as if it were
    complete."""

    def make(original: Any) -> Any:
        def give_up(self: Restores, turn: Turn) -> None:
            for move in self._arriving.pop(turn.session).moves:
                self._tiers.moves.give_up(move)
            turn.session.memory.arriving = False

        return give_up

    return replaced(Restores, "give_up", make)


def a_fork_shares_memory_that_has_not_arrived() -> Any:
    """A session whose memory is still arriving is forked as if it were complete."""
    return replaced(Restores, "begun", lambda original: lambda self, turn: None)


def the_content_of_a_file_is_not_compared() -> Any:
    """The content of a file is not checked, so files that were swapped are mistaken for each other."""

    def make(original: Any) -> Any:
        def read_units(disk: Disk | None, copies: Sequence[UnitCopy]) -> list[Bytes]:
            group, file = copies[0].place
            if disk is None or file is None:
                return original(disk, copies)
            return [unit.data for unit in disk.read(file, {group: [copy.row for copy in copies]})[group]]

        return read_units

    return replaced(moves, "read_units", make)


def a_full_disk_is_written_to() -> Any:
    """No file is removed to make room for memory that leaves the host."""
    return replaced(Tiers, "make_room", lambda original: lambda self, size, parked=None: True)


FAULTS_OF_COPIES = (
    a_page_is_handed_out_while_a_copy_writes_it,
    units_that_a_copy_wrote_are_never_freed,
    a_turn_starts_before_its_copies_have_arrived,
    moves_that_another_session_began_are_not_waited_for,
    a_move_that_another_waits_for_is_cancelled,
    a_failed_copy_counts_as_restored,
    a_session_keeps_memory_that_has_not_arrived,
    a_fork_shares_memory_that_has_not_arrived,
    the_content_of_a_file_is_not_compared,
    a_full_disk_is_written_to,
)
