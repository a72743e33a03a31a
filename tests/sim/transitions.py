"""Transitions of turns and sessions within a step, logged by an engine that is watched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tenuto.base.errors import InvariantError
from tenuto.base.turns import TurnState
from tenuto.base.views import SessionState
from tenuto.engine import engine as engine_module
from tenuto.engine import lifecycle as lifecycle_module
from tenuto.engine.engine import Engine
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.sharing import Found, Sharing
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.sim.internals import exclusive, of_closed_sessions, shares

MAX_EVENTS = 2000
"""Transitions within one step: far more than the number of turns."""


@dataclass(slots=True)
class Event:
    """A transition within a step: "start", "pause", "preempt", "park", "drop", or "share", when a session takes memory
    of another one and gives up its own.

    `freed`: units of each group that it freed; `alone`: units of each group that only this session held; `shared`:
    whether others held some of its units. `fitted`: for the drop of a session with a waiting turn, whether that turn
    would have fitted. `better`: for a drop that frees nothing by itself, a session that would have freed something.
    `closed`: for an open session, units of each group that only closed sessions held."""

    kind: str
    turn: Turn | None
    session: Session
    state: TurnState | None
    why: str
    freed: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    shared: bool = False
    fitted: bool = False
    better: Session | None = None
    closed: tuple[int, ...] = ()


class Log:
    """The transitions since the log was last cleared."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.engine: Engine | None = None
        self.would_fit: Any = None  # (turn) -> bool, called before a session is dropped
        self.better_victim: Any = None  # (session) -> another or None, called before a drop that frees nothing


def watched_engine(log: Log, *args: Any, **options: Any) -> Engine:  # noqa: C901 - a method for each transition
    """Returns an engine whose life cycle writes to `log`."""

    class Watched(Lifecycle):
        def _unused(self) -> list[int]:
            assert log.engine is not None
            return [pool.free + pool.limbo for pool in log.engine.memory.pools]

        def preempt(self, turn: Turn, *more: Any) -> None:
            if turn.state is not TurnState.RUNNING:  # preempt() drops the session
                super().preempt(turn, *more)
                return
            event = Event("preempt", turn, turn.session, turn.state, more[0] if more else "preempted")
            before = self._unused()
            event.alone, event.shared = exclusive(turn.session), shares(turn.session)
            if log.engine is not None:
                event.closed = of_closed_sessions(log.engine)
            super().preempt(turn, *more)
            event.freed = tuple(b - a for a, b in zip(before, self._unused(), strict=True))
            log.events.append(event)

        def pause(self, turn: Turn) -> None:
            state = turn.state
            super().pause(turn)
            if state is TurnState.RUNNING and turn.session.memory.turn is not None:  # otherwise it was preempted
                log.events.append(Event("pause", turn, turn.session, state, "paused"))

        def drop(self, session: Session, why: str = "pressure") -> None:
            turn = session.turn
            event = Event("drop", turn, session, turn.state if turn is not None else None, why)
            before = self._unused()
            event.alone, event.shared = exclusive(session), shares(session)
            if session.state is not SessionState.CLOSED and log.engine is not None:
                event.closed = of_closed_sessions(log.engine)
            if turn is not None and turn.state in (TurnState.QUEUED, TurnState.PREEMPTED):
                event.fitted = log.would_fit is not None and log.would_fit(turn)
            if log.better_victim is not None and turn is None and not any(event.alone):
                event.better = log.better_victim(session)
            super().drop(session, why)
            event.freed = tuple(b - a for a, b in zip(before, self._unused(), strict=True))
            log.events.append(event)

        def _park(self, session: Session) -> None:
            super()._park(session)
            log.events.append(Event("park", None, session, None, "expiring"))

        def start(self, turn: Turn, *more: Any) -> None:
            state = turn.state
            if len(log.events) > MAX_EVENTS:
                raise InvariantError(f"endless step: {turn!r} is started after {len(log.events)} transitions")
            super().start(turn, *more)
            log.events.append(Event("start", turn, turn.session, state, ""))

    class WatchedSharing(Sharing):
        def begin_with(self, turn: Turn, found: Found) -> None:
            freed = exclusive(turn.session)
            super().begin_with(turn, found)
            log.events.append(Event("share", turn, turn.session, turn.state, "", freed))

    with (
        patch.object(engine_module, "Lifecycle", Watched),
        patch.object(lifecycle_module, "Sharing", WatchedSharing),
    ):
        log.engine = Engine(*args, **options)
    return log.engine
