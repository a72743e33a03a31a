"""An aborted or failed turn leaves its session at the last commit; a barge-in keeps the part that was heard."""

from __future__ import annotations

import pytest

from tenuto.base.errors import IllegalTransition, InvalidRequest
from tenuto.base.options import TurnParams
from tenuto.base.turns import EndReason, TurnState
from tests.engine.stage import FULL, STATES, Stage, continuation, count_from, every_mix, every_overlap
from tests.present import present


def held(stage: Stage) -> list[int]:
    """Returns the units of each pool that are held, without cached checkpoints."""
    stage.play()
    while stage.engine.memory.cache.evict():
        pass
    return [pool.leased for pool in stage.engine.memory.pools]


@every_mix
@every_overlap
@pytest.mark.parametrize("state", STATES)
def test_an_abort_leaves_the_session_at_its_last_commit_with_its_memory(mix, overlap: int, state: str) -> None:
    """Known fault: an aborted turn overwrites or wipes its session."""
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    history, records, computed = list(session.history), list(session.records), session.memory.computed
    units = held(stage)
    turn = stage.reach(state)
    stage.engine.turns.abort("s")
    stage.engine.audit()
    result = present(turn.result)
    assert (turn.state, result.reason, result.committed) == (
        TurnState.ABORTED,
        EndReason.ABORT,
        False,
    )
    assert (list(session.history), session.records, session.version) == (history, records, 1)
    assert (session.memory.computed, session.turn) == (computed, None)
    assert held(stage) == units


@every_mix
@every_overlap
@pytest.mark.parametrize("state", STATES)
def test_the_next_turn_after_an_abort_computes_only_its_own_tokens(mix, overlap: int, state: str) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    stage.reach(state)
    stage.engine.turns.abort("s")
    stage.play()
    expected = continuation([*session.history, 1, 2, 3], 5)
    turn = stage.say("s", [1, 2, 3], 5)
    # the last token of the history, three new ones, all but the last output; with overlap, perhaps one past the end
    assert 8 <= stage.cost(lambda: None) <= 8 + overlap
    assert list(turn.output) == expected


@every_mix
def test_many_aborts_in_a_row_cost_nothing(mix) -> None:
    """Known fault: a state slot freed twice."""
    stage = Stage(mix)
    session = stage.committed()
    units = held(stage)
    for state in STATES * 2:
        stage.reach(state)
        stage.engine.turns.abort("s")
    assert held(stage) == units
    assert session.memory.computed == 35


