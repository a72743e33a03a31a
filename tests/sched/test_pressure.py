"""The order in which holders of memory yield when it is short."""

from __future__ import annotations

import numpy as np
import pytest

from tenuto.base.errors import InvariantError
from tenuto.base.turns import TurnState
from tenuto.base.views import Transition
from tenuto.engine.engine import Engine
from tenuto.sched import pressure
from tests.engine.stage import FULL, STATE, Stage, continuation, count_from, every_mix
from tests.present import present


def squeeze(engine: Engine, group: int = 0, *, may_preempt: bool = True) -> bool:
    """Asks for one unit more than is free, for the turn that runs first. Returns False, without any yielding, if
    nothing can give it."""
    pool, wanted = engine.memory.pools[group], np.zeros(len(engine.memory.pools), np.int64)
    wanted[group] = pool.free + pool.limbo + 1
    running = engine.batch.running()
    kept = running[:1] if may_preempt else running
    if (wanted > engine.pressure.room_beside(kept)).any():
        return False
    engine.pressure.relieve(lambda: wanted, kept, reversed(running[len(kept) :]))
    engine.audit()
    assert pool.free + pool.limbo >= wanted[group]
    return True


def crowd(mix=(FULL,)) -> Stage:
    """Makes two running turns, two waiting on sessions with memory, three idle sessions and a draft."""
    stage = Stage(mix, max_running=2)
    for name, priority in (("idle", 0), ("dear", 1), ("old", 0), ("waits", 0), ("also", 0), ("draft", 0)):
        stage.committed(name, tokens=20, output=1, priority=priority)
    stage.engine.turns.draft("draft", count_from(9, 20))
    stage.play()
    for name in ("first", "second"):
        stage.open(name)
        stage.say(name, count_from(1, 10), 90)
    stage.until(lambda: len(stage.engine.batch) == 2)
    for name in ("waits", "also"):
        stage.say(name, [1], 5)
    return stage


def test_drafts_yield_first_then_idle_sessions_then_waiting_ones_and_running_turns_last() -> None:
    stage = crowd()
    engine = stage.engine
    order: list[str] = []
    while squeeze(engine):
        order += [rung for rung, times in engine.pressure.yielded.items() for _ in range(times - order.count(rung))]
    # the drafting session yields twice: its draft, then its session's memory
    assert order == ["draft", "idle", "idle", "idle", "waiting", "waiting", "waiting", "running"]
    assert present(engine.registry.get("first").turn).state is TurnState.RUNNING


def test_the_idle_session_of_lowest_priority_yields_first_then_the_one_parked_longest() -> None:
    stage = crowd()
    gone: list[str] = []
    names = ("idle", "dear", "old")
    while len(gone) < 3:
        assert squeeze(stage.engine)
        gone += [n for n in names if not stage.engine.registry.get(n).memory.computed and n not in gone]
    assert gone == ["idle", "old", "dear"]


def test_the_last_running_turn_yields_and_the_first_never_does() -> None:
    stage = crowd()
    engine = stage.engine
    while squeeze(engine):
        pass
    assert present(engine.registry.get("second").turn).state is TurnState.PREEMPTED
    assert not squeeze(engine)
    assert present(engine.registry.get("first").turn).state is TurnState.RUNNING


def test_running_turns_yield_only_where_allowed() -> None:
    stage = crowd()
    while squeeze(stage.engine, may_preempt=False):
        pass
    assert stage.engine.pressure.yielded["running"] == 0
    assert len(stage.engine.batch) == 2


def test_turns_that_yielded_generate_the_same_output_afterwards() -> None:
    one, other = crowd(), crowd()
    while squeeze(one.engine):
        pass
    for stage in (one, other):
        stage.say("draft", count_from(9, 20), 5)
        stage.play()
    for session in one.engine.registry:
        assert session.history == other.engine.registry.get(session.id).history


def test_cached_checkpoints_are_evicted_before_anything_that_costs_work() -> None:
    stage = crowd((FULL, STATE))
    engine = stage.engine
    cached = len(engine.memory.cache)
    assert cached > 0
    for _ in range(cached):
        assert squeeze(engine, group=1)
    assert dict(engine.pressure.yielded) == {"checkpoint": cached}
    squeeze(engine, group=1)
    assert engine.pressure.yielded["draft"] == 1


def test_checkpoints_are_not_evicted_for_pages_they_do_not_hold() -> None:
    stage = crowd((FULL, STATE))
    cached = len(stage.engine.memory.cache)
    assert squeeze(stage.engine, group=0)
    assert stage.engine.pressure.yielded["checkpoint"] == 0
    assert len(stage.engine.memory.cache) <= cached


