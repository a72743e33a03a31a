"""A caller's tokens are read before anything happens, and no further than could fit; they cannot harm the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count

import numpy as np
import pytest

from tenuto.base.errors import ContextExceeded, InvalidRequest, SessionBusy, TenutoError
from tests.engine.stage import Stage

CALLS: dict[str, Callable[[Stage, Iterable[int]], object]] = {
    "submit": lambda stage, tokens: stage.engine.turns.submit("s", tokens),
    "append": lambda stage, tokens: stage.append("s", tokens),
    "draft": lambda stage, tokens: stage.engine.turns.draft("s", tokens),
    "adopt": lambda stage, tokens: stage.engine.sessions.adopt("s", tokens, [1]),
    "adopt output": lambda stage, tokens: stage.engine.sessions.adopt("s", [1], tokens),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


class Broken(Exception):
    """An object of the caller's whose `repr` fails."""

    def __str__(self) -> str:
        raise RuntimeError


def raising(error: Exception) -> Iterator[int]:
    yield 1
    raise error


class Lying:
    """Claims a length of more tokens than fit an integer, or a negative one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter((5, 6, 7))


class Worded:
    def __index__(self) -> int:
        raise KeyError("no number")


@every_call
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (KeyError("k"), "KeyError: 'k'"),
        (ZeroDivisionError("z"), "ZeroDivisionError: z"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "why"), "UnicodeDecodeError: "),
        (SessionBusy("mine"), "SessionBusy: mine"),
        (Broken(), "Broken"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_input_that_raises_while_it_is_read_is_refused_and_the_engine_continues(
    call, error: Exception, said: str
) -> None:
    """Known fault: the error was mistaken for a bug of the engine, which stopped for all callers."""
    stage = Stage()
    session = stage.committed()
    with pytest.raises(InvalidRequest, match=f"input tokens are not token ids: {said}"):
        call(stage, raising(error))
    assert (session.turn, session.version) == (None, 1)
    stage.say("s", [1], 2)
    stage.play()
    assert session.version == 2


@every_call
@pytest.mark.parametrize(
    "tokens",
    [np.zeros((2, 2), int), np.array(7), np.array([1.5]), [Worded()], {1: 2}.items(), object(), [2**70], [None], 3],
    ids=["a table", "no list", "a fraction", "words", "pairs", "an object", "a huge number", "nothing", "a number"],
)
def test_values_that_are_not_token_ids_are_refused(call, tokens: Iterable[int]) -> None:
    stage = Stage()
    stage.committed()
    with pytest.raises(InvalidRequest, match="input tokens are not token ids: "):
        call(stage, tokens)
    assert stage.engine.fuse.broken is None


@every_call
def test_no_more_tokens_are_read_than_could_ever_fit(call) -> None:
    """Known fault: an endless generator was read forever."""
    stage = Stage(context_length=200)
    stage.committed()
    endless = count()
    with pytest.raises(ContextExceeded, match="input has more than 200 tokens; allowed: 200"):
        call(stage, endless)
    assert next(endless) == 201
    with pytest.raises(ContextExceeded, match="input has 1000000 tokens; allowed: 200"):
        call(stage, [1] * 1_000_000)


@pytest.mark.parametrize(
    "tokens",
    [Lying(2**60), Lying(0), np.array([5, 6, 7]), iter([5, 6, 7]), range(5, 8)],
    ids=["claims too many", "says none", "array", "iterator", "range"],
)
def test_tokens_may_come_from_any_iterable(tokens: Iterable[int]) -> None:
    stage = Stage()
    session = stage.committed()
    stage.engine.sessions.adopt("s", tokens, [])
    assert list(session.history[-3:]) == [5, 6, 7]


@every_call
def test_input_that_changes_the_session_while_it_is_read_is_checked_afterwards(call) -> None:
    """Known fault: the session was checked before its tokens were read."""
    stage = Stage()
    session = stage.committed()

    def meddling() -> Iterator[int]:
        stage.say("s", [1], 3)
        yield 2

    with pytest.raises(SessionBusy):
        call(stage, meddling())
    stage.play()
    assert session.version == 2


def test_closing_the_session_while_its_input_is_read_does_no_harm() -> None:
    stage = Stage()
    stage.committed()

    def closing() -> Iterator[int]:
        stage.engine.sessions.close("s")
        yield 2

    with pytest.raises(TenutoError, match="no session 's'"):
        stage.engine.turns.submit("s", closing())
    stage.engine.audit()
    assert stage.engine.fuse.broken is None


def test_adopting_a_turn_counts_as_use_of_the_session() -> None:
    """Known fault: a session expired seconds after a turn was added to it."""
    stage = Stage()
    stage.open("s", ttl=10.0)
    stage.clock.advance(9.0)
    stage.engine.sessions.adopt("s", [1, 2], [3])
    stage.clock.advance(9.9)
    stage.step()
    assert stage.engine.registry.find("s") is not None
    stage.clock.advance(0.2)
    stage.step()
    assert stage.engine.registry.find("s") is None
