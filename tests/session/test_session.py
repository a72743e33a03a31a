"""A session's history, its turn boundaries, and the operations each state allows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import IllegalTransition, InvalidRequest, SessionBusy, SessionClosed
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import EndReason, OutputSpan, TurnState
from tenuto.base.views import SessionState
from tenuto.session.records import Made, TurnRecord
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.session.test_turn import make_session


def say(session: Session, given_tokens: list[int], output: Sequence[int] = (), *, base: int | None = None) -> None:
    """Commits a turn; with `base` it replaces the last one."""
    turn = Turn(1, session, len(session.history) if base is None else base, TurnParams(), 0.0)
    turn.input.extend(given_tokens)
    turn.output.extend(output)
    turn.replaces = base is not None
    turn.state = TurnState.RUNNING
    session.turn = turn
    turn.commit(EndReason.STOP, 0.0)


def session_with_turns(*sizes: tuple[int, int]) -> Session:
    """Makes a session with turns of (input, output) tokens; tokens are numbered."""
    session = make_session()
    for given_tokens, output in sizes:
        at = len(session.history)
        say(session, list(range(at, at + given_tokens)), list(range(at + given_tokens, at + given_tokens + output)))
    return session


turns = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6)


def covers(session: Session) -> bool:
    """Returns whether the records cover the history without gaps."""
    ends = [0, *(record.end for record in session.records)]
    in_order = all(r.start <= r.input_end <= r.end and r.start < r.end for r in session.records)
    return in_order and [r.start for r in session.records] == ends[:-1] and ends[-1] == len(session.history)


@given(turns)
def test_records_cover_the_history_and_an_empty_append_adds_none(sizes: list[tuple[int, int]]) -> None:
    session = session_with_turns(*sizes)
    assert list(session.history) == list(range(sum(map(sum, sizes))))
    assert covers(session)
    assert len(session.records) == sum(1 for size in sizes if sum(size))
    assert session.version == len(sizes)


@given(turns, st.data())
def test_a_rewind_keeps_the_first_tokens_and_cuts_the_turn_it_falls_in(sizes: list, data: st.DataObject) -> None:
    session = session_with_turns(*sizes)
    before, version = list(session.records), session.version
    position = data.draw(st.integers(0, len(session.history)))
    session.rewind(position)
    assert list(session.history) == list(range(position))
    assert covers(session)
    assert session.version == version + 1
    for cut, whole in zip(session.records, before, strict=False):
        end, input_end = min(whole.end, position), min(whole.input_end, position)
        made = Made((OutputSpan(end - input_end, "default"),))
        assert cut == TurnRecord(whole.start, input_end, end, cut=position < whole.input_end, made=made)


@given(turns, st.data())
def test_a_fork_equals_a_rewind_and_leaves_its_parent_unchanged(sizes: list, data: st.DataObject) -> None:
    session, child = session_with_turns(*sizes), make_session()
    before = (list(session.history), list(session.records), session.version)
    position = data.draw(st.integers(0, len(session.history)))
    session.fork(child, position)
    assert (list(session.history), list(session.records), session.version) == before
    session.rewind(position)
    assert (child.history, child.records) == (session.history, session.records)
    assert child.version == 0


@given(turns)
def test_the_boundary_after_all_turns_is_the_end_and_before_any_the_beginning(sizes: list[tuple[int, int]]) -> None:
    session = session_with_turns(*sizes)
    assert session.turn_boundary(0) == 0
    assert session.turn_boundary(len(session.records)) == len(session.history)


@pytest.mark.parametrize("turn", [-1, 3])
def test_a_turn_that_does_not_exist_is_refused_with_the_number_of_turns(turn: int) -> None:
    with pytest.raises(InvalidRequest, match=f"turn of session s is {turn}; allowed: a whole number from 0 to 2"):
        session_with_turns((1, 1), (1, 1)).turn_boundary(turn)


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_that_does_not_exist_is_refused_with_the_number_of_tokens(position: int) -> None:
    session = session_with_turns((1, 1), (1, 1))
    for operation in (session.rewind, lambda at: session.fork(make_session(), at)):
        with pytest.raises(
            InvalidRequest, match=f"position in session s is {position}; allowed: a whole number from 0 to 4"
        ):
            operation(position)
    assert (len(session.history), session.version) == (4, 2)


def test_a_regenerated_turn_replaces_the_output_and_keeps_its_input_and_boundary() -> None:
    session = session_with_turns((2, 2), (3, 4))
    assert session.regenerated_turn() == TurnRecord(4, 7, 11, made=Made((OutputSpan(4, "default"),)))
    say(session, [], [50, 51], base=7)
    assert list(session.history) == [0, 1, 2, 3, 4, 5, 6, 50, 51]
    made = Made((OutputSpan(2, "default"),))
    assert session.records == [TurnRecord(0, 2, 4, made=made), TurnRecord(4, 7, 9, made=made)]


@pytest.mark.parametrize("sizes", [[], [(3, 0)], [(2, 2), (1, 0)]], ids=str)
def test_a_turn_that_generated_nothing_cannot_be_regenerated(sizes: list[tuple[int, int]]) -> None:
    with pytest.raises(IllegalTransition, match="its last turn generated nothing"):
        session_with_turns(*sizes).regenerated_turn()


@pytest.mark.parametrize("state", [state for state in TurnState if not state.ended])
def test_an_open_turn_forbids_changes_of_the_history_under_it(state: TurnState) -> None:
    session = session_with_turns((2, 2))
    session.turn = Turn(2, session, 4, TurnParams(), 0.0)
    session.turn.state = state
    for operation in (lambda: session.rewind(1), session.close, lambda: session.require_idle("regenerate in")):
        with pytest.raises(SessionBusy, match=f"its turn is {state.value}"):
            operation()
    assert len(session.history) == 4


@pytest.mark.parametrize("state", [SessionState.CLOSING, SessionState.CLOSED])
def test_a_session_that_is_not_open_accepts_nothing(state: SessionState) -> None:
    session = session_with_turns((2, 2))
    session.state = state
    for operation in (session.require_open, lambda: session.rewind(1)):
        with pytest.raises(SessionClosed, match=f"session s is {state.value}"):
            operation()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ttl": 0.0}, "ttl is 0.0; allowed: more"),
        ({"max_tokens": 0}, "max_tokens is 0; allowed: a whole number from 1"),
    ],
)
def test_a_policy_out_of_range_is_refused_with_the_allowed_range(wrong: dict, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Policy(**wrong)
