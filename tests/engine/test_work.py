"""Work per step grows with running turns and new tokens, and a command's work with its output: not with parked sessions
or the length of histories."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tenuto.base.config import Limits
from tenuto.base.errors import LimitReached
from tenuto.base.options import Policy
from tenuto.base.wire.messages import GetStats, ListSessions, OpenSession
from tenuto.base.wire.request import Request
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.rendering import Renderer
from tests.engine.stage import FULL, SLIDING, STATE, Stage, count_from, every_overlap

Work = tuple[int, int, int]
MIXES = pytest.mark.parametrize("mix", [(FULL,), (FULL, SLIDING), (FULL, STATE)], ids=["full", "sliding", "state"])


def work_of_a_decode(stage: Stage) -> list[Work]:
    """Returns the counted work of each of sixteen decode steps of four running turns."""
    turns = [stage.say(f"r{i}", [1], 60) for i in range(4)]
    stage.until(lambda: all(len(turn.output) > 6 for turn in turns))
    done = []
    for _ in range(16):
        before = stage.engine.counted_work
        stage.engine.step()
        (a, b, c), (d, e, f) = before, stage.engine.counted_work
        done.append((d - a, e - b, f - c))
    return done


def stage_with(mix, parked: int, history: int, overlap: int) -> Stage:
    config: dict[str, Any] = {"context_length": 2000, "token_budget": 1024, "checkpoint_interval": 4096}
    stage = Stage(mix, units=8000, recount=False, overlap=overlap, **config)
    for i in range(parked):
        stage.open(f"p{i}")
        stage.say(f"p{i}", count_from(i, 5), 1)
    stage.play()
    for i in range(4):
        stage.committed(f"r{i}", tokens=history, output=1)
    return stage


@MIXES
@every_overlap
def test_a_step_does_the_same_work_beside_ten_and_a_thousand_parked_sessions(mix, overlap: int) -> None:
    few, many = (work_of_a_decode(stage_with(mix, parked, 41, overlap)) for parked in (10, 1000))
    assert few == many


@MIXES
@every_overlap
def test_a_step_does_the_same_work_after_a_short_and_a_long_history(mix, overlap: int) -> None:
    short, long = (work_of_a_decode(stage_with(mix, 3, history, overlap)) for history in (41, 1641))
    assert short == long


def test_a_decode_touches_only_the_pages_it_fills() -> None:
    touched = sum(units for units, _, _ in work_of_a_decode(stage_with((FULL,), 3, 41, overlap=0)))
    assert touched == 4 * 16 // 4  # four turns, sixteen tokens each, four tokens a page


@every_overlap
def test_parked_sessions_cost_an_idle_engine_nothing(overlap: int) -> None:
    stage = stage_with((FULL,), 100, 41, overlap)
    before = stage.engine.counted_work
    for _ in range(10):
        stage.engine.step()
    assert stage.engine.counted_work == before


@pytest.mark.parametrize("history", [41, 1641])
def test_an_ending_turn_counts_only_its_own_pages(history: int) -> None:
    stage = stage_with((FULL,), 3, history, overlap=0)
    before = stage.engine.memory.touched
    stage.say("r0", count_from(1, 8), 1)
    stage.play()
    assert stage.engine.memory.touched - before == 2


def calls_of(work: Callable[[], object]) -> int:
    """Counts the functions, Python's and C's, called by `work`."""
    called = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    gc.disable()  # it would call finalizers of earlier work
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return called


def beside(idle: int, turn: str) -> Stage:
    """Makes a stage with `idle` sessions, half of them parked, and one turn that is drafting, queued or mid-decode."""
    options: dict[str, Any] = {"host_tier": 10**7, "max_sessions": 2000, "checkpoint_interval": 4096}
    stage = Stage((FULL, STATE), units=3 * idle + 100, recount=False, **options)
    for i in range(idle):
        stage.open(f"p{i:04}")
        stage.say(f"p{i:04}", count_from(i, 5), 1)
    stage.play()
    stage.engine.sessions.leave_device([session for session in stage.engine.registry if int(session.id[1:]) % 2])
    stage.open("s")
    stage.reach(turn)
    return stage


def refused(command: Request[Any]) -> Callable[[Dispatcher], None]:
    def work(dispatcher: Dispatcher) -> None:
        with pytest.raises(LimitReached):
            dispatcher.execute(command)

    return work


COMMANDS: dict[str, Callable[[Dispatcher], object]] = {
    "statistics": lambda it: it.execute(GetStats()),
    "a page": lambda it: it.execute(ListSessions(tenant="", limit=3)),
    "a later page": lambda it: it.execute(ListSessions(tenant="", limit=3, after="p0004")),
    "a page of idle ones": lambda it: it.execute(ListSessions(tenant="", limit=3, state="idle")),
    "one that runs": lambda it: it.execute(ListSessions(tenant="", limit=1, state="running")),
    "one that drafts": lambda it: it.execute(ListSessions(tenant="", limit=1, state="drafting")),
    "another tenant's": lambda it: it.execute(ListSessions(tenant="other", limit=3)),
    "too many units": refused(OpenSession(session="more", policy=Policy(), limits=Limits(units=0))),
    "one session leaves": lambda it: it.execute(
        OpenSession(session="more", policy=Policy(), limits=Limits(units=it._engine.registry.use("").units - 1))
    ),
    "an audit is asked for": lambda it: it._engine.ask_audit(lambda _: None),
}


@pytest.mark.parametrize("turn", ["mid-decode", "drafting"])
def test_a_command_does_the_same_work_beside_ten_and_a_hundred_idle_sessions(turn: str) -> None:
    """Known fault: listing, statistics and limits scanned all sessions of all tenants in the engine's thread."""

    def calls(idle: int) -> dict[str, int]:
        dispatcher = Dispatcher(beside(idle, turn).engine, Renderer(None, None))
        return {name: calls_of(partial(work, dispatcher)) for name, work in COMMANDS.items()}

    calls(10)  # excludes work done once in a process
    assert calls(10) == calls(120)


def test_a_step_with_a_waiting_draft_does_the_same_work_beside_any_number_of_closed_sessions() -> None:
    """Known fault: each scanned everything that closed sessions hold."""

    def calls(closed: int) -> int:
        stage = Stage(units=3 * closed + 100, recount=False, prefix_cache=True, context_length=2000, token_budget=600)
        stage.committed("idle", 300)
        for i in range(closed):
            stage.say(stage.open(f"p{i}").id, count_from(i + 20, 9), 1)
        stage.play()
        for session in list(stage.engine.registry)[1:]:
            stage.engine.sessions.close(session.id)
        running = stage.say(stage.open("running").id, [1], 100)
        stage.until(lambda: running.output)
        draft = stage.engine.turns.draft(stage.open("draft").id, count_from(7, 4 * (3 * closed + 50)))
        stage.step()
        stage.step()
        assert len(stage.engine.registry.prefixes) == closed
        assert draft.session.memory.turn is None
        return calls_of(stage.step)

    calls(10)
    assert calls(10) == calls(100)