@every_mix
@every_overlap
def test_an_abort_on_a_new_session_leaves_it_empty(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.open()
    for state in STATES:
        stage.reach(state)
        stage.engine.turns.abort("s")
        assert (len(session.history), session.version, session.memory.computed) == (0, 0, 0)
    assert held(stage) == [0] * len(mix)


@every_mix
@every_overlap
@pytest.mark.parametrize("keep", [0, 1, 3, 99])
def test_a_barge_in_commits_the_input_and_the_tokens_kept(mix, overlap: int, keep: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    before = list(session.history)
    turn = stage.reach("mid-decode")
    heard = list(turn.output)
    stage.engine.turns.abort("s", keep)
    kept = heard[:keep]
    result = present(turn.result)
    assert (result.reason, result.committed, result.kept) == (
        EndReason.ABORT,
        True,
        len(kept),
    )
    assert list(session.history) == [*before, *count_from(600, 20), *kept]
    assert (session.version, len(session.records)) == (2, 2)
    stage.engine.audit()
    expected = continuation([*session.history, 5], 3)
    again = stage.say("s", [5], 3)
    stage.play()
    assert list(again.output) == expected


@every_overlap
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_on_full_attention_a_barge_in_costs_nothing(overlap: int, keep: int) -> None:
    stage = Stage((FULL,), overlap=overlap)
    session = stage.committed()
    stage.reach("mid-decode")
    stage.engine.turns.abort("s", keep)
    assert session.memory.computed == len(session.history) - 1
    stage.play()
    assert stage.cost(lambda: stage.say("s", [5], 1)) == 2  # the last token kept, and the new one


@every_mix
@every_overlap
def test_a_barge_in_recomputes_at_most_from_the_end_of_the_input(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    turn = stage.reach("mid-decode", output=60)
    stage.until(lambda: len(turn.output) > 40)
    stage.engine.turns.abort("s", 38)
    assert session.memory.computed >= turn.resume_position
    stage.play()
    assert stage.cost(lambda: stage.say("s", [5], 1)) <= 38 + 2


@every_mix
def test_a_barge_in_before_any_output_keeps_the_input(mix) -> None:
    stage = Stage(mix)
    session = stage.committed()
    before = list(session.history)
    stage.reach("mid-prefill")
    stage.engine.turns.abort("s", "delivered")
    assert list(session.history) == [*before, *count_from(600, 20)]
    stage.engine.audit()


@pytest.mark.parametrize("state", ["drafting", "queued"])
def test_a_barge_in_on_a_turn_that_never_ran_commits_nothing(state: str) -> None:
    """Known fault: a turn aborted in the queue is committed though it never ran."""
    stage = Stage()
    session = stage.committed()
    turn = stage.reach(state)
    stage.engine.turns.abort("s", 3)
    assert (present(turn.result).committed, len(session.history), session.version) == (False, 36, 1)


@every_mix
def test_a_barge_in_on_a_preempted_turn_keeps_the_output_that_was_heard(mix) -> None:
    stage = Stage(mix)
    session = stage.committed()
    turn = stage.reach("preempted")
    heard = list(turn.output)[:2]
    stage.engine.turns.abort("s", 2)
    stage.engine.audit()
    assert list(session.history[-2:]) == heard
    expected = continuation([*session.history, 5], 3)
    again = stage.say("s", [5], 3)
    stage.play()
    assert list(again.output) == expected


def test_a_turn_that_finished_before_its_abort_arrived_cannot_be_aborted() -> None:
    stage = Stage()
    stage.committed()
    with pytest.raises(IllegalTransition, match="session s has no open turn to abort"):
        stage.engine.turns.abort("s")


def test_only_a_number_of_tokens_can_be_kept() -> None:
    stage = Stage()
    stage.committed()
    turn = stage.reach("mid-decode")
    with pytest.raises(InvalidRequest, match="keep is -2; allowed"):
        stage.engine.turns.abort("s", -2)
    assert turn.state is TurnState.RUNNING


@every_overlap
def test_a_result_that_arrives_after_the_abort_is_dropped(overlap: int) -> None:
    """Known fault: a rejected or aborted overlapping turn disturbs the live one."""
    stage = Stage(overlap=overlap)
    stage.committed("one", output=2)
    stage.committed("two", output=2)
    first = stage.say("one", [1], 30)
    second = stage.say("two", [2], 30)
    expected = continuation([*second.session.history, 2], 30)
    stage.until(lambda: len(first.output) > 3)
    said = len(first.output)
    stage.engine.turns.abort("one")
    third = stage.say("one", [3], 5)
    third_expected = continuation([*third.session.history, 3], 5)
    stage.play()
    assert len(first.output) == said
    assert list(second.output) == expected
    assert list(third.output) == third_expected


def test_a_turn_refused_beside_a_running_one_leaves_it_alone() -> None:
    """Known fault: a rejected overlapping turn clears the running turn's in-flight mark."""
    stage = Stage()
    stage.committed()
    turn = stage.reach("mid-decode")
    for _ in range(3):
        with pytest.raises(Exception, match="its turn is running"):
            stage.say("s", [1])
        assert turn.session.turn is turn
    stage.play()
    assert present(turn.result).committed


@every_mix
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_stopping_a_preempted_regeneration_keeps_the_new_output_and_not_the_old(mix, keep: int) -> None:
    stage = Stage(mix)
    session = stage.committed("s", 10, 8)
    old = list(session.history)
    turn = stage.engine.turns.regenerate(
        "s", TurnParams(max_new_tokens=8, min_new_tokens=6, stop_ids=tuple(old[10:12]))
    )  # so that its output differs
    stage.until(lambda: len(turn.output) >= 4)
    assert list(turn.output) != old[10 : 10 + len(turn.output)]
    stage.engine.pressure.preempt(turn)
    stage.engine.turns.abort("s", keep)
    assert list(session.history) == [*old[:10], *turn.output[:keep]]
    expected = continuation([*session.history, 5], 4)
    following = stage.say("s", [5], 4)
    stage.play()
    assert list(following.output) == expected
