"""A copy of a page is valid until the page is written again, and covers only the slots filled when it was made."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engine.stage import PAGE, Stage, continuation
from tests.present import present
from tests.tiered import parking_in


def with_a_fork() -> tuple[Stage, list[int]]:
    """Makes a session "s" whose last page is partly filled, and a fork of it."""
    stage = Stage(units=60, host_tier=10**6)
    session = stage.committed("s", 4 * PAGE, 4)
    assert session.memory.computed % PAGE == 3
    stage.engine.sessions.fork("s", child="fork")
    return stage, list(session.history)


def park(stage: Stage, name: str) -> None:
    session = stage.engine.registry.get(name)
    stage.engine.pressure.drop(session)
    assert parking_in(stage.engine).position(session)


def goes_on(stage: Stage, name: str, history: Sequence[int]) -> None:
    turn = stage.say(name, [5, 6], 3)
    stage.play()
    assert list(turn.output) == continuation([*history, 5, 6], 3)
    assert present(turn.result).usage.cached == len(history) - 1


def test_a_session_is_restored_without_a_page_that_another_has_overwritten_in_place():
    stage, history = with_a_fork()
    park(stage, "s")
    stage.engine.sessions.rewind("fork", position=len(history) - 2)
    goes_on(stage, "fork", history[:-2])
    goes_on(stage, "s", history)


def test_a_page_that_was_copied_before_it_was_filled_is_copied_again():
    stage, history = with_a_fork()
    turn = stage.say("s", [7], 4)
    stage.until(lambda: turn.running)
    park(stage, "fork")  # which copies the page when the turn has just begun to fill it
    stage.play()
    park(stage, "s")
    goes_on(stage, "s", [*history, 7, *turn.output])
    goes_on(stage, "fork", history)
