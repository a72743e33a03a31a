"""Expectations of sessions' next turns: they decide who keeps memory, and bring parked state back ahead of turns."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from tenuto.base.checks import seconds
from tenuto.base.views import SessionKey, SessionState
from tenuto.engine.core import Core
from tenuto.engine.parking import FAILURES
from tenuto.memory.lineage import Lineage
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.tiers.moves import Move
from tenuto.sched.admission import Admission
from tenuto.sched.pressure import Pressure
from tenuto.session.gaps import Names, ToolGaps
from tenuto.session.session import Session

AHEAD = 1.0
"""The number of seconds before the expected time at which state begins to come back, in addition to twice the time that
the copies probably take."""
AGAIN = 0.25
"""The number of seconds after which state that found no room is tried again, until the expected time."""
AT_ONCE = 4
"""The most sessions whose state begins to come back in one step."""


@dataclass(frozen=True, slots=True)
class Return:
    """State of a session that is on its way back: that of the first `position` tokens at `version`, with the weights
    that computed it."""

    session: Session
    version: int
    position: int
    leases: Sequence[Lease]
    moves: Sequence[Move]
    lineage: Lineage


class Expectations:
    """Knows when sessions' next turns are expected, and brings their parked state back before.

    State that comes back belongs to the expectations until all of it has arrived, and then to the session at once.
    Until then the session is parked as before: a turn that starts meanwhile waits for the same copies. State comes back
    only while no turn or draft waits for room, to units that are free or that cached checkpoints and closed sessions
    have, beside those that running turns need for their known tokens. While no turn runs either, idle sessions that are
    expected later make way. It yields to every turn that needs its units.

    Invariant: the leases of `_coming` are those of this holder. An expectation has an entry in `_due` until it has
    passed, or the session's state has begun to come back.
    """

    holder_kind: ClassVar[HolderKind] = "copy"
    holder_name = "state that comes back early"

    def __init__(self, core: Core, pressure: Pressure, note_memory: Callable[[Session], None]) -> None:
        self._core = core
        self._clock = core.clock
        self._memory = core.idle_memory
        self._pressure = pressure
        self._note_memory = note_memory
        self._coming: dict[Session, Return] = {}
        self._due: list[tuple[float, int, float, SessionKey]] = []  # a heap; with the expected time
        self._entries = count()
        self.gaps = ToolGaps()

    def leases(self) -> list[Lease]:
        return [lease for each in self._coming.values() for lease in each.leases]

    # -- what is expected

    def expect(self, session: Session, within: float | None, calls: Names = ()) -> None:
        """Expects the next turn of a session without a submitted turn in `within` seconds; `None`: in the time that the
        tools of these names took before, which its last turn called, unless something is expected already; without
        names, expects nothing."""
        within = seconds("within", within)
        session.calls = calls or session.calls
        if within is None and calls:
            if session.expected is not None:
                return
            within = self.gaps.guess(session.policy.tenant, calls)
        session.expected = self._clock.now() + within if within is not None else None
        self._memory.expect(session)
        self._pressure.note(session)
        if session.expected is not None and self._memory.restores:
            self._enter(session.expected - AHEAD - self._seconds(session), session.expected, session.key)

    def met(self, session: Session) -> None:
        """Records that a turn of the session has been submitted."""
        if session.calls:
            self.gaps.note(session.policy.tenant, session.calls, self._clock.now() - session.last_turn_end)
        session.expected, session.calls = None, ()

    def _seconds(self, session: Session) -> float:
        """Returns twice the time that copying the session's state probably takes."""
        tiers, last = self._memory.tiers, max(0, len(session.history) - 1)
        size = tiers.copies.bytes_of(table.kept_units(last) for table in session.memory.tables)
        return 2 * size * sum(tiers.rates.get(tier) or 0.0 for tier in ("host", "disk"))

    def _enter(self, when: float, expected: float, key: SessionKey) -> None:
        heapq.heappush(self._due, (when, next(self._entries), expected, key))
        if len(self._due) > 2 * len(self._core.registry) + 64:
            self._due = [entry for entry in self._due if self._expecting(entry[3], entry[2]) is not None]
            heapq.heapify(self._due)

    def _expecting(self, key: SessionKey, expected: float) -> Session | None:
        """Returns the session if it is idle and its next turn is still expected at that time."""
        tenant, session_id = key
        session = self._core.registry.find(session_id, tenant)
        return session if session is not None and session.expected == expected and _is_idle(session) else None

    # -- what comes back

    def step(self, admission: Admission) -> None:
        """Gives sessions the state that has arrived, and begins to bring back what is due, beside what `admission` has
        promised to running turns."""
        for each in list(self._coming.values()):
            self._look_at(each)
        now, begun = self._clock.now(), 0
        while self._due and self._due[0][0] <= now and begun < AT_ONCE:
            _, _, expected, key = heapq.heappop(self._due)
            session = self._expecting(key, expected)
            if session is None or session in self._coming or now > expected:
                continue
            begun += 1
            if not self._begin(session, admission):
                self._enter(now + AGAIN, expected, key)

    def _look_at(self, coming: Return) -> None:
        session = coming.session
        if not _is_idle(session) or session.version != coming.version or session.memory.computed >= coming.position:
            self._give_up(coming)
        elif not any(move in self._memory.tiers.moves for move in coming.moves):
            failures = [move.failure for move in coming.moves if not move.usable]
            if failures:
                self._give_up(coming)
                self._memory.failed(session, FAILURES.get(failures[0], "unreadable"))
                return
            del self._coming[session]
            session.memory.drop()
            session.memory.receive(coming.position, coming.leases, coming.lineage)
            self._core.counts.note("return")
            self._note_memory(session)

    def _begin(self, session: Session, admission: Admission) -> bool:
        """Begins to bring the state of an idle session back. Returns False if it is not parked, or has no room."""
        memory, last = self._memory, max(0, len(session.history) - 1)
        position = memory.restorable(session, last)
        if not position or len(self._core.queue):
            return False
        busy = len(self._core.batch) or self._coming
        rest = None if busy or session.expected is None else max(0.0, session.expected - self._clock.now())
        pledged = admission.pledged(self._core.batch.running(), later=True)
        if not self._pressure.make_way(lambda: memory.lacking(session, position) + pledged, rest):
            return False
        if memory.restorable(session, last) != position:
            return False  # sessions that made way were parked, and took its place in a tier
        leases = memory.acquire(session, position, self)
        if leases is None:
            return False
        moves = memory.bring_back(session, position, leases)
        self._coming[session] = Return(session, session.version, position, leases, moves, memory.lineage(session))
        return True

    def _give_up(self, coming: Return) -> None:
        del self._coming[coming.session]
        for move in coming.moves:
            if move in self._memory.tiers.moves:
                self._memory.tiers.moves.give_up(move)
        for lease in coming.leases:
            lease.release()

    def withdraw(self) -> bool:
        """Gives up the state that began to come back last, because its units are needed. Returns whether there was
        any."""
        if not self._coming:
            return False
        self._give_up(next(reversed(self._coming.values())))
        return True

    def forget(self, session: Session) -> None:
        """Gives up the session's state that is on its way."""
        if session in self._coming:
            self._give_up(self._coming[session])

    def withdraw_all(self) -> None:
        """Gives up all state that is on its way."""
        while self.withdraw():
            pass


def _is_idle(session: Session) -> bool:
    return session.state is SessionState.OPEN and session.turn is None
