"""Turns of several sessions that arrive together begin in one step."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest

from tenuto.base.clock import SystemClock
from tenuto.base.config import EngineConfig
from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.options import TurnParams
from tenuto.base.turns import Delta
from tenuto.engine.engine import Engine
from tenuto.engine.thread import gathering
from tenuto.engine.thread.gathering import EXPECTED_SECONDS, MOST_SECONDS, QUIET_SECONDS, Gathering
from tenuto.engine.thread.loop import EngineLoop
from tenuto.exec.witness import WitnessExecutor
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.engine.stage import Stage
from tests.engine.thread import loops

NOW = 100.0
MOMENT = 0.001


class Watched:
    """Sessions of an engine without a loop, and a `Gathering` that observes them."""

    def __init__(self, sessions: int) -> None:
        self.stage = Stage(units=200)
        self.gathering = Gathering()
        self.sessions = [self.stage.engine.sessions.open(f"s{number}") for number in range(sessions)]
        self.note(NOW)

    def note(self, now: float) -> None:
        self.gathering.note(self.stage.engine.outcomes.take_changes(), now)

    def begin(self, session: Session, now: float) -> Turn:
        turn = self.stage.engine.turns.submit(session.id, [1, 2, 3], TurnParams(max_new_tokens=2))
        self.gathering.begin([turn], now)
        return turn

    def seconds(self, now: float) -> float:
        return self.gathering.seconds(now, only_begins=self.stage.engine.only_begins)

    def finish(self, now: float) -> None:
        """Computes the turns, whether or not they should wait, and records their commits."""
        while self.stage.engine.queued or len(self.stage.engine.batch):
            self.seconds(now)
            self.gathering.note(self.stage.engine.step().changes, now)


def test_a_lone_session_never_waits() -> None:
    watched = Watched(1)
    for turn in range(3):
        watched.begin(watched.sessions[0], NOW + turn)
        assert watched.seconds(NOW + turn) == 0
        watched.finish(NOW + turn)


def test_the_first_turn_waits_for_the_others_until_all_have_arrived() -> None:
    watched = Watched(3)
    for number, session in enumerate(watched.sessions):
        assert number == 0 or watched.seconds(NOW) > 0
        watched.begin(session, NOW + number * MOMENT)
    assert watched.seconds(NOW + 3 * MOMENT) == 0
    watched.finish(NOW + 1)
    watched.begin(watched.sessions[2], NOW + 1 + MOMENT)
    assert watched.seconds(NOW + 1 + MOMENT) == pytest.approx(QUIET_SECONDS)


def test_turns_of_forks_and_of_sessions_that_take_turns_alone_do_not_wait() -> None:
    watched = Watched(1)
    parent = watched.sessions[0]
    watched.begin(parent, NOW)
    watched.finish(NOW + MOMENT)
    child = watched.stage.engine.sessions.fork(parent.id, child="child")
    watched.note(NOW + 2 * MOMENT)
    for number, session in enumerate((child, parent, child)):
        now = NOW + (3 + 2 * number) * MOMENT
        watched.begin(session, now)
        assert watched.seconds(now) == 0
        watched.finish(now + MOMENT)


def test_turns_that_were_computed_together_wait_for_each_other_although_they_ended_at_different_steps() -> None:
    watched = Watched(2)
    first, second = watched.sessions
    watched.begin(first, NOW)
    watched.stage.engine.step()
    watched.begin(second, NOW)
    assert watched.seconds(NOW) == 0
    watched.finish(NOW)
    watched.begin(first, NOW + MOMENT)
    assert watched.seconds(NOW + MOMENT) > 0
    watched.begin(second, NOW + 2 * MOMENT)
    assert watched.seconds(NOW + 2 * MOMENT) == 0


def test_a_step_with_running_turns_does_not_wait() -> None:
    watched = Watched(3)
    watched.begin(watched.sessions[0], NOW)
    watched.stage.engine.step()
    assert len(watched.stage.engine.batch)
    watched.begin(watched.sessions[1], NOW)
    assert watched.seconds(NOW) == 0


def test_whom_a_turn_waited_for_is_forgotten_when_it_begins() -> None:
    watched = Watched(2)
    watched.begin(watched.sessions[0], NOW)
    begun = NOW + QUIET_SECONDS
    assert watched.seconds(begun) == 0
    watched.finish(begun)
    child = watched.stage.engine.sessions.fork("s0", child="child")
    watched.note(begun)
    watched.begin(child, begun)
    assert watched.seconds(begun) == 0


def test_the_wait_ends_once_no_more_turns_arrive() -> None:
    watched = Watched(2)
    watched.begin(watched.sessions[0], NOW)
    assert watched.seconds(NOW + QUIET_SECONDS - MOMENT) == pytest.approx(MOMENT)
    assert watched.seconds(NOW + QUIET_SECONDS + MOMENT) == 0


def test_closed_and_long_absent_sessions_are_not_expected() -> None:
    watched = Watched(3)
    watched.stage.engine.sessions.close("s1")
    watched.note(NOW)
    watched.begin(watched.sessions[0], NOW)
    assert watched.seconds(NOW) > 0
    watched.stage.engine.sessions.close("s2")
    watched.note(NOW)
    assert watched.seconds(NOW) == 0
    late = Watched(2)
    late.begin(late.sessions[0], NOW + EXPECTED_SECONDS)
    assert late.seconds(NOW + EXPECTED_SECONDS) == 0


def test_a_turn_does_not_wait_forever_while_sessions_keep_opening() -> None:
    watched = Watched(2)
    watched.begin(watched.sessions[0], NOW)
    now, opened = NOW, 0
    while watched.seconds(now) > 0:
        now, opened = now + MOMENT, opened + 1
        watched.stage.engine.sessions.open(f"more-{opened}")
        watched.note(now)
    assert MOST_SECONDS <= now - NOW <= MOST_SECONDS + 2 * MOMENT


def test_sessions_with_simultaneous_turns_share_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIET_SECONDS", "MOST_SECONDS", "EXPECTED_SECONDS"):
        monkeypatch.setattr(gathering, name, 60.0)  # however slow this machine is
    sessions, turns, output = 6, 4, 5
    executor = WitnessExecutor(4, [GroupSpec(Kind.FULL, 64)], 97, verify=False)
    config = EngineConfig(context_length=500)
    engine = Engine(executor, (400,), config, vocab_size=97, eos_ids=(), clock=SystemClock(), random=Random(0))
    loop = EngineLoop(engine)

    def talk(name: str) -> None:
        for _ in range(turns):
            events: SimpleQueue[Any] = SimpleQueue()
            loops.start(
                loop, lambda e: e.turns.submit(name, [int(name), 2, 3], TurnParams(max_new_tokens=output)), events.put
            )
            while not (isinstance(event := events.get(timeout=60), Delta) and event.result is not None):
                pass
            time.sleep(0.002 * int(name))

    for number in range(sessions):
        loop.call(lambda e, name=str(number): e.sessions.open(name)).result()  # type: ignore[misc]
    threads = [threading.Thread(target=talk, args=(str(number),)) for number in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.close()
    assert executor.steps == turns * output
