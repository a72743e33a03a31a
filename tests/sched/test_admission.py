"""Waiting turns start in order if their worst case fits, and nothing is lost for those that do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tenuto.base.turns import TurnState
from tenuto.base.views import Transition
from tests.engine.stage import FULL, SLIDING, STATE, Stage, continuation, count_from, every_mix, every_overlap
from tests.present import present


def test_only_as_many_turns_run_as_there_are_rows() -> None:
    stage = Stage(max_running=2)
    turns = []
    for i in range(4):
        stage.open(f"s{i}")
        turns.append(stage.say(f"s{i}", [1, 2], 5))
    stage.engine._admission.admit()
    assert [turn.state for turn in turns] == [TurnState.RUNNING] * 2 + [TurnState.QUEUED] * 2


def test_a_turn_starts_only_if_its_whole_input_fits() -> None:
    stage = Stage(units=20, context_length=64)
    for name, tokens in (("a", 40), ("b", 45)):
        stage.open(name)
        stage.say(name, count_from(1, tokens), 4)
    stage.step()
    states = [present(stage.engine.registry.get(name).turn).state for name in ("a", "b")]
    assert states == [TurnState.RUNNING, TurnState.QUEUED]
    stage.play()
    assert stage.engine.transitions[Transition("preempt")] == 0


def test_a_turn_that_computes_nothing_needs_neither_a_row_nor_memory() -> None:
    """Known fault: an idle session was dropped for the first token of a history, although nothing of it is computed
    yet."""
    stage = Stage(units=10, context_length=40, max_running=1)
    idle = stage.committed("idle", tokens=20, output=3)
    stage.open("running")
    running = stage.say("running", count_from(1, 14), 3)
    stage.step()
    stage.open("new")
    turn = stage.append("new", [1])
    stage.step()
    assert (turn.state, running.state) == (TurnState.COMMITTED, TurnState.RUNNING)
    assert idle.memory.computed == 22
    assert not stage.engine.pressure.yielded


def test_a_small_turn_does_not_overtake_a_large_one_that_waits_for_room() -> None:
    stage = Stage(units=20, context_length=64)
    order = []
    for name, tokens in (("a", 40), ("large", 50), ("small", 2)):
        stage.open(name)
        stage.say(name, count_from(1, tokens), 8)
    while not stage.engine.idle:
        stage.step()
        order += [t.session.id for t in stage.engine.batch.running() if t.session.id not in order]
    assert order == ["a", "large", "small"]


@every_mix
@every_overlap
def test_a_turn_that_did_not_fit_leaves_its_sessions_memory_alone(mix, overlap: int) -> None:
    """Known fault: a turn that did not fit the batch frees its session's state slot, which is freed again later."""
    stage = Stage(mix, max_running=1, overlap=overlap)
    session = stage.committed("s")
    stage.committed("other", output=1)
    stage.say("other", [1], 30)
    turn = stage.say("s", [1], 5)
    for _ in range(5):
        stage.step()
    assert (turn.state, session.memory.computed) == (TurnState.QUEUED, 35)
    expected = continuation([*session.history, 1], 5)
    stage.play()
    assert list(turn.output) == expected


@pytest.mark.parametrize("waiting", [1, 3, 8])
def test_a_pass_that_starts_nothing_keeps_no_state_slot(waiting: int) -> None:
    """Known fault: batch-allocated slots not returned."""
    stage = Stage((FULL, STATE), units=20, context_length=64, max_running=4)
    stage.open("big")
    stage.say("big", count_from(1, 60), 3)
    stage.step()
    free = stage.engine.memory.pools[1].free
    for i in range(waiting):
        stage.open(f"s{i}")
        stage.say(f"s{i}", count_from(i, 50), 2)
    stage.engine._admission.admit()
    assert len(stage.engine.batch) == 1
    assert stage.engine.memory.pools[1].free == free
    stage.engine.audit()


