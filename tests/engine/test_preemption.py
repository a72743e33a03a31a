"""Preemption, pressure, failed steps, overlap and lookahead never change a turn's output."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.turns import EndReason, TurnState
from tenuto.base.views import Transition
from tests.engine.stage import (
    FULL,
    SLIDING,
    STATE,
    VOCABULARY,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
)
from tests.present import present


@every_mix
@every_overlap
@pytest.mark.parametrize("when", ["mid-prefill", "mid-decode"])
def test_a_preempted_turn_generates_the_same_output_and_history_does_not_move(mix, overlap: int, when: str) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    before, computed = list(session.history), session.memory.computed
    expected = continuation([*before, *count_from(600, 20)], 20)
    turn = stage.reach(when)
    said = list(turn.output)
    stage.engine.pressure.preempt(turn)
    stage.engine.audit()
    assert (list(session.history), session.memory.computed, session.version) == (before, computed, 1)
    assert (turn.state, list(turn.output)) == (TurnState.PREEMPTED, said)
    stage.play()
    assert list(turn.output) == expected


@every_mix
@every_overlap
def test_many_turns_in_little_memory_all_generate_the_right_output(mix, overlap: int) -> None:
    stage = Stage(mix, units=26, overlap=overlap, context_length=60)
    turns, expected = [], []
    for i in range(6):
        stage.open(f"s{i}")
        turns.append(stage.say(f"s{i}", count_from(i, 20), 25))
        expected.append(continuation(count_from(i, 20), 25))
    stage.play()
    assert [list(turn.output) for turn in turns] == expected
    if FULL in mix:
        assert stage.engine.transitions[Transition("preempt")] > 0


@every_mix
@pytest.mark.parametrize("state", [None, "drafting", "queued", "preempted"])
def test_a_session_dropped_to_its_tokens_recomputes_them(mix, state: str | None) -> None:
    stage = Stage(mix)
    session = stage.committed()
    before = list(session.history)
    if state is not None:
        stage.reach(state)
    assert stage.engine.sessions.drop() == 1
    assert (list(session.history), session.version) == (before, 1)
    stage.engine.audit()
    if state == "drafting":
        stage.engine.sessions.drop()
    text = [1] if state is None else count_from(600, 20)
    turn = stage.say("s", text, 20) if state in (None, "drafting") else session.turn
    stage.play()
    assert list(present(turn).output) == continuation([*before, *text], 20)


def test_a_running_turn_is_not_dropped() -> None:
    stage = Stage()
    stage.committed()
    turn = stage.reach("mid-decode")
    assert stage.engine.sessions.drop() == 0
    assert turn.state is TurnState.RUNNING


@every_mix
@every_overlap
@pytest.mark.parametrize("failing", [(0,), (1,), (3, 4), (2, 5, 6, 9)], ids=str)
def test_a_failed_step_is_repeated_and_its_turns_finish_the_same(mix, overlap: int, failing) -> None:
    stage = Stage(mix, overlap=overlap, failing=failing)
    turns = []
    for i in range(3):
        stage.open(f"s{i}")
        turns.append(stage.say(f"s{i}", count_from(i, 15 + i), 12))
    stage.play()
    counted = stage.engine.transitions[Transition("step failed")]  # except steps in flight behind a failed one
    assert counted == len(failing) if not overlap else 0 < counted <= len(failing)
    for i, turn in enumerate(turns):
        assert list(turn.output) == continuation(count_from(i, 15 + i), 12)


@every_mix
def test_a_failed_step_costs_the_sessions_nothing(mix) -> None:
    stage = Stage(mix)
    session = stage.committed()
    stage.executor._fail = lambda: True
    turn = stage.say("s", [1], 5)
    for _ in range(2):
        stage.step()
    assert (session.memory.computed, turn.state) == (35, TurnState.RUNNING)
    stage.executor._fail = lambda: False
    assert stage.cost(lambda: None) == 6
    assert present(turn.result).committed


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), wrong=st.integers(0, 10))
@pytest.mark.parametrize("mix", [(FULL,), (STATE,), (FULL, SLIDING, STATE)], ids=["full", "state", "all"])
def test_overlap_and_lookahead_change_no_token(mix, seed: int, wrong: int) -> None:
    said = [_conversations(mix, seed, wrong, overlap, lookahead) for overlap in (0, 1) for lookahead in (0, 3)]
    assert said[0] == said[1] == said[2] == said[3]


def _conversations(mix, seed: int, wrong: int, overlap: int, lookahead: int) -> list[list[int]]:
    """Returns the histories of three sessions after two turns each; `wrong` of ten guesses are wrong."""
    random = Random(seed)

    def guess(turn, most: int) -> list[int]:
        right = continuation(turn.tokens(0, turn.length), most)
        return [(token + 1) % VOCABULARY if random.randrange(10) < wrong else token for token in right]

    stage = Stage(mix, overlap=overlap, lookahead=lookahead, guess=guess, units=40, context_length=64)
    sizes = Random(seed)
    for _ in range(2):
        for i in range(3):
            if stage.engine.registry.find(f"s{i}") is None:
                stage.open(f"s{i}")
            tokens = count_from(sizes.randrange(99), sizes.randint(1, 20))
            stage.say(f"s{i}", tokens, sizes.randint(1, 9), stop_ids=(5,))
        stage.play()
    return [list(stage.engine.registry.get(f"s{i}").history) for i in range(3)]


@every_overlap
def test_right_guesses_save_steps(overlap: int) -> None:
    def steps(guess) -> int:
        stage = Stage(lookahead=3, guess=guess, overlap=overlap)
        stage.open()
        stage.say("s", [1, 2], 40)
        stage.play()
        return len(stage.executor.plans)

    assert steps(lambda turn, most: continuation(turn.tokens(0, turn.length), most)) == 1 + 10  # four tokens a step
    assert steps(lambda turn, most: []) == 40
    assert steps(lambda turn, most: [0] * most) >= 40


@every_mix
@every_overlap
def test_a_turn_that_fails_every_step_ends_alone_and_its_neighbours_finish(mix, overlap: int) -> None:
    """Known fault: a step that always fails is retried forever, and none of its turns gets a token."""
    stage = Stage(mix, overlap=overlap)
    poisoned, poison = stage.committed("poisoned"), 666
    stage.executor._fail = lambda: poison in stage.executor.collecting.tokens.tolist()
    before = (poisoned.version, poisoned.memory.computed)
    stage.open("well")
    well = stage.say("well", [1, 2, 3], 6)
    failing = stage.say("poisoned", [poison], 6)
    for _ in range(60):
        stage.step()
    assert present(failing.result).reason is EndReason.FAILED
    assert not present(failing.result).committed
    assert (poisoned.version, poisoned.memory.computed) == before
    assert present(well.result).committed
    assert list(well.output) == continuation([1, 2, 3], 6)
    stage.executor._fail = lambda: False
    stage.say("poisoned", [4], 3)
    stage.play()
    assert poisoned.version == before[0] + 1


def test_a_reused_row_does_not_see_the_pages_of_its_previous_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known fault: a failed step's page table entries outlive the turn they were for, and the row's next turn reads
    them.

    B takes the row A has left while a step is in flight, and has to wait for pages in the plan with its entries.
    """
    stage = Stage(overlap=1, max_running=3)
    stage.committed("a", tokens=24)
    stage.committed("b", tokens=25)
    stage.open("x")
    stage.say("x", [7], 50)
    stage.step()
    stage.step()
    stage.say("a", [1, 2, 3], 5)
    stage.step()  # a's entries travel in the step in flight
    stage.engine.turns.abort("a")
    turn = stage.say("b", [4, 5, 6], 5)
    history = list(turn.session.history)
    planner = stage.engine._planner
    fit = planner._fit

    def leave_out(order, ends):
        needs, fits = fit(order, ends)
        return needs, fits & (stage.engine.batch.turns[order] != turn)

    with monkeypatch.context() as patch:
        patch.setattr(planner, "_fit", leave_out)
        patch.setattr(planner, "_lacking", lambda *_: None)
        patch.setattr(stage.executor, "_fail", lambda: True)
        stage.step()
    assert turn in stage.engine.batch.running()
    stage.play()
    assert list(turn.output) == continuation([*history, 4, 5, 6], 5)


