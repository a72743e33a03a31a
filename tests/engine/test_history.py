"""Regenerate, append, fork and rewind: history moves by turns or positions, and memory follows where possible."""

from __future__ import annotations

import pytest

from tenuto.base.errors import IllegalTransition, InvalidRequest, SessionBusy
from tenuto.base.options import TurnParams
from tenuto.base.turns import EndReason, TurnState
from tests.engine.stage import FULL, STATES, Stage, continuation, count_from, every_mix, every_overlap
from tests.present import present


@every_mix
@every_overlap
def test_regenerating_replaces_the_last_output_at_the_cost_of_that_output(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed(tokens=30, output=6)
    first = list(session.history)
    turn = stage.engine.turns.regenerate("s", TurnParams(max_new_tokens=4))
    assert list(session.history) == first  # the old output stays until this turn commits
    assert stage.cost(lambda: None) <= 4 + 1 + overlap
    assert list(turn.output) == first[30:34]  # greedy sampling repeats itself
    assert list(session.history) == first[:34]
    assert (len(session.records), session.version) == (1, 2)


@every_mix
@every_overlap
@pytest.mark.parametrize("when", ["queued", "mid-decode", "preempted"])
def test_an_aborted_regenerate_leaves_the_old_output(mix, overlap: int, when: str) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    before, computed = list(session.history), session.memory.computed
    turn = stage.engine.turns.regenerate("s", TurnParams(max_new_tokens=50))
    if when != "queued":
        stage.until(lambda: len(turn.output) > 8)
    if when == "preempted":
        stage.engine.pressure.preempt(turn)
    stage.engine.turns.abort("s")
    stage.engine.audit()
    assert (list(session.history), session.version) == (before, 1)
    assert session.memory.computed == computed


@every_mix
def test_a_barge_in_on_a_regenerate_keeps_the_new_output_instead_of_the_old(mix) -> None:
    stage = Stage(mix)
    session = stage.committed()
    prompt = list(session.history[:30])
    turn = stage.engine.turns.regenerate("s", TurnParams(max_new_tokens=50))
    stage.until(lambda: len(turn.output) > 8)
    stage.engine.turns.abort("s", 3)
    assert list(session.history) == prompt + continuation(prompt, 3)
    assert len(session.records) == 1
    stage.engine.audit()


@pytest.mark.parametrize("kind", ["empty", "appended"])
def test_a_session_whose_last_turn_generated_nothing_cannot_regenerate(kind: str) -> None:
    stage = Stage()
    stage.open()
    if kind == "appended":
        stage.append("s", [1, 2, 3])
        stage.play()
    with pytest.raises(IllegalTransition, match="its last turn generated nothing"):
        stage.engine.turns.regenerate("s")


@every_mix
@every_overlap
def test_a_prefill_only_turn_appends_its_input_and_generates_nothing(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    before = list(session.history)
    turn = stage.append("s", count_from(7, 25))
    stage.play()
    result = present(turn.result)
    assert (result.reason, result.committed, list(turn.output)) == (
        EndReason.APPENDED,
        True,
        [],
    )
    assert list(session.history) == before + count_from(7, 25)
    assert session.memory.computed == len(session.history) - 1
    expected = continuation(session.history, 4)
    assert stage.cost(lambda: stage.say("s", [], 4)) <= 4 + overlap  # nothing of it is recomputed
    assert list(session.history[-4:]) == expected


@pytest.mark.parametrize("tokens", [[], [5]])
def test_an_append_with_nothing_to_compute_commits_at_once(tokens: list[int]) -> None:
    """Known fault: zero-token turns."""
    stage = Stage()
    session = stage.open()
    turn = stage.append("s", tokens)
    assert stage.cost(lambda: None) == 0
    assert present(turn.result).reason is EndReason.APPENDED
    assert (list(session.history), session.version, len(session.records)) == (tokens, 1, len(tokens))


@every_mix
@every_overlap
def test_a_fork_is_free_and_continues_independently(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    parent = stage.committed()
    free = stage.engine.memory.free().tolist()
    child = stage.engine.sessions.fork("s", child="c")
    assert stage.engine.memory.free().tolist() == free
    assert child.memory.computed == parent.memory.computed
    before = list(parent.history)
    turns = [stage.say("s", [1], 5), stage.say("c", [2], 5)]
    stage.play()
    assert list(turns[0].output) == continuation([*before, 1], 5)
    assert list(turns[1].output) == continuation([*before, 2], 5)
    assert list(parent.history[:36]) == list(child.history[:36]) == before


@every_mix
@every_overlap
@pytest.mark.parametrize("state", STATES)
def test_a_fork_of_a_session_with_an_open_turn_sees_its_last_commit(mix, overlap: int, state: str) -> None:
    stage = Stage(mix, overlap=overlap)
    parent = stage.committed()
    before = list(parent.history)
    turn = stage.reach(state)
    child = stage.engine.sessions.fork("s", child="c")
    stage.engine.audit()
    assert (list(child.history), child.turn) == (before, None)
    assert child.memory.computed == 35
    if state == "drafting":
        stage.say("s", count_from(600, 20), 20)
    other = stage.say("c", [2], 5)
    stage.play()
    assert list(other.output) == continuation([*before, 2], 5)
    assert list(turn.output) == continuation([*before, *count_from(600, 20)], 20)


@every_mix
def test_many_samples_of_one_prompt_compute_it_once(mix) -> None:
    stage = Stage(mix, max_running=8, token_budget=64)
    stage.open()
    stage.append("s", count_from(3, 101))
    stage.play()
    before = len(stage.executor.plans)
    for i in range(6):
        stage.engine.sessions.fork("s", child=f"c{i}")
        stage.say(f"c{i}", [], 3)
    stage.play()
    assert stage.computed_since(before) == 6 * 3


@every_mix
@every_overlap
def test_a_rewind_to_a_turn_or_a_position_cuts_the_history_there(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    for i in range(3):
        stage.say("s", [i], 5)
        stage.play()
    whole = list(session.history)
    stage.engine.sessions.rewind("s", turn=3)
    assert list(session.history) == whole[:48]
    stage.engine.sessions.rewind("s", position=45)
    assert (list(session.history), len(session.records), session.version) == (whole[:45], 3, 6)
    stage.engine.audit()
    turn = stage.say("s", [9], 5)
    stage.play()
    assert list(turn.output) == continuation([*whole[:45], 9], 5)
    stage.engine.sessions.rewind("s", turn=0)
    assert (len(session.history), session.memory.computed) == (0, 0)


@every_mix
def test_rewinding_a_turn_recomputes_no_more_than_its_tokens(mix) -> None:
    stage = Stage(mix)
    session = stage.committed(tokens=90)
    for i in range(3):
        stage.say("s", [i], 5)
        stage.play()
    stage.engine.sessions.rewind("s", turn=2)
    assert session.memory.computed >= len(session.history) - 1 - 6
    assert stage.cost(lambda: stage.say("s", [9], 1)) <= 2 + 6


def test_on_full_attention_a_rewind_keeps_everything_below() -> None:
    stage = Stage((FULL,))
    session = stage.committed(tokens=90)
    for position in (80, 41, 40, 3, 1, 0):
        stage.engine.sessions.rewind("s", position=position)
        assert session.memory.computed == max(0, position - 1)
        stage.engine.audit()


@every_mix
def test_a_fork_at_a_turn_has_the_sessions_history_of_that_time(mix) -> None:
    stage = Stage(mix)
    session = stage.committed()
    for i in range(3):
        stage.say("s", [i], 5)
        stage.play()
    for at, tokens in ((0, 0), (1, 36), (2, 42), (4, 54)):
        child = stage.engine.sessions.fork("s", turn=at)
        assert (list(child.history), child.records) == (list(session.history[:tokens]), session.records[:at])
    assert list(stage.engine.sessions.fork("s", position=40).history) == list(session.history[:40])


@pytest.mark.parametrize("state", STATES)
def test_an_open_turn_blocks_all_other_changes_of_the_history(state: str) -> None:
    stage = Stage()
    session = stage.committed()
    turn = stage.reach(state)
    operations = [lambda: stage.engine.sessions.rewind("s", turn=0), lambda: stage.engine.turns.regenerate("s")]
    if state != "drafting":
        operations += [
            lambda: stage.say("s", [1]),
            lambda: stage.append("s", [1]),
            lambda: stage.engine.turns.draft("s", [1]),
        ]
    before = turn.state
    for operation in operations:
        with pytest.raises(SessionBusy, match=f"its turn is {before.value}"):
            operation()
    assert (session.turn, turn.state, len(session.history)) == (turn, before, 36)


def test_a_rewind_takes_either_a_number_of_turns_or_of_tokens() -> None:
    stage = Stage()
    stage.committed()
    with pytest.raises(InvalidRequest, match="not both"):
        stage.engine.sessions.fork("s", turn=1, position=3)
    with pytest.raises(InvalidRequest, match="the number of turns or of tokens"):
        stage.engine.sessions.rewind("s")
    with pytest.raises(InvalidRequest, match="turn of session s is 2; allowed: a whole number from 0 to 1"):
        stage.engine.sessions.rewind("s", turn=2)
    assert stage.engine.registry.get("s").version == 1


def test_a_refused_fork_opens_no_session() -> None:
    stage = Stage()
    stage.committed()
    for position, turn in ((99, None), (None, -1)):
        with pytest.raises(InvalidRequest):
            stage.engine.sessions.fork("s", child="c", position=position, turn=turn)
    assert stage.engine.registry.find("c") is None


@every_mix
def test_a_session_outlives_its_parent(mix) -> None:
    stage = Stage(mix)
    history = list(stage.committed().history)
    stage.engine.sessions.fork("s", child="c")
    stage.engine.sessions.close("s")
    turn = stage.say("c", [1], 5)
    assert stage.cost(lambda: None) == 6
    assert list(turn.output) == continuation([*history, 1], 5)
    assert turn.state is TurnState.COMMITTED
