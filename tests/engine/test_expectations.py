"""Sessions whose next turn is expected keep their memory, or have it back when the turn comes."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.base.errors import InvalidRequest, SessionBusy
from tenuto.base.groups import Kind
from tenuto.engine.expectations import AGAIN, AHEAD, AT_ONCE
from tests.carriers import ByHand
from tests.engine.stage import FULL, Stage, continuation, count_from, every_mix
from tests.engine.test_parking import goes_on, make
from tests.sched.test_pressure import squeeze


def parked(mix: tuple[Kind, ...] = (FULL,), **options: Any) -> Stage:
    """Makes a session that is parked, and whose next turn is expected in a minute."""
    stage = make(mix, **options)
    stage.committed("s", 40)
    stage.engine.pressure.drop(stage.engine.registry.get("s"), "pressure")
    stage.engine.sessions.expect("s", 60.0)
    stage.step()
    assert computed(stage) == 0
    return stage


def rest(stage: Stage) -> None:
    """Steps without turns: one begins to bring state back, the next takes what has arrived."""
    for _ in range(3):
        stage.step()


def computed(stage: Stage, name: str = "s") -> int:
    return stage.engine.registry.get(name).memory.computed


def test_of_idle_sessions_the_one_expected_last_yields_first() -> None:
    stage = Stage(max_running=1)
    for name in ("used", "soon", "late", "overdue"):
        stage.committed(name, tokens=20, output=1)
    stage.engine.sessions.expect("soon", 5.0)
    stage.engine.sessions.expect("late", 500.0)
    stage.engine.sessions.expect("overdue", 1.0)
    stage.clock.advance(4.0)
    stage.open("runs")
    stage.say("runs", count_from(1, 10), 90)
    stage.until(lambda: len(stage.engine.batch) == 1)
    gone: list[str] = []
    while squeeze(stage.engine):
        gone += [name for name in ("soon", "late", "overdue", "used") if not computed(stage, name) and name not in gone]
    assert gone == ["late", "used", "overdue", "soon"]


@every_mix
def test_state_comes_back_before_the_turn_and_not_earlier(mix: tuple[Kind, ...]) -> None:
    stage = parked(mix)
    length = len(stage.engine.registry.get("s").history)
    stage.clock.advance(50.0)
    rest(stage)
    assert computed(stage) == 0
    stage.clock.advance(10.0 - AHEAD)
    rest(stage)
    assert computed(stage) == length - 1
    restored = stage.engine.restores.restored
    assert goes_on(stage, "s", 5, 6) == length - 1
    assert stage.engine.restores.restored == restored, "the turn found the state and waited for nothing"


@every_mix
def test_a_turn_that_starts_meanwhile_waits_for_the_same_copies(mix: tuple[Kind, ...]) -> None:
    carrier = ByHand(1)
    stage = parked(mix, carrier=carrier)
    stage.clock.advance(60.0)
    stage.step()
    under_way = len(carrier.moves)
    assert under_way == 1
    turn = stage.say("s", [5, 6], 3)
    stage.step()
    stage.engine.audit()
    assert len(carrier.moves) == under_way, "nothing is copied twice"
    carrier.finish()
    stage.play()
    assert turn.result is not None
    assert turn.result.usage.cached == turn.base_length - 1
    stage.engine.audit()


@pytest.mark.parametrize("what", ["rewind", "close", "erase", "drop"])
def test_whatever_happens_to_the_session_meanwhile_nothing_is_left(what: str) -> None:
    carrier = ByHand(1)
    stage = parked(carrier=carrier)
    stage.clock.advance(60.0)
    stage.step()
    assert carrier.moves
    match what:
        case "rewind":
            stage.engine.sessions.rewind("s", position=10)
        case "close":
            stage.engine.sessions.close("s")
        case "erase":
            assert not stage.engine.erasure.erase("s").erased.failed
        case _:
            stage.engine.sessions.drop("s")
    carrier.finish()
    stage.step()
    stage.engine.audit()
    assert not stage.engine.expectations.leases()
    pool = stage.engine.memory.pools[0]
    assert what != "erase" or not any(pool.used[unit] for unit in pool.unused()[0])
    if what in ("rewind", "drop"):
        assert computed(stage) == 0
        history = list(stage.engine.registry.get("s").history)
        turn = stage.say("s", [5], 3)
        while turn.result is None:
            stage.step()
            carrier.finish()
        assert list(turn.output) == continuation([*history, 5], 3)


def test_state_on_its_way_yields_to_a_turn_that_needs_its_units() -> None:
    carrier = ByHand(1)
    stage = parked(carrier=carrier)
    stage.clock.advance(60.0)
    stage.step()
    assert stage.engine.expectations.leases()
    stage.open("large")
    turn = stage.say("large", count_from(1, 195), 3)
    stage.step()
    assert not stage.engine.expectations.leases()
    carrier.finish()
    stage.play()
    assert turn.result is not None
    stage.engine.audit()


def test_state_that_finds_no_room_is_tried_again_until_its_time() -> None:
    stage = parked(units=52)
    stage.open("large")
    turn = stage.say("large", count_from(1, 100), 99)
    stage.until(lambda: len(turn.output) > 70)
    stage.clock.advance(60.0 - AHEAD)
    stage.step()
    assert computed(stage) == 0
    stage.engine.turns.abort("large")
    stage.play()
    assert computed(stage) == 0
    stage.clock.advance(AGAIN)
    rest(stage)
    assert computed(stage) > 0


def test_idle_sessions_expected_later_make_way_while_nothing_runs() -> None:
    stage = make(units=30)
    for name in ("later", "never"):
        stage.committed(name, 50)
    stage.engine.pressure.drop(stage.engine.registry.get("later"), "pressure")
    stage.committed("fills", 50)
    stage.engine.sessions.expect("later", 100.0)
    stage.clock.advance(99.0)
    rest(stage)
    assert computed(stage, "later") > 0
    assert computed(stage, "never") == 0
    assert stage.engine.idle_memory.position(stage.engine.registry.get("never")) > 0, "it was parked, not lost"
    stage.engine.audit()


def test_sessions_that_come_sooner_do_not_make_way() -> None:
    stage = make(units=30)
    for name in ("later", "sooner"):
        stage.committed(name, 50)
    stage.engine.pressure.drop(stage.engine.registry.get("later"), "pressure")
    stage.committed("fills", 50)
    for name, within in (("later", 100.0), ("sooner", 99.5), ("fills", 99.4)):
        stage.engine.sessions.expect(name, within)
    stage.clock.advance(99.0)
    rest(stage)
    assert computed(stage, "later") == 0
    assert computed(stage, "sooner") > 0
    assert computed(stage, "fills") > 0


def test_few_sessions_come_back_in_one_step() -> None:
    carrier = ByHand(1)
    stage = make(units=300, carrier=carrier)
    names = [f"n{i}" for i in range(AT_ONCE + 2)]
    for name in names:
        stage.committed(name, 20)
        stage.engine.pressure.drop(stage.engine.registry.get(name), "pressure")
    for name in names:
        stage.engine.sessions.expect(name, 1.0)
    stage.step()
    assert len(carrier.moves) == AT_ONCE
    stage.step()
    assert len(carrier.moves) == len(names)
    carrier.finish()
    rest(stage)
    assert all(computed(stage, name) for name in names)


def test_a_turn_may_say_when_the_next_one_comes() -> None:
    stage = Stage()
    stage.open("s")
    stage.say("s", [1, 2], 3, expect_within=7.0)
    stage.play()
    session = stage.engine.registry.get("s")
    assert session.expected == stage.clock.now() + 7.0
    stage.say("s", [1, 2], 3)
    assert session.expected is None


def test_tools_are_expected_to_take_as_long_as_before() -> None:
    stage = Stage()
    stage.committed("s")
    stage.committed("t")
    for _ in range(2):
        stage.engine.sessions.expect("s", calls=["look", "ask", "look"])
        assert stage.engine.registry.get("t").expected is None
        stage.clock.advance(20.0)
        stage.say("s", [1], 2)
        stage.play()
    stage.engine.sessions.expect("t", calls=["ask", "look"])
    assert stage.engine.registry.get("t").expected == stage.clock.now() + 20.0
    stage.engine.sessions.expect("s", 3.0)
    stage.engine.sessions.expect("s", calls=["ask", "look"])
    assert stage.engine.registry.get("s").expected == stage.clock.now() + 3.0, "what the client said counts"
    stage.engine.sessions.expect("s", None)
    assert stage.engine.registry.get("s").expected is None


def test_impossible_expectations_are_refused() -> None:
    stage = Stage()
    stage.committed("s")
    with pytest.raises(InvalidRequest, match="within"):
        stage.engine.sessions.expect("s", -1.0)
    with pytest.raises(InvalidRequest, match="expect_within"):
        stage.say("s", [1], 2, expect_within=0.0)
    stage.say("s", [1], 20)
    with pytest.raises(SessionBusy):
        stage.engine.sessions.expect("s", 1.0)
