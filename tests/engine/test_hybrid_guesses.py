"""Guesses on models with recurrent layers: no token is computed twice, no slot is needed besides, and no state is kept
to which a rejected token contributed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tenuto.base.turns import TurnState
from tenuto.session.turn import Turn
from tests.engine.stage import FULL, SLIDING, STATE, VOCABULARY, Stage, continuation, count_from, every_overlap
from tests.present import present

MIXES = [(STATE,), (FULL, STATE), (SLIDING, STATE), (FULL, SLIDING, STATE, STATE)]
every_hybrid = pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "+".join(kind.value for kind in mix))
LOOKAHEAD = 3
INPUT = count_from(1, 20)


def guesses(right: int) -> Callable[[Turn, int], list[int]]:
    """Returns a proposer of three guesses, of which the first `right` are right."""

    def guess(turn: Turn, most: int) -> list[int]:
        tokens = continuation(turn.tokens(0, turn.length), most)
        unknown = most - min(most, LOOKAHEAD)
        return [token if i < right + unknown else (token + 1) % VOCABULARY for i, token in enumerate(tokens)]

    return guess


def stage_of(mix, overlap: int, right: int, **more) -> Stage:
    stage = Stage(mix, overlap=overlap, lookahead=LOOKAHEAD, guess=guesses(right), **more)
    stage.open()
    return stage


@every_hybrid
@every_overlap
@pytest.mark.parametrize("right", [0, 1, 3])
def test_every_step_begins_where_the_accepted_tokens_end(mix, overlap: int, right: int) -> None:
    stage = stage_of(mix, overlap, right)
    turn = stage.say("s", INPUT, 40)
    stage.play()
    assert list(turn.output) == continuation(INPUT, 40)
    starts = [int(plan.starts[0]) for plan in stage.executor.plans]
    assert starts == sorted(set(starts)), "some token was computed twice"
    guessed = [plan for plan in stage.executor.plans if plan.samples[0] > 1]
    assert len(guessed) >= 40 // (1 + right) - 2
    assert max(int(plan.states[0].absorbs[0]) for plan in stage.executor.plans) == 1 + right


@every_hybrid
@every_overlap
def test_guesses_take_no_slot(mix, overlap: int) -> None:
    def most(right: int | None) -> int:
        stage = stage_of(mix, overlap, right) if right is not None else Stage(mix, overlap=overlap)
        turns = []
        for i in range(3):
            stage.open(f"s{i}")
            turns.append(stage.say(f"s{i}", count_from(i, 20), 30))
        leased = 0
        while not all(turn.result for turn in turns):
            stage.step()
            leased = max(leased, *(stage.engine.memory.pools[group].leased for group in stage.engine.memory.states))
        return leased

    assert most(None) == most(1) == most(3)


@every_hybrid
@every_overlap
@pytest.mark.parametrize("right", [0, 2, 3])
@pytest.mark.parametrize("steps", range(6))
def test_a_barge_in_computes_again_at_most_the_last_step(mix, overlap: int, right: int, steps: int) -> None:
    """Two steps, if a further one is in flight, which may fail."""
    stage = stage_of(mix, overlap, right)
    session = stage.engine.registry.get("s")
    turn = stage.say("s", INPUT, 60)
    stage.until(lambda: len(turn.output) >= 8)
    for _ in range(steps):
        stage.step()
    heard = list(turn.output)
    stage.engine.turns.abort("s", len(heard))
    history = [*INPUT, *heard]
    assert list(session.history) == history == [*INPUT, *continuation(INPUT, len(heard))]
    assert len(history) - 1 - session.memory.computed <= (1 + right) * (1 + overlap)
    again = stage.say("s", [5, 6], 12)
    stage.play()
    assert list(again.output) == continuation([*history, 5, 6], 12)


@every_hybrid
@every_overlap
@pytest.mark.parametrize("right", [0, 2, 3])
def test_a_stop_token_within_a_guess_ends_the_turn_before_it(mix, overlap: int, right: int) -> None:
    said = continuation(INPUT, 30)
    for last in range(9, 14):
        stage = stage_of(mix, overlap, right)
        turn = stage.say("s", INPUT, 60, stop_ids=(said[last],))
        stage.play()
        assert list(turn.output) == said[: last + 1]
        session = stage.engine.registry.get("s")
        assert session.memory.computed < len(session.history)
        again = stage.say("s", [5, 6], 12)
        stage.play()
        assert list(again.output) == continuation([*INPUT, *said[: last + 1], 5, 6], 12)


@every_hybrid
@every_overlap
@pytest.mark.parametrize("right", [0, 2, 3])
def test_a_turn_that_leaves_its_row_and_takes_another_absorbs_nothing_of_either(mix, overlap: int, right: int) -> None:
    """A paused turn keeps its tokens, except those of its last step."""
    stage = stage_of(mix, overlap, right, max_running=1)
    stage.open("other")
    turn = stage.say("s", INPUT, 40)
    stage.until(lambda: len(turn.output) >= 8)
    other = stage.say("other", count_from(2, 20), 40)
    for _ in range(8):
        running = [each for each in (turn, other) if each.state is TurnState.RUNNING]
        if not running:
            stage.step()
            continue
        before = sum(stage.engine.counts.recomputed.values())
        stage.engine._lifecycle.pause(running[0])
        again = sum(stage.engine.counts.recomputed.values()) - before
        assert again <= (1 + right) * (1 + overlap), "more than the last steps"
        for _ in range(3):
            stage.step()
    stage.play()
    assert list(turn.output) == continuation(INPUT, 40)
    assert list(other.output) == continuation(count_from(2, 20), 40)


@every_hybrid
@every_overlap
@pytest.mark.parametrize("failing", range(3, 11))
def test_a_failed_step_with_guesses_leaves_no_trace(mix, overlap: int, failing: int) -> None:
    stage = stage_of(mix, overlap, 2, failing=(failing,))
    stage.executor._written = lambda: 0.0  # nothing that the step was to write
    stage.open("other")
    turns = [stage.say(sid, count_from(i, 20), 24) for i, sid in enumerate(("s", "other"))]
    stage.play()
    for i, turn in enumerate(turns):
        assert list(turn.output) == continuation(count_from(i, 20), 24)
        assert present(turn.result).committed
