"""Sessions whose next turn is expected: their state stays, or comes back before the turn, while anything happens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tenuto.engine.expectations import AHEAD
from tenuto.session.session import Session
from tests.sim import internals

if TYPE_CHECKING:
    from tests.sim.actions import RandomWorld

TOOLS = (("ask",), ("ask", "look"), ("look",), ("write",))


def expecting(world: RandomWorld) -> list[tuple[Callable[[], None], int]]:
    """Returns the operations, with how often they occur."""
    return [
        (partial(_expect, world), 40),
        (partial(_leave, world), 80),
        (partial(_wait, world), 20),
        (partial(_comes_back, world), 15),
    ]


def _expect(world: RandomWorld) -> None:
    """Expects the next turn of a session soon, late or no more, or after tools; sometimes where it is refused."""
    rng = world.rng
    sid = world._pick(lambda s: s.turn is None or rng.random() < 0.1)
    if sid is None:
        return
    within = rng.choice((None, 0.01, AHEAD, 2.0, 3.0, 9.0, 100.0))
    calls = rng.choice(TOOLS) if within is None and rng.random() < 0.7 else ()
    expect(world, sid, within, calls)


def expect(world: RandomWorld, sid: str, within: float | None, calls: tuple[str, ...] = ()) -> None:
    session = world.session_of(sid)
    before = session.memory.computed, session.version
    turn = world.naive[sid].turn
    reasons = world._busy(world.naive[sid]) - ({"session_busy"} if turn is not None and turn.drafting else set())
    told = world.attempt(
        "expect",
        reasons,
        lambda: world.engine.sessions.expect(sid, within, calls=calls, **world.own(sid)),
        sid,
    )
    if told is None:
        return
    if (session.memory.computed, session.version) != before:
        world.found("expected", f"{sid} has changed because its turn is expected")
    if within is not None and session.expected != world.clock.now() + within:
        world.found("expected", f"{sid} is expected at {session.expected}, not in {within} seconds")


def _leave(world: RandomWorld) -> None:
    """Parks an idle session whose next turn is expected soon, so that it begins to come back."""
    sid = world._pick(lambda s: s.turn is None and s.memory.computed > 0 and not s.policy.pinned)
    if sid is not None:
        world.engine.pressure.drop(world.session_of(sid), "pressure")
        expect(world, sid, world.rng.choice((AHEAD / 2, AHEAD, 2.0)))


def _wait(world: RandomWorld) -> None:
    """Lets the time pass until shortly before a session's turn is expected, or until then."""
    coming = [s.expected for s in world.engine.registry if s.expected is not None and s.turn is None]
    if coming:
        when = world.rng.choice(coming) - world.rng.choice((AHEAD, AHEAD, AHEAD / 2, 0.0))
        world.clock.advance(max(0.0, when - world.clock.now()))


def _comes_back(world: RandomWorld) -> None:
    """Expects a parked session's turn at once. If nothing runs or waits and there is room, its state must come back,
    with as many tokens as were parked."""
    engine = world.engine
    sid = world._pick(lambda s: s.turn is None and not s.memory.computed and _parked(world, s))
    if sid is None:
        return
    for _ in range(40):
        if not engine.occupation.has_turns:
            break
        world.step()
    if not world.is_open(sid):
        return
    session = world.session_of(sid)
    position = engine.idle_memory.position(session)
    if not (_rests(world, session) and position):
        return
    if not _restorable(world, session):
        return
    room = bool((engine.idle_memory.lacking(session, position) <= engine.memory.free()).all())
    failures = engine.idle_memory.recomputed.copy()
    expect(world, sid, AHEAD / 2)
    for _ in range(30):
        world.step()
        if not world.is_open(sid) or engine.idle_memory.recomputed != failures:
            return
    waits = _rests(world, session) and session not in internals.coming_back(engine)
    if room and waits and _restorable(world, session):
        world.found("expected", f"{sid} has room, and its state of {position} tokens does not come back")


def _restorable(world: RandomWorld, session: Session) -> bool:
    return world.engine.idle_memory.restorable(session, max(0, len(session.history) - 1)) > 0


def _rests(world: RandomWorld, session: Session) -> bool:
    """Whether nothing runs or waits, and the session has no turn and nothing in memory."""
    return session.turn is None and not session.memory.computed and not world.engine.occupation.has_turns


def _parked(world: RandomWorld, session: Session) -> bool:
    return world.engine.idle_memory._sessions.get(session) in world.engine.idle_memory.tiers
