"""Turns from submission to commit: limits, order, preemption, failures, and overlap that changes nothing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.errors import ContextExceeded, EngineStopped, InvalidRequest, InvariantError, NotFound, Overloaded
from tenuto.session.turn import EndReason, TurnParams, TurnState
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


@every_mix
@every_overlap
def test_every_turn_continues_everything_said_before(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.open()
    said: list[int] = []
    for i in range(5):
        said += count_from(i, 7)
        expected = continuation(said, 6)
        turn = stage.say("s", count_from(i, 7), 6)
        stage.play()
        assert list(turn.output) == expected
        said += expected
        assert list(session.history) == said
    assert session.version == len(session.records) == 5


@every_mix
@every_overlap
def test_a_turn_costs_its_new_tokens_however_long_the_history(mix, overlap: int) -> None:
    for tokens in (10, 150):
        stage = Stage(mix, overlap=overlap)
        stage.told(tokens=tokens, output=1)
        assert stage.cost(lambda s=stage: s.say("s", [1, 2, 3], 1)) == 4  # the last of the history, and three new ones


@every_overlap
def test_an_empty_input_continues(overlap: int) -> None:
    """Known fault: zero-token turns."""
    stage = Stage(overlap=overlap)
    session = stage.told()
    expected = continuation(session.history, 7)
    turn = stage.say("s", [], 7)
    assert stage.cost(lambda: None) <= 7 + overlap
    assert list(turn.output) == expected


def test_on_an_empty_session_there_is_nothing_to_continue() -> None:
    stage = Stage()
    stage.open()
    with pytest.raises(InvalidRequest, match="nothing to continue"):
        stage.say("s", [])
    assert stage.engine.idle


# -- limits


@every_mix
def test_a_turn_that_asks_for_more_than_fits_gets_what_fits_and_is_told(mix) -> None:
    stage = Stage(mix)
    session = stage.told()
    turn = stage.say("s", [1] * 100, 5000)
    assert turn.max_new_tokens == 200 - 136
    stage.play()
    assert (turn.result.reason, turn.result.max_new_tokens, turn.result.context_left) == (EndReason.LENGTH, 64, 0)
    assert len(session.history) == 200


@every_mix
def test_without_a_limit_a_turn_may_fill_the_context(mix) -> None:
    stage = Stage(mix)
    stage.told()
    turn = stage.say("s", [1], None)
    stage.play()
    assert (turn.result.max_new_tokens, turn.result.reason) == (163, EndReason.LENGTH)


def test_a_turn_longer_than_the_context_is_refused_before_it_queues_and_names_the_maximum() -> None:
    """Known fault: a turn longer than the context window."""
    stage = Stage()
    session = stage.told()
    before = (list(session.history), session.version, session.memory.computed, stage.engine.memory.touched)
    with pytest.raises(ContextExceeded, match="history and input have 200 tokens; allowed: 199 of a context of 200"):
        stage.say("s", [1] * 164)
    with pytest.raises(ContextExceeded, match="have 201 tokens; allowed: 200 of"):
        stage.engine.append("s", [1] * 165)
    assert (list(session.history), session.version, session.memory.computed, stage.engine.memory.touched) == before
    assert (session.turn, stage.engine.idle) == (None, True)
    stage.say("s", [1] * 163)
    stage.play()
    assert len(session.history) == 200


def test_a_full_session_takes_no_more_and_can_be_rewound() -> None:
    stage = Stage()
    session = stage.told(tokens=190, output=10)
    for operation in (stage.say, stage.engine.append, stage.engine.draft):
        with pytest.raises(ContextExceeded):
            operation("s", [1])
    stage.engine.append("s", [])  # nothing always fits
    stage.play()
    stage.engine.rewind("s", position=100)
    stage.say("s", [1], 5)
    stage.play()
    assert len(session.history) == 106


def test_a_turn_that_cannot_fit_the_empty_pool_is_refused() -> None:
    stage = Stage(units=10)
    stage.open()
    with pytest.raises(ContextExceeded, match="allowed: 40 of a context of 41"):
        stage.say("s", [1] * 41)
    turn = stage.say("s", [1] * 40, 5)
    stage.play()
    assert (turn.result.max_new_tokens, len(turn.session.history)) == (1, 41)


def test_a_sessions_own_cap_counts() -> None:
    stage = Stage()
    stage.open(max_tokens=20)
    with pytest.raises(ContextExceeded, match="of a context of 20"):
        stage.say("s", [1] * 20)
    turn = stage.say("s", [1] * 15)
    stage.play()
    assert (turn.result.max_new_tokens, turn.result.context_left) == (5, 0)


def test_what_is_not_a_token_is_refused_and_changes_nothing() -> None:
    stage = Stage()
    session = stage.open()
    for operation in (stage.say, stage.engine.append, stage.engine.draft):
        for wrong in ([VOCABULARY], [-1], ["a"]):
            with pytest.raises(InvalidRequest):
                operation("s", wrong)
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        stage.say("s", [1], stop=("x",))
    assert (session.turn, stage.engine.idle) == (None, True)


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    stage = Stage(max_queued=2)
    for i in range(3):
        stage.open(f"s{i}")
    stage.say("s0", [1])
    stage.say("s1", [1])
    with pytest.raises(Overloaded, match="2 turns are waiting, the most allowed"):
        stage.say("s2", [1])
    assert stage.engine.sessions.get("s2").turn is None
    stage.play()
    stage.say("s2", [1])


def test_a_session_nobody_opened_is_not_found() -> None:
    stage = Stage()
    for operation in (stage.say, stage.engine.append, stage.engine.draft):
        with pytest.raises(NotFound, match="no session 'nobody'"):
            operation("nobody", [1])


# -- ends


def test_a_stop_id_ends_the_turn_and_is_part_of_the_history() -> None:
    stage = Stage()
    session = stage.told()
    said = continuation([*session.history, 1], 9)
    turn = stage.say("s", [1], 50, stop_ids=(said[4], said[7]))
    stage.play()
    assert (turn.result.reason, list(turn.output)) == (EndReason.STOP, said[: said.index(said[4]) + 1])
    assert list(session.history[37:]) == list(turn.output)


@every_overlap
def test_the_models_end_of_turn_stops_unless_it_is_ignored(overlap: int) -> None:
    said = continuation([1, 2, 3], 10)
    stage = Stage(eos=(said[3],), overlap=overlap)
    for name in ("a", "b"):
        stage.open(name)
    stops, goes_on = stage.say("a", [1, 2, 3], 10), stage.say("b", [1, 2, 3], 10, ignore_eos=True)
    stage.play()
    assert (list(stops.output), stops.result.reason) == (said[:4], EndReason.STOP)
    assert (list(goes_on.output), goes_on.result.reason) == (said, EndReason.LENGTH)


def test_usage_counts_exactly() -> None:
    stage = Stage()
    stage.told()
    turn = stage.say("s", [1, 2, 3], 5)
    stage.play()
    usage = turn.result.usage
    assert (usage.prompt, usage.cached, usage.generated, usage.computed) == (39, 35, 5, 8)


# -- order


def test_a_higher_priority_starts_first_and_the_earlier_of_equals() -> None:
    stage = Stage(max_running=1)
    order = []
    for name, priority in (("a", 0), ("b", 0), ("c", 2), ("d", 1)):
        stage.open(name, priority=priority)
        stage.say(name, [1], 2)
    while not stage.engine.idle:
        order += [turn.session.id for turn in stage.step().ended]
    assert order == ["c", "d", "a", "b"]


def test_waiting_raises_priority() -> None:
    stage = Stage(max_running=1, aging_seconds=10.0)
    for name in ("long", "old", "new"):
        stage.open(name)
    stage.say("long", [1], 50, priority=9)
    stage.step()
    stage.say("old", [1], 2)
    stage.clock.advance(25.0)
    stage.say("new", [1], 2, priority=2)  # two more, but twenty-five seconds later
    order = []
    while not stage.engine.idle:
        order += [turn.session.id for turn in stage.step().ended]
    assert order == ["long", "old", "new"]


def test_a_waiting_turn_of_higher_priority_makes_the_last_running_one_yield() -> None:
    stage = Stage(max_running=1)
    stage.open("low")
    stage.open("high", priority=5)
    low = stage.say("low", [1, 2], 20)
    expected = continuation([1, 2], 20)
    stage.until(lambda: len(low.output) > 5)
    high = stage.say("high", [3], 4)
    stage.step()
    assert (low.state, high.state) == (TurnState.PREEMPTED, TurnState.RUNNING)
    stage.play()
    assert list(low.output) == expected


def test_a_turn_does_not_yield_to_one_of_its_own_priority() -> None:
    stage = Stage(max_running=1)
    stage.open("a")
    stage.open("b")
    first = stage.say("a", [1], 20)
    stage.until(lambda: len(first.output) > 2)
    stage.say("b", [1], 2)
    stage.play()
    assert stage.engine.transitions["preempt"] == 0


# -- preemption, pressure and failures


@every_mix
@every_overlap
@pytest.mark.parametrize("when", ["mid-prefill", "mid-decode"])
def test_a_preempted_turn_says_the_same_and_history_does_not_move(mix, overlap: int, when: str) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.told()
    before, computed = list(session.history), session.memory.computed
    expected = continuation([*before, *count_from(600, 20)], 20)
    turn = stage.reach(when)
    said = list(turn.output)
    stage.engine.lifecycle.preempt(turn)
    stage.engine.audit()
    assert (list(session.history), session.memory.computed, session.version) == (before, computed, 1)
    assert (turn.state, list(turn.output)) == (TurnState.PREEMPTED, said)
    stage.play()
    assert list(turn.output) == expected


@every_mix
@every_overlap
def test_many_turns_in_little_memory_all_say_what_they_should(mix, overlap: int) -> None:
    stage = Stage(mix, units=26, overlap=overlap, context_length=60)
    turns, expected = [], []
    for i in range(6):
        stage.open(f"s{i}")
        turns.append(stage.say(f"s{i}", count_from(i, 20), 25))
        expected.append(continuation(count_from(i, 20), 25))
    stage.play()
    assert [list(turn.output) for turn in turns] == expected
    if FULL in mix:
        assert stage.engine.transitions["preempt"] > 0


@every_mix
@pytest.mark.parametrize("state", [None, "drafting", "queued", "preempted"])
def test_a_session_dropped_to_its_tokens_computes_them_again(mix, state: str | None) -> None:
    stage = Stage(mix)
    session = stage.told()
    before = list(session.history)
    if state is not None:
        stage.reach(state)
    assert stage.engine.drop() == 1
    assert (list(session.history), session.version) == (before, 1)
    stage.engine.audit()
    if state == "drafting":
        stage.engine.drop()
    text = [1] if state is None else count_from(600, 20)
    turn = stage.say("s", text, 20) if state in (None, "drafting") else session.turn
    stage.play()
    assert list(turn.output) == continuation([*before, *text], 20)


def test_a_running_turn_is_not_dropped() -> None:
    stage = Stage()
    stage.told()
    turn = stage.reach("mid-decode")
    assert stage.engine.drop() == 0
    assert turn.state is TurnState.RUNNING


@every_mix
@every_overlap
@pytest.mark.parametrize("failing", [(0,), (1,), (3, 4), (2, 5, 6, 9)], ids=str)
def test_a_failed_step_preempts_its_turns_and_they_finish_the_same(mix, overlap: int, failing) -> None:
    stage = Stage(mix, overlap=overlap, failing=failing)
    turns = []
    for i in range(3):
        stage.open(f"s{i}")
        turns.append(stage.say(f"s{i}", count_from(i, 15 + i), 12))
    stage.play()
    assert stage.engine.transitions["step failed"] == len(failing)
    for i, turn in enumerate(turns):
        assert list(turn.output) == continuation(count_from(i, 15 + i), 12)


@every_mix
def test_a_failed_step_costs_the_sessions_nothing(mix) -> None:
    stage = Stage(mix)
    session = stage.told()
    stage.executor._fail = lambda: True
    turn = stage.say("s", [1], 5)
    for _ in range(5):
        stage.step()
    assert (session.memory.computed, turn.state) == (35, TurnState.PREEMPTED)
    stage.executor._fail = lambda: False
    assert stage.cost(lambda: None) == 6
    assert turn.result.committed


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**16), wrong=st.integers(0, 10))
@pytest.mark.parametrize("mix", [(FULL,), (STATE,), (FULL, SLIDING, STATE)], ids=["full", "state", "all"])
def test_overlap_and_lookahead_change_no_token(mix, seed: int, wrong: int) -> None:
    said = [_conversations(mix, seed, wrong, overlap, lookahead) for overlap in (0, 1) for lookahead in (0, 3)]
    assert said[0] == said[1] == said[2] == said[3]


def _conversations(mix, seed: int, wrong: int, overlap: int, lookahead: int) -> list[list[int]]:
    """The histories of three sessions after two turns each; of ten guesses, `wrong` are."""
    random = Random(seed)

    def guess(turn, most: int) -> list[int]:
        right = continuation(turn.tokens(0, turn.length), most)
        return [(token + 1) % VOCABULARY if random.randrange(10) < wrong else token for token in right]

    stage = Stage(mix, overlap=overlap, lookahead=lookahead, guess=guess, units=40, context_length=64)
    sizes = Random(seed)
    for _ in range(2):
        for i in range(3):
            if f"s{i}" not in stage.engine.sessions:
                stage.open(f"s{i}")
            stage.say(f"s{i}", count_from(sizes.randrange(99), sizes.randint(1, 20)), sizes.randint(1, 9), stop_ids=(5,))
        stage.play()
    return [list(stage.engine.sessions.get(f"s{i}").history) for i in range(3)]


@every_overlap
def test_right_guesses_save_steps(overlap: int) -> None:
    def steps(guess) -> int:
        stage = Stage(overlap=overlap, lookahead=3, guess=guess)
        stage.open()
        stage.say("s", [1, 2], 40)
        stage.play()
        return len(stage.executor.plans)

    right = lambda turn, most: continuation(turn.tokens(0, turn.length), most)  # noqa: E731
    assert steps(right) <= 40 // (3 if overlap == 0 else 2)
    assert steps(lambda turn, most: []) >= 40


# -- the engine itself


def test_a_broken_invariant_stops_the_engine_with_its_reason() -> None:
    stage = Stage()
    stage.told()
    stage.engine.memory.pools[0].counts[0] += 1
    with pytest.raises(InvariantError):
        stage.engine.step()
    for operation in (stage.engine.step, stage.engine.open, lambda: stage.say("s", [1]), lambda: stage.engine.abort("s")):
        with pytest.raises(EngineStopped, match="have a wrong count"):
            operation()


@every_overlap
def test_an_idle_engine_does_nothing(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    stage.told()
    work = stage.engine.counted_work
    for _ in range(5):
        report = stage.engine.step()
        assert (report.worked, report.progressed, report.ended) == (False, [], [])
    assert stage.engine.counted_work == work


def test_every_end_is_reported_once_by_the_next_step() -> None:
    stage = Stage()
    for name in ("a", "b"):
        stage.open(name)
    turn = stage.say("a", [1], 3)
    aborted = stage.engine.submit("b", [1], TurnParams(max_new_tokens=3))
    stage.engine.abort("b")
    ended = []
    while not stage.engine.idle:
        ended += stage.step().ended
    assert ended == [aborted, turn]