@pytest.mark.parametrize("fraction", [0.7, 0.5, 0.35])
@pytest.mark.parametrize("prompt", [16, 64])
def test_decodes_that_outgrow_memory_compute_at_most_twice_the_tokens_they_need(fraction: float, prompt: int) -> None:
    """Turns that started side by side and outgrow the pool yield, the last first, and each seldom."""
    turns_at_once, output = 16, 100
    units = int(turns_at_once * -(-(prompt + output) // 4) * fraction)
    stage = Stage(units=units, max_running=16, token_budget=64, context_length=200, recount=False)
    turns = []
    for i in range(turns_at_once):
        stage.open(f"s{i}")
        turns.append(stage.say(f"s{i}", count_from(i, prompt), output))
    stage.play()
    needed = turns_at_once * (prompt + output - 1)
    computed = sum(turn.computed_tokens for turn in turns)
    assert needed < computed <= 2 * needed
    assert computed - needed == stage.engine.counts.recomputed["preempted"]
    for i, turn in enumerate(turns):
        assert list(turn.output) == continuation(count_from(i, prompt), output)


def test_cached_tokens_count_only_if_the_turn_computed_something_after_them() -> None:
    """Known fault: a turn lost its row before its first step, and its session's memory with it; its usage still
    reported most of the history as cached."""
    stage = Stage()
    session = stage.committed("s")
    turn = stage.say("s", [1, 2], 3)
    stage.engine._admission.admit()
    stage.engine.pressure.preempt(turn)
    stage.engine.sessions.drop("s")
    stage.play()
    result = present(turn.result)
    assert (result.usage.cached, result.usage.computed) == (0, len(session.history) - 1)


@every_overlap
def test_a_turn_that_does_not_fit_beside_its_sessions_memory_starts_over_even_alone(overlap: int) -> None:
    stage = Stage(units=4, page_size=8, overlap=overlap)
    session = stage.committed("s", 17, 2)
    stage.engine.sessions.fork("s", child="fork")  # it copies the last page before it writes there
    history = list(session.history)
    turn = stage.say("fork", [1], 12)
    stage.play()
    assert list(turn.output) == continuation([*history, 1], 12)
    assert stage.engine.transitions[Transition("preempt")] == 1
