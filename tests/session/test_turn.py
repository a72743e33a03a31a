"""A turn's states: every transition that exists, and every one that does not."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import IllegalTransition, InvalidRequest
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import EndReason, TurnState
from tenuto.memory.memory import Memory
from tenuto.session.registry import Registry
from tenuto.session.session import Session
from tenuto.session.turn import TRANSITIONS, Turn, as_tokens
from tests.clock import ManualClock
from tests.memory.scribe import FULL, make_shape, make_spec

DRAFTING, QUEUED, RUNNING, PREEMPTED = TurnState.DRAFTING, TurnState.QUEUED, TurnState.RUNNING, TurnState.PREEMPTED
COMMITTED, ABORTED = TurnState.COMMITTED, TurnState.ABORTED

LIFE = {
    (DRAFTING, "submit"): QUEUED,
    (DRAFTING, "abort"): ABORTED,
    (QUEUED, "start"): RUNNING,
    (QUEUED, "abort"): ABORTED,
    (RUNNING, "preempt"): PREEMPTED,
    (RUNNING, "commit"): COMMITTED,
    (RUNNING, "abort"): ABORTED,
    (PREEMPTED, "start"): RUNNING,
    (PREEMPTED, "commit"): COMMITTED,
    (PREEMPTED, "abort"): ABORTED,
}
"""All transitions of a turn; any other does not exist."""


def make_session(policy: Policy | None = None) -> Session:
    memory = Memory(make_spec([FULL]), [20], make_shape())
    return Registry(memory, ManualClock(), Random(0), 60, 5).open("s", policy or Policy())


def make_turn(state: TurnState = QUEUED, **params: Any) -> Turn:
    session = make_session()
    session.history.extend((7, 8, 9))
    turn = Turn(4, session, 3, TurnParams(**params), arrival=1.0)
    turn.input = array("i", (10, 11))
    turn.state = state
    session.turn = turn
    return turn


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("state", TurnState)
def test_exactly_the_listed_transitions_exist(state: TurnState, name: str) -> None:
    turn = make_turn(state)
    if (state, name) in LIFE:
        turn.go(name)
        assert turn.state is LIFE[state, name]
    else:
        with pytest.raises(IllegalTransition, match=f"cannot {name} turn 4 of s: it is {state.value}; allowed: "):
            turn.go(name)
        assert turn.state is state


def test_the_list_of_transitions_is_complete() -> None:
    assert {name for _, name in LIFE} == set(TRANSITIONS)


@pytest.mark.parametrize("state", [COMMITTED, ABORTED])
@pytest.mark.parametrize(
    "operation",
    [
        lambda turn: turn.submit(TurnParams(), 2.0),
        lambda turn: turn.preempt(),
        lambda turn: turn.commit(EndReason.STOP, 2.0),
        lambda turn: turn.abort(EndReason.ABORT, 2.0),
    ],
)
def test_an_ended_turn_cannot_change_its_session(state: TurnState, operation) -> None:
    turn = make_turn(state)
    with pytest.raises(IllegalTransition):
        operation(turn)
    assert (list(turn.session.history), turn.session.version, turn.state) == ([7, 8, 9], 0, state)


def test_a_turn_aborted_in_the_queue_is_never_committed() -> None:
    """Known fault: a turn aborted in the queue committed though it never ran."""
    turn = make_turn(QUEUED)
    with pytest.raises(IllegalTransition, match="cannot commit"):
        turn.commit(EndReason.ABORT, 2.0)
    turn.abort(EndReason.ABORT, 2.0)
    assert list(turn.session.history) == [7, 8, 9]


def test_a_preempted_turn_is_not_history() -> None:
    """Known fault: a preempted turn committed as history."""
    turn = make_turn(RUNNING)
    turn.output.append(12)
    turn.preempt()
    assert (list(turn.session.history), turn.session.records, turn.session.version) == ([7, 8, 9], [], 0)
    assert list(turn.output) == [12]


@pytest.mark.parametrize(("keep", "kept"), [(None, 3), (0, 0), (2, 2), (3, 3), (99, 3)])
def test_a_commit_keeps_the_input_and_the_requested_part_of_the_output(keep: int | None, kept: int) -> None:
    turn = make_turn(RUNNING)
    turn.output.extend((12, 13, 14))
    result = turn.commit(EndReason.ABORT, 2.0, keep)
    assert list(turn.session.history) == [7, 8, 9, 10, 11, *(12, 13, 14)[:kept]]
    assert (result.committed, result.kept, result.version) == (True, kept, 1)
    assert (result.usage.prompt, result.usage.generated) == (5, 3)
    assert result.context_left == 60 - 5 - kept
    assert turn.session.turn is None


def test_an_aborted_turn_reports_it_and_leaves_the_history() -> None:
    turn = make_turn(RUNNING)
    turn.output.append(12)
    result = turn.abort(EndReason.DEADLINE, 2.0)
    assert (result.reason, result.committed, result.kept, result.version) == (EndReason.DEADLINE, False, 0, 0)
    assert (list(turn.session.history), turn.session.last_turn_end) == ([7, 8, 9], 2.0)


@given(start=st.integers(0, 9), stop=st.integers(0, 12))
def test_a_turns_tokens_are_history_input_and_output_in_a_row(start: int, stop: int) -> None:
    turn = make_turn()
    turn.output.extend((12, 13))
    assert list(turn.tokens(start, stop)) == [7, 8, 9, 10, 11, 12, 13][start:stop]


@given(history=st.integers(0, 5), given_tokens=st.integers(0, 5), output=st.integers(0, 5), most=st.integers(0, 9))
def test_the_last_token_is_never_computed(history: int, given_tokens: int, output: int, most: int) -> None:
    """Known fault: zero-token turns."""
    session = make_session()
    session.history.extend(range(history))
    turn = Turn(1, session, history, TurnParams(), 0.0)
    turn.input, turn.max_new_tokens = array("i", range(given_tokens)), most
    turn.output.extend(range(min(output, most)))
    assert turn.length == history + given_tokens + min(output, most)
    assert turn.last_position == max(0, history + given_tokens + most - 1)
    assert 0 <= turn.resume_position <= turn.last_position


def test_a_turn_uses_its_sessions_priority_unless_it_has_its_own() -> None:
    session = make_session(Policy(priority=3))
    assert Turn(1, session, 0, TurnParams(), 0.0).priority == 3
    assert Turn(2, session, 0, TurnParams(priority=0), 0.0).priority == 0


def test_a_submitted_draft_arrives_when_it_is_submitted() -> None:
    turn = make_turn(DRAFTING)
    turn.submit(TurnParams(priority=2, max_new_tokens=5), now=9.0)
    assert (turn.state, turn.arrival, turn.priority, turn.params.max_new_tokens) == (QUEUED, 9.0, 2, 5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1; allowed: a whole number from 0"),
        ({"stop_ids": (1, -2)}, "one of stop_ids is -2; allowed: a whole number from 0"),
        ({"queue_timeout": 0.0}, "queue_timeout is 0.0; allowed: more than 0 and at most"),
        ({"timeout": float("nan")}, "timeout is nan; allowed: more than 0 and at most"),
    ],
)
def test_parameters_out_of_range_are_refused_with_the_allowed_range(wrong: dict, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        TurnParams(**wrong)


@given(st.lists(st.integers(-(2**40), 2**40), max_size=6), st.integers(1, 300_000))
def test_only_ids_in_the_vocabulary_are_tokens(tokens: list[int], vocabulary: int) -> None:
    if all(0 <= token < vocabulary for token in tokens):
        assert list(as_tokens(tokens, vocabulary, 6)) == tokens
    else:
        with pytest.raises(InvalidRequest):
            as_tokens(tokens, vocabulary, 6)


@pytest.mark.parametrize("tokens", [["a"], [1.5], [None], "text", 7])
def test_input_that_is_not_a_list_of_integers_is_refused(tokens: object) -> None:
    with pytest.raises(InvalidRequest, match="not token ids"):
        as_tokens(tokens, 10, 6)  # type: ignore[arg-type]


@pytest.mark.parametrize("leave", [Turn.pause, Turn.lose_memory])
@pytest.mark.parametrize("computed", [0, 2])
def test_a_turn_that_leaves_its_row_before_it_computed_anything_counts_its_cached_tokens_again(
    leave: Callable[[Turn], None], computed: int
) -> None:
    turn = make_turn(RUNNING)
    turn.cached, turn.computed_tokens = 0, computed
    leave(turn)
    assert turn.cached == (0 if computed else -1)