def test_a_start_that_raises_returns_every_state_slot() -> None:
    """Known fault: slots not returned on an error path."""
    stage = Stage((FULL, STATE))
    for i in range(3):
        stage.open(f"s{i}")
        stage.say(f"s{i}", [1, 2], 3)

    def broken(turn, slots) -> None:
        for lease in slots:
            lease.release()
        raise ZeroDivisionError

    stage.engine._admission._start = broken
    with pytest.raises(ZeroDivisionError):
        stage.engine._admission.admit()
    assert stage.engine.memory.free().tolist() == [300, 300]


@every_mix
@every_overlap
def test_a_session_that_leaves_no_room_for_its_own_turn_is_dropped_and_the_turn_runs(mix, overlap: int) -> None:
    stage = Stage(mix, units=18, context_length=72, overlap=overlap, token_budget=8)
    session = stage.committed("s", tokens=50, output=1)
    expected = continuation([*session.history, 1], 20)
    turn = stage.say("s", [1], 20)
    stage.play()
    assert list(turn.output) == expected


def test_idle_sessions_make_room_for_a_turn() -> None:
    stage = Stage(units=20, context_length=64)
    idle = stage.committed("idle", tokens=40, output=1)
    stage.open("s")
    turn = stage.say("s", count_from(1, 60), 2)
    stage.step()
    assert (turn.state, idle.memory.computed, len(idle.history)) == (TurnState.RUNNING, 0, 41)


def test_nothing_yields_to_a_draft() -> None:
    stage = Stage(units=20, context_length=64)
    idle = stage.committed("idle", tokens=40, output=1)
    stage.open("s")
    draft = stage.engine.turns.draft("s", count_from(1, 60))
    for _ in range(5):
        stage.step()
    assert idle.memory.computed == 40
    assert draft.session.memory.turn is None
    expected = continuation(count_from(1, 60), 3)
    turn = stage.say("s", count_from(1, 60), 3)
    stage.play()
    assert list(turn.output) == expected


@every_overlap
def test_the_oldest_turn_of_the_highest_priority_never_yields(overlap: int) -> None:
    stage = Stage(units=24, context_length=90, overlap=overlap)
    stage.open("first")
    first = stage.say("first", [1], 60, priority=1)
    stage.step()
    for i in range(6):
        stage.open(f"s{i}")
        stage.say(f"s{i}", count_from(i, 30), 30, priority=i % 2)
    while first.result is None:
        stage.step()
        assert first.state is not TurnState.PREEMPTED
    stage.play()


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_stream_of_important_turns_does_not_starve_an_old_one(overlap: int) -> None:
    stage = Stage(max_running=1, overlap=overlap, aging_seconds=5.0, recount=False)
    stage.open("old")
    old = stage.say("old", [1], 3)
    for i in range(200):
        if old.result is not None:
            break
        stage.open(f"s{i}", ephemeral=True)
        stage.say(f"s{i}", [1], 2, priority=3)
        stage.clock.advance(1.0)
        stage.step()
        stage.step()
    assert present(old.result).committed


def test_a_turn_is_pledged_the_pages_of_its_input_before_computing_them() -> None:
    stage = Stage(units=20, context_length=64, token_budget=8)
    for name in ("a", "b"):
        stage.open(name)
        stage.say(name, count_from(1, 50), 2)
    stage.step()
    pool = stage.engine.memory.pools[0]
    assert pool.free == 18  # of the 13 pages that its input needs, the first turn has acquired two
    assert len(stage.engine.batch) == 1
    taken = pool.acquire(3, SimpleNamespace(holder_kind="session", holder_name="nobody"))
    present(taken).release()
    stage.play()


@pytest.mark.parametrize(("units", "context_length"), [(20, 200), (21, 80), (20, 80)])
@pytest.mark.parametrize("output", [None, 5])
def test_a_turn_that_may_fill_the_pool_recomputes_none_of_its_history(units, context_length, output) -> None:
    """Known fault: its worst case counted every token the pool could hold, so its own session was dropped."""
    stage = Stage(units=units, context_length=context_length, max_running=2)
    stage.committed("s", 30, 9)
    turn = stage.say("s", [1, 2], output)
    stage.step()
    assert (turn.state, turn.cached) == (TurnState.RUNNING, 38)
    assert not stage.engine.counts.recomputed
    expected = continuation(turn.tokens(0, turn.prompt_length), turn.max_new_tokens)
    stage.play()
    assert list(turn.output) == expected