def test_units_in_limbo_count_as_soon_free() -> None:
    stage = crowd()
    engine = stage.engine
    pool = engine.memory.pools[0]
    engine.memory.step_submitted()
    engine.sessions.drop("idle")
    assert pool.limbo > 0
    engine.pressure.relieve(lambda: np.array([pool.free + pool.limbo]), [], iter(()))
    assert not engine.pressure.yielded
    engine.memory.step_settled()


@every_mix
def test_a_session_spared_is_not_dropped(mix) -> None:
    stage = Stage(mix)
    spared, other = stage.committed("spared"), stage.committed("other")
    turn = stage.say("spared", [1], 5)
    room = stage.engine.pressure.room_beside([turn])
    stage.engine.pressure.relieve(lambda: room, [turn], iter(()))
    assert (spared.memory.computed, other.memory.computed) == (35, 0)
    assert (stage.engine.memory.free() == room).all()


@pytest.mark.parametrize("empty", ["new", "dropped", "closed"])
def test_sessions_that_hold_nothing_have_nothing_to_yield(empty: str) -> None:
    stage = Stage()
    stage.open() if empty == "new" else stage.committed()
    if empty == "dropped":
        stage.engine.sessions.drop("s")
    if empty == "closed":
        stage.engine.sessions.close("s")
    assert not squeeze(stage.engine)
    assert not stage.engine.pressure.yielded


def dropped(stage: Stage) -> list[str]:
    """Returns the sessions with a history and nothing in memory."""
    return [s.id for s in stage.engine.registry if s.history and not s.memory.computed and s.turn is None]


def test_only_sessions_that_free_something_yield() -> None:
    """Known fault: forks that own nothing were dropped one after another, and their parent too, to free two pages."""
    stage = Stage(units=150, context_length=600, token_budget=64)
    stage.committed("p", tokens=400, output=1)
    for i in range(20):
        stage.engine.sessions.fork("p", child=f"c{i}")
    stage.committed("z", tokens=100, output=1)
    stage.open("n")
    turn = stage.say("n", count_from(77, 104), 5)
    stage.step()
    assert turn.state is TurnState.RUNNING
    assert (dropped(stage), dict(stage.engine.pressure.yielded)) == (["z"], {"idle": 1})


def test_a_family_that_shares_the_needed_units_yields_together_and_alone() -> None:
    stage = Stage(units=150, context_length=600, token_budget=64)
    stage.committed("p", tokens=400, output=1)
    for i in range(3):
        stage.engine.sessions.fork("p", child=f"c{i}")
    stage.open("n")
    turn = stage.say("n", count_from(77, 200), 5)
    stage.committed("small", tokens=4, output=1, priority=5)
    assert turn.state is TurnState.RUNNING or turn.result
    assert sorted(dropped(stage)) == ["c0", "c1", "c2", "p"]
    stage.play()
    assert list(turn.output) == continuation(count_from(77, 200), 5)


def test_of_a_family_only_the_holders_of_the_least_shared_units_yield() -> None:
    """Known fault: they yielded in order until a page was freed, so one that held none of those pages lost its memory
    for nothing."""
    stage = Stage(units=30)
    stage.committed("p", tokens=80, output=1)
    short = stage.engine.sessions.fork("p", child="short", position=40)
    stage.engine.sessions.fork("p", child="whole")
    stage.open("n")
    turn = stage.say("n", count_from(77, 50), 5)
    stage.play()
    assert sorted(dropped(stage)) == ["p", "whole"]
    assert short.memory.computed > 0
    assert list(turn.output) == continuation(count_from(77, 50), 5)


def test_a_family_with_a_running_member_keeps_its_shared_units() -> None:
    stage = Stage(units=150, context_length=600, token_budget=64)
    stage.committed("p", tokens=400, output=1)
    stage.engine.sessions.fork("p", child="c")
    running = stage.say("c", [1], 60)
    stage.until(lambda: running.output)
    stage.open("n")
    turn = stage.say("n", count_from(77, 240), 5)
    while not running.result:
        stage.step()
        assert not dropped(stage)
    assert turn.state is TurnState.QUEUED
    stage.play()
    assert list(turn.output) == continuation(count_from(77, 240), 5)


@pytest.mark.parametrize("units", range(85, 106, 4))
def test_the_last_turn_in_order_waits_for_room_and_preempts_no_turn_before_it(units: int) -> None:
    """Known fault: its missing units were taken from turns before it, and then it yielded itself."""
    stage = Stage(units=units, max_running=8, token_budget=32)
    turns = []
    for i in range(4):
        stage.open(f"d{i}")
        turns.append(stage.say(f"d{i}", count_from(i, 8), 80))
        stage.step()
    stage.open("last")
    last = stage.say("last", count_from(4, 120), 40)
    while last.result is None:
        held = last.state is TurnState.RUNNING and present(last.session.memory.turn).own_units()[0] > 0
        stage.step()
        if held and last.state is TurnState.RUNNING:
            assert all(turn.state is not TurnState.PREEMPTED for turn in turns)
    assert list(last.output) == continuation(count_from(4, 120), 40)


