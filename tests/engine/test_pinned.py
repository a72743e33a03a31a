"""Pinned sessions: their memory stays on the device, and all other turns still run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenuto.base.config import Limits
from tenuto.base.errors import InvalidRequest, LimitReached, Overloaded
from tenuto.base.options import Policy
from tenuto.base.wire.messages import CloseSession, OpenSession
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.rendering import Renderer
from tests.engine.stage import FULL, PAGE, Stage, count_from, every_mix

CONTEXT = 64


def small(mix: tuple[object, ...] = (FULL,), **config: object) -> Stage:
    """Makes room for the longest turn and one and a half sessions beside it."""
    settings = {"units": 1, "context_length": CONTEXT, "max_running": 2, "checkpoint_share": 0.5, **config}
    need = Stage(mix, **{**settings, "units": 500}).engine.memory.turn_units(CONTEXT, generates=True)  # type: ignore[arg-type]
    settings["units"] = [n + (3 * CONTEXT // PAGE) // 2 for n in need]
    return Stage(mix, **settings)  # type: ignore[arg-type]


@every_mix
def test_a_pinned_session_keeps_its_memory_while_others_yield(mix: tuple[object, ...]) -> None:
    stage = small(mix)
    pinned = stage.committed("pinned", 40, 6, pinned=True)
    before = pinned.memory.computed
    for number in range(6):
        stage.committed(f"other {number}", 40, 6)
        assert pinned.memory.computed == before > 0
    assert sum(session.memory.computed == 0 for session in stage.engine.registry) > 0 or FULL not in mix
    assert stage.cost(lambda: stage.say("pinned", [1, 2], 1)) == 3  # the turn's tokens, and the one before


def test_a_pinned_session_whose_turn_waits_or_lost_its_units_keeps_its_committed_memory() -> None:
    stage = small()
    pinned = stage.committed("pinned", 30, 6, pinned=True, priority=-5)
    before = pinned.memory.computed
    turn = stage.say("pinned", count_from(3, 10), 8)
    stage.until(lambda: len(turn.output) > 2)
    stage.engine.pressure.preempt(turn)
    others = [stage.open(f"other {number}", priority=5).id for number in range(2)]
    for other in others:
        stage.say(other, count_from(9, 40), 20)
    while any(stage.engine.registry.get(other).turn is not None for other in others):
        assert pinned.has_running_turn or pinned.memory.computed >= before
        stage.step()
    stage.play()
    assert pinned.version == 2


@every_mix
def test_pins_are_refused_unless_the_longest_turn_still_fits(mix: tuple[object, ...]) -> None:
    stage = small(mix)
    pinned = [stage.committed("a", 30, 6, pinned=True)]
    stage.open("before")
    with pytest.raises(Overloaded, match="so that any turn fits beside them"):
        pinned.extend(
            stage.committed(f"b{number}", 20, 4, pinned=True, max_tokens=CONTEXT // 2) for number in range(100)
        )
    assert len(stage.engine.registry) == len(pinned) + 1  # the refused one left nothing
    stage.say("before", count_from(0, CONTEXT - 10), 10)
    stage.play()
    assert len(stage.engine.registry.get("before").history) == CONTEXT
    assert all(session.memory.computed for session in pinned)
    for session in pinned:
        stage.say(session.id, [1, 2, 3], 4)
    stage.play()
    stage.engine.sessions.close(pinned.pop().id)
    stage.open("again", pinned=True, max_tokens=CONTEXT // 2)


def test_no_session_yields_to_a_turn_that_cannot_fit_beside_pinned_memory() -> None:
    stage = small()
    stage.committed("pinned", 54, 6, pinned=True)
    stage.committed("also pinned", 24, 6, pinned=True, max_tokens=CONTEXT // 2)
    idle = stage.committed("idle", 3, 2)
    for name in ("first", "second"):
        stage.open(name)
    first = stage.say("first", count_from(0, 30), 30)
    stage.until(lambda: len(first.output) > 3)
    second = stage.say("second", count_from(5, 44), 15)
    while not first.state.ended:
        assert idle.memory.computed > 0
        stage.step()
    stage.play()
    assert second.state.ended


def test_a_fork_of_a_pinned_session_is_not_pinned() -> None:
    stage = small()
    stage.committed("a", pinned=True)
    assert not stage.engine.sessions.fork("a").policy.pinned


def test_a_session_that_cannot_be_pinned_again_is_restored_unpinned() -> None:
    stage = small()
    saved = stage.committed("a", 30, 6, pinned=True).saved()
    other = small()
    other.open("taken", pinned=True)
    restored = other.engine.sessions.restore(saved)
    assert (restored.policy, list(restored.history)) == (replace(saved.policy, pinned=False), list(saved.tokens))
    assert small().engine.sessions.restore(saved).policy.pinned


def test_a_tenant_may_pin_only_as_many_sessions_as_its_limits_allow() -> None:
    engine = Stage((FULL,), units=500, context_length=CONTEXT).engine
    dispatcher, limits = Dispatcher(engine, Renderer(None, None)), Limits(pinned=1)

    def open_one(name: str, *, pinned: bool = True, tenant: str = "ann") -> None:
        policy = Policy(tenant=tenant, pinned=pinned)
        dispatcher.execute(OpenSession(session=name, policy=policy, limits=limits))

    open_one("a")
    open_one("b", pinned=False)
    open_one("c", tenant="ben")
    with pytest.raises(LimitReached, match="1 sessions are pinned; allowed: 1"):
        open_one("d")
    dispatcher.execute(CloseSession(tenant="ann", session="a"))
    open_one("d")


def test_an_idle_pinned_session_does_not_leave_for_its_tenants_other_sessions() -> None:
    stage = Stage((FULL,), units=500, context_length=CONTEXT)
    stage.committed("pinned", 30, 6, pinned=True)
    stage.committed("other", 30, 6)
    leaving, kept = stage.engine.registry.leaving("", 9 + 1, None)
    assert ([session.id for session in leaving], kept) == (["other"], 9)
    assert stage.engine.registry.leaving("", 9, None)[0] == []


def test_pinned_must_be_true_or_false() -> None:
    with pytest.raises(InvalidRequest, match="pinned is 'yes'"):
        Policy(pinned="yes")  # type: ignore[arg-type]