def test_no_turn_yields_to_one_that_then_cannot_start() -> None:
    """Known fault: a turn of lower priority was preempted, and the turn it yielded to still did not fit."""
    stage = Stage(units=100, context_length=400, max_running=8, token_budget=64)
    for name in "abt":
        stage.open(name)
    first = stage.say("a", count_from(1, 196), 100, priority=2)
    stage.until(lambda: first.output)
    second = stage.say("b", count_from(2, 60), 40)
    stage.until(lambda: len(second.output) >= 10)
    waiting = stage.say("t", count_from(3, 300), 1, priority=1)
    while not second.result:
        stage.step()
        assert second.state is not TurnState.PREEMPTED
        assert waiting.state is TurnState.QUEUED
    stage.play()
    assert present(waiting.result).committed
    assert stage.engine.transitions[Transition("preempt")] == 0


@every_overlap
def test_checkpoints_that_only_save_work_do_not_delay_a_start(overlap: int) -> None:
    """Known fault: a long prefill filled every slot with checkpoints, and the next turn waited for its end."""
    stage = Stage((STATE,), units=6, context_length=2000, overlap=overlap, checkpoint_interval=16)
    for name in "ab":
        stage.open(name)
    long = stage.say("a", count_from(1, 1000), 20)
    for _ in range(4):
        stage.step()
    turn = stage.say("b", [1, 2, 3], 5)
    stage.until(lambda: turn.state is TurnState.RUNNING, most=2 + overlap)
    assert not long.output
    stage.play()
    assert list(turn.output) == continuation([1, 2, 3], 5)


def test_a_turn_without_room_starts_once_a_window_has_passed_though_no_row_is_freed() -> None:
    stage = Stage((SLIDING,), units=13, context_length=200)
    stage.open("long")
    long = stage.say("long", count_from(1, 100), 80)
    stage.step()
    stage.open("waiting")
    waiting = stage.say("waiting", [1] * 12, 3)
    stage.step()
    assert waiting.state is TurnState.QUEUED
    stage.until(lambda: waiting.result is not None)
    assert long.state is TurnState.RUNNING


def test_room_is_made_once_a_window_has_passed_though_no_row_is_freed() -> None:
    """An idle session yields only to a turn that can then start, and this is checked again while the other turn
    runs."""
    stage = Stage((SLIDING,), units=16, context_length=400)
    stage.committed("idle", 20, 2)
    stage.open("long")
    long = stage.say("long", count_from(1, 100), 80)
    stage.step()
    stage.step()
    stage.open("waiting")
    waiting = stage.say("waiting", [1] * 40, 3)
    stage.step()
    assert waiting.state is TurnState.QUEUED
    assert not stage.engine.transitions[Transition("drop", "idle")], "there was too little room even without it"
    stage.until(lambda: waiting.result is not None)
    assert long.state is TurnState.RUNNING
    assert stage.engine.transitions[Transition("drop", "idle")] == 1


@every_overlap
def test_a_preempted_turn_restarts_only_when_it_can_stay(overlap: int) -> None:
    stage = Stage(units=20, overlap=overlap)
    stage.committed("idle", 60)
    for name, tokens, output in (("long", 4, 60), ("later", 20, 40)):
        stage.open(name)
        turn = stage.say(name, range(tokens), output)
        stage.step()
    assert stage.engine.pressure.yielded["idle"] == 1, "room was made for the later one"
    stage.until(lambda: len(turn.output) >= 15)
    stage.engine.pressure.preempt(turn)
    stage.play()
    assert stage.engine.transitions[Transition("preempt")] == 1, "it started without enough room to stay"