def test_units_shared_by_running_forks_are_counted_once() -> None:
    """Known fault: their common pages were counted for each, so a turn that fitted waited until they had ended."""
    stage = Stage(units=150, context_length=600, max_running=16, token_budget=128)
    stage.committed("p", tokens=200, output=1)
    stage.committed("z", tokens=240, output=1)
    forks = []
    for i in range(4):
        stage.engine.sessions.fork("p", child=f"c{i}")
        forks.append(stage.say(f"c{i}", [i] * 8, 100))
    stage.until(lambda: all(len(turn.output) >= 4 for turn in forks))
    stage.open("n")
    turn = stage.say("n", count_from(7, 300), 4)
    stage.step()
    assert turn.state is TurnState.RUNNING
    assert dropped(stage) == ["z"]
    assert stage.engine.transitions[Transition("preempt")] == 0
    stage.play()
    assert list(turn.output) == continuation(count_from(7, 300), 4)


def test_sessions_that_share_only_with_a_running_turn_are_passed_over() -> None:
    stage = Stage(units=16)
    stage.committed("parent", tokens=13, output=4)
    idle = stage.engine.sessions.fork("parent", child="idle")
    stage.committed("other", tokens=13, output=4)
    stage.engine.sessions.fork("other", child="twin")
    turn = stage.say("parent", [1], 40)
    stage.until(lambda: stage.engine.registry.get("other").memory.computed == 0)
    assert (idle.memory.computed, turn.state) == (16, TurnState.RUNNING)


def test_sessions_of_the_same_name_of_two_tenants_both_yield() -> None:
    stage = Stage(units=30)
    for tenant in ("a", "b"):
        stage.open("s", tenant=tenant)
        stage.say("s", count_from(1, 50), 3, tenant)
        stage.play()
    stage.open("long", tenant="a")
    turn = stage.say("long", count_from(2, 100), 3, "a")
    stage.play()
    assert present(turn.result).committed
    assert [session.memory.computed for session in stage.engine.registry][:2] == [0, 0]


def test_turns_that_cannot_continue_though_none_lacks_room_are_reported() -> None:
    stage = Stage()
    stage.open()
    stage.say("s", [1], 40)
    stage.step()
    with pytest.raises(InvariantError, match="no running turn can continue, although none lacks room: turn 1 of s"):
        stage.engine.pressure.unstick(None)


def test_when_many_sessions_must_yield_they_do_so_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known fault: thousands of small sessions yielded to one long input in a single step, which took half a second."""
    monkeypatch.setattr(pressure, "MAX_YIELDS", 4)
    stage = Stage(units=60, token_budget=64, max_running=2)
    for i in range(20):
        stage.committed(f"s{i}", tokens=8, output=1)
    running = stage.say(stage.open("running").id, [1], 60)
    stage.until(lambda: running.output)
    turn, yielded = stage.say(stage.open("long").id, count_from(7, 150), 3), stage.engine.pressure.yielded
    while not turn.started:
        before, said = yielded.total(), len(running.output)
        assert stage.step().worked
        assert yielded.total() - before <= 4
        assert len(running.output) == said + 1
    assert yielded == {"idle": 10}
    stage.play()
    assert stage.engine.transitions[Transition("preempt")] == 0
    assert list(turn.output) == continuation(count_from(7, 150), 3)


def test_a_lone_running_turn_waits_while_sharers_of_a_page_yield_over_several_steps(monkeypatch) -> None:
    monkeypatch.setattr(pressure, "MAX_YIELDS", 1)
    stage = Stage(units=30)
    stage.committed("p", tokens=80, output=1)
    for i in range(4):
        stage.engine.sessions.fork("p", child=f"c{i}")
    turn = stage.say(stage.open("n").id, count_from(7, 20), 40)
    stage.play()
    assert stage.engine.pressure.yielded == {"idle": 5}
    assert stage.engine.transitions[Transition("preempt")] == 0
    assert list(turn.output) == continuation(count_from(7, 20), 40)


def test_of_two_families_that_share_their_pages_only_one_yields() -> None:
    stage = Stage(units=40)
    stage.committed("a", tokens=40, output=1)
    stage.committed("x", tokens=40, output=1)
    for parent in ("x", "a", "a"):
        stage.engine.sessions.fork(parent)
    stage.open("n")
    stage.say("n", count_from(77, 4 * (stage.engine.memory.pools[0].free + 1)), 1)
    stage.play()
    assert stage.engine.pressure.yielded["idle"] == 3, "only the first family yields"
    assert stage.engine.registry.get("x").memory.computed == 40
