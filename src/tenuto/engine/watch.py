"""The changes on the map since the last look, for viewers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from tenuto.base.map_views import MapPart, MappedPool, MappedSession, MappedTurn, MappedUnits, Phase
from tenuto.base.views import SessionState
from tenuto.engine.auditor import Auditor
from tenuto.engine.core import Core
from tenuto.engine.flights import Flights
from tenuto.memory.pool import Pool
from tenuto.sched.pressure import Pressure
from tenuto.session.registry import Registry
from tenuto.session.session import Session
from tenuto.session.turn import Turn

BUSY_SECONDS = 0.002
"""The time that a look may take while turns run: less than 1% of the time between two looks."""
IDLE_SECONDS = 0.02
"""The time that a look may take otherwise."""
VISITS = 8
"""The number of sessions described between two looks at the clock."""
ROUND = 32
"""The number of sessions that each look describes again although nothing seems to have changed: older checkpoints may
have been evicted, or parked state may have moved."""
RECENT = 48
"""The most turns of a session whose lengths are shown."""


class Watch:
    """Describes sessions that may have changed since the last look, within a limited time; the others wait for the next
    look. Between looks it costs what `Pressure` does to note sessions.

    Sessions that were noted first are described first. Sessions with running turns are noted at every look, since their
    turns grow without being noted.
    """

    def __init__(self, core: Core, pressure: Pressure, auditor: Auditor, flights: Flights) -> None:
        self._core = core
        self._pressure = pressure
        self._auditor = auditor
        self._flights = flights
        self._registry: Registry = core.registry
        self._numbers: OrderedDict[Session, int] = OrderedDict()  # those described, the next for `round` first
        self._sessions: dict[int, Session] = {}
        self._last = 0
        self.round = ROUND

    @property
    def watching(self) -> bool:
        return self._pressure.noted is not None

    def end(self) -> None:
        """Forgets everything; nobody looks any more."""
        self._pressure.noted = None
        self._numbers.clear()
        self._sessions.clear()

    def look(self, *, steps: int, pools: Sequence[Pool], fresh: bool, again: Iterable[int]) -> MapPart:
        """Returns what has changed since the last look, and with `fresh` all that there is. `again`: the numbers of
        sessions to describe in any case."""
        if fresh or not self.watching:
            self.end()
            self._pressure.noted = dict.fromkeys([*self._registry, *self._registry.prefixes])
        noted = self._pressure.noted
        assert noted is not None
        running = self._core.batch.running()
        noted |= dict.fromkeys(turn.session for turn in running)
        again_sessions = [self._sessions[number] for number in again if number in self._sessions]
        noted |= dict.fromkeys(again_sessions)
        for session in list(islice(self._numbers, self.round)):
            self._numbers.move_to_end(session)
            noted[session] = None
        described, gone = self._describe(noted, BUSY_SECONDS if running else IDLE_SECONDS)
        return self._part(steps, pools, described, gone, more=bool(noted))

    def _describe(self, noted: dict[Session, None], seconds: float) -> tuple[list[MappedSession], list[int]]:
        """Takes sessions out of `noted` and describes them, until `seconds` are over. Returns their descriptions, and
        the numbers of those that are gone."""
        now = self._core.clock.now
        until, described, gone = now() + seconds, list[MappedSession](), list[int]()
        while noted and now() < until:
            for session in list(islice(noted, VISITS)):
                del noted[session]
                if self._is_there(session):
                    described.append(self._session(session))
                elif session in self._numbers:
                    number = self._numbers.pop(session)
                    del self._sessions[number]
                    gone.append(number)
        return described, gone

    def _is_there(self, session: Session) -> bool:
        return session in self._registry.prefixes or self._registry.find(session.id, session.policy.tenant) is session

    def _part(
        self, steps: int, pools: Sequence[Pool], sessions: list[MappedSession], gone: list[int], *, more: bool
    ) -> MapPart:
        core, flights, auditor = self._core, self._flights, self._auditor
        now = core.clock.now()
        return MapPart(
            now=now,
            more=more,
            steps=steps,
            open=len(core.registry),
            running=len(core.batch),
            rows=core.config.max_running,
            queued=core.queue.submitted,
            computed=flights.computed,
            generated=flights.sampled,
            busy=flights.seconds,
            restored=core.restores.restored,
            tiers=core.idle_memory.used,
            tier_moves=dict(core.idle_memory.tiers.moved),
            pools=[self._pool(index, pool) for index, pool in enumerate(pools)],
            sessions=sessions,
            gone=gone,
            audit=auditor.last,
            audited=now - auditor.last_at if auditor.last is not None else 0.0,
        )

    def _pool(self, index: int, pool: Pool) -> MappedPool:
        """Describes a pool; those beside the memory's come last, and the size of their units is not known."""
        known = index < len(self._core.memory.pools)
        return MappedPool(
            name=pool.name,
            capacity=pool.capacity,
            slots=pool.slots,
            unit_bytes=self._core.executor.unit_bytes(index) if known else 0,
            free=pool.free,
            leased=np.packbits(np.frombuffer(pool.counts, np.int32) > 0).tobytes(),
            limbo=np.array(pool.in_limbo(), np.int32).tobytes(),
        )

    def _number(self, session: Session) -> int:
        number = self._numbers.get(session)
        if number is None:
            self._last += 1
            number = self._numbers[session] = self._last
            self._sessions[number] = session
        return number

    def _session(self, session: Session) -> MappedSession:
        policy, memory, origin, parking = session.policy, session.memory, session.origin, self._core.idle_memory
        parked, tier = parking.parked_at(session)
        parent = self._number(session.parent) if session.parent is not None else None
        return MappedSession(
            number=self._number(session),
            tenant=policy.tenant,
            session=session.id,
            state=session.state.value,
            listed=not (policy.hidden or policy.ephemeral),
            pinned=policy.pinned,
            version=session.version,
            parent=parent,
            forked=origin.position if origin is not None else 0,
            turns=len(session.records),
            recent=[(r.input_end - r.start, r.end - r.input_end) for r in session.records[-RECENT:]],
            tokens=len(session.history),
            computed=memory.computed,
            parked=parked,
            tier=tier,
            saved=parking.saves.reaches(session.key) if session.state is not SessionState.CLOSED else 0,
            since=session.last_turn_end,
            arriving=memory.arriving,
            turn=self._turn(session.turn) if session.turn is not None else None,
            held=self._held(session),
        )

    def _held(self, session: Session) -> list[MappedUnits]:
        places = {pool: index for index, pool in enumerate(self._core.memory.pools)}
        return [
            MappedUnits(pool=places[lease.pool], kind=holder.holder_kind, units=lease.units.tobytes())
            for holder in session.memory.holders()
            for lease in holder.leases()
            if len(lease)
        ]

    def _turn(self, turn: Turn) -> MappedTurn:
        phase, why = self._phase(turn)
        memory = turn.session.memory.turn
        return MappedTurn(
            number=turn.number,
            phase=phase,
            why=why,
            prompt=turn.prompt_length,
            cached=turn.cached,
            computed=memory.computed if memory is not None else turn.session.memory.computed,
            output=len(turn.output),
            limit=turn.max_new_tokens,
            arrived=turn.arrival,
        )

    def _phase(self, turn: Turn) -> tuple[Phase, str]:
        """Returns what the turn does, and why."""
        if turn.running:
            return self._running(turn)
        if turn.preempted:
            if turn.session.memory.turn is not None:
                return "paused", "its row went to another tenant"
            return "preempted", "its memory went to earlier turns"
        if turn.drafting:
            return "drafting", ""
        crowded = "memory is short" if self._core.batch.crowded else ""
        return "queued", crowded if self._core.memory.rows.free else "every row is taken"

    def _running(self, turn: Turn) -> tuple[Phase, str]:
        memory = turn.session.memory.turn
        if self._core.restores.awaits(turn):
            return "restoring", "its state comes back from a tier"
        if memory is not None and memory.row in self._core.batch.held:
            return "sharing", "another turn computes the same beginning"
        if turn.output:
            return "decode", ""
        again = max(turn.recomputed, key=turn.recomputed.__getitem__, default="")
        return "prefill", f"computed again: {again}" if again else ""
