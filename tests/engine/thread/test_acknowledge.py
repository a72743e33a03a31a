"""Commits are reported once they are acknowledged, in order, and nothing that reveals them is reported earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import pytest

from tenuto.base.errors import EngineStopped, NotAcknowledged, TenutoError
from tenuto.base.options import TurnParams
from tenuto.base.turns import Delta, EndReason, TurnResult
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop
from tenuto.session.changes import Change
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.engine.thread import loops
from tests.engine.thread.test_loop import LONG, make_engine
from tests.eventually import eventually
from tests.present import present

T = TypeVar("T")
SHORT = TurnParams(max_new_tokens=3)


class Journal:
    """Acknowledges the first `safe` commits and the changes between them, or `most` changes, or each change a number of
    calls later; fails while `failing`."""

    def __init__(self, safe: int = 0, calls: int | None = None) -> None:
        self.safe = safe
        self.most: int | None = None
        self.failing = False
        self.changes: list[Change] = []
        self.lost: list[Session] = []
        self._calls = calls
        self._history: list[int] = []  # number of changes, call by call

    @property
    def commits(self) -> list[int]:
        """Numbers of the turns that have committed."""
        return [change.turn.number for change in self.changes if change.turn is not None]

    def acknowledge(self, changes: Sequence[Change]) -> int:
        self.changes += changes
        if self.failing:
            raise NotAcknowledged("the disk is full")
        if self.most is not None:
            return min(self.most, len(self.changes))
        if self._calls is None:
            commits = [number for number, change in enumerate(self.changes) if change.turn is not None]
            return commits[self.safe] if self.safe < len(commits) else len(self.changes)
        self._history.append(len(self.changes))
        return self._history[-self._calls - 1] if len(self._history) > self._calls else 0

    def take_lost(self) -> Sequence[Session]:
        lost, self.lost = self.lost, []
        return lost


class Stand:
    """A loop with a journal, and everything it reported, in order."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.engine = make_engine()
        self.loop = EngineLoop(self.engine, acknowledger=journal)
        self.told: SimpleQueue[tuple[str, object]] = SimpleQueue()

    def open(self, *names: str) -> None:
        for name in names:
            self.loop.call(lambda e, name=name: e.sessions.open(name)).result(60)  # type: ignore[misc]

    def start(self, name: str, params: TurnParams = SHORT, session: str | None = None) -> Future[Turn]:
        def told(event: Delta | TenutoError) -> None:
            self.told.put((name, event))

        opening = loops.start(self.loop, lambda engine: engine.turns.submit(session or name, (1, 2), params), told)
        opening.add_done_callback(lambda _: self.told.put((name, "opened")))
        return opening

    def ask(self, name: str, work: Callable[[Engine], T]) -> Future[T]:
        return self.loop.execute(work, lambda _: self.told.put((name, "answered")))

    def until(self, condition: Callable[[Engine], bool]) -> None:
        """Waits until the condition holds in the engine's thread."""
        eventually(lambda: self.loop.call(condition).result(60))

    def committed(self, commits: int) -> None:
        self.until(lambda _: len(self.journal.commits) == commits)

    def acknowledge(self, commits: int) -> None:
        self.journal.safe = commits
        self.loop.wake()

    def so_far(self) -> list[tuple[str, object]]:
        """Returns the results, errors and answers reported since the last call, without plain deltas."""
        self.loop.call(lambda _: None).result(60)
        self.loop.call(lambda _: None).result(60)  # a step lies between
        told: list[tuple[str, object]] = []
        while not self.told.empty():
            name, event = self.told.get()
            if isinstance(event, Delta):
                if event.result is not None:
                    told.append((name, event.result.reason))
            else:
                told.append((name, type(event) if isinstance(event, TenutoError) else event))
        return told


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand(Journal())
    yield made
    made.loop.close()


def version(name: str) -> Callable[[Engine], int]:
    return lambda engine: engine.registry.get(name).version


def test_nothing_that_reveals_a_commit_overtakes_its_acknowledgement(stand: Stand) -> None:
    stand.open("a", "b")
    stand.start("a")
    stand.committed(1)
    shown = stand.ask("version", version("a"))
    next_turn = stand.start("next", session="a")
    stand.committed(2)
    last = stand.ask("version again", version("a"))
    assert stand.so_far() == [("a", "opened")]
    assert not any(future.done() for future in (shown, next_turn, last))
    stand.acknowledge(1)
    assert shown.result(60) == 1
    assert stand.so_far() == [("a", EndReason.LENGTH), ("version", "answered"), ("next", "opened")]
    stand.acknowledge(2)
    assert last.result(60) == 2
    assert stand.so_far() == [("next", EndReason.LENGTH), ("version again", "answered")]


def test_tokens_stream_before_the_acknowledgement_and_the_last_delta_comes_after_it(stand: Stand) -> None:
    stand.open("a")
    opening = stand.start("a", TurnParams(max_new_tokens=30))
    stand.committed(1)
    stand.acknowledge(1)
    tokens: list[int] = []
    results: list[TurnResult] = []
    while not results:
        _, event = stand.told.get(timeout=60)
        if isinstance(event, Delta):
            tokens += event.tokens
            results += [event.result] if event.result is not None else []
    turn = opening.result(60)
    assert tokens == list(turn.output)
    assert stand.told.empty()


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_commits_are_reported_in_order_however_late_each_is_acknowledged(calls: int) -> None:
    stand = Stand(Journal(calls=calls))
    names = [f"s{n}" for n in range(6)]
    stand.open(*names)
    openings = [stand.start(name, TurnParams(max_new_tokens=n % 3 + 1), session=name) for n, name in enumerate(names)]
    results: list[str] = []
    while len(results) < len(names):
        stand.loop.wake()
        name, event = stand.told.get(timeout=60)
        if isinstance(event, Delta) and event.result is not None:
            results.append(name)
    numbers = {name: opening.result(60).number for name, opening in zip(names, openings, strict=True)}
    assert [numbers[name] for name in results] == stand.journal.commits
    stand.loop.close()


def test_a_rolled_back_turn_waits_for_no_acknowledgement(stand: Stand) -> None:
    stand.open("a", "b")
    running = stand.start("b", LONG)
    running.result(60)
    stand.start("a")
    stand.committed(1)
    aborted = loops.abort(stand.loop, running)
    stand.until(lambda engine: engine.registry.get("b").turn is None)
    assert stand.so_far() == [("b", "opened"), ("a", "opened"), ("b", EndReason.ABORT)]
    stand.acknowledge(1)
    assert not present(aborted.result(60)).committed


def test_while_commits_cannot_be_acknowledged_nothing_reveals_or_follows_them(stand: Stand) -> None:
    stand.open("a", "b")
    running = stand.start("b", LONG)
    running.result(60)
    stand.start("a")
    stand.committed(1)
    shown = stand.ask("version", version("a"))
    stand.journal.failing = True
    stand.loop.wake()
    with pytest.raises(NotAcknowledged, match="disk is full"):
        shown.result(60)
    refused = stand.start("late", session="a")
    with pytest.raises(NotAcknowledged, match="disk is full"):
        refused.result(60)
    assert stand.so_far() == [
        ("b", "opened"),
        ("a", "opened"),
        ("a", NotAcknowledged),
        ("version", "answered"),
        ("late", NotAcknowledged),
        ("late", "opened"),
    ]
    assert stand.loop.call(lambda engine: engine.registry.get("a").turn).result(60) is None
    with pytest.raises(NotAcknowledged):  # it is carried out all the same
        loops.abort(stand.loop, running, keep=1).result(60)
    assert stand.so_far() == [("b", NotAcknowledged)]
    stand.committed(2)

    stand.journal.failing = False
    stand.acknowledge(2)
    stand.until(lambda _: stand.loop._announcer.failure is None)
    assert (stand.ask("a", version("a")).result(60), stand.ask("b", version("b")).result(20)) == (1, 1)
    stand.start("again", session="a")
    stand.committed(3)
    stand.acknowledge(3)
    assert stand.so_far()[-2:] == [("again", "opened"), ("again", EndReason.LENGTH)]
    stand.loop.call(lambda engine: engine.audit()).result(60)


def test_changes_of_sessions_are_numbered_in_order_and_answered_once_acknowledged(
    stand: Stand,
) -> None:
    stand.open("a")
    stand.journal.most = 1
    turn = stand.start("a")
    stand.committed(1)
    operations: dict[str, Callable[[Engine], object]] = {
        "open": lambda engine: engine.sessions.open("b"),
        "fork": lambda engine: engine.sessions.fork("a", child="c"),
        "adopt": lambda engine: engine.sessions.adopt("b", [1, 2], [3]),
        "rewind": lambda engine: engine.sessions.rewind("a", turn=0),
        "close": lambda engine: engine.sessions.close("b"),
    }
    asked = {name: stand.ask(name, work) for name, work in operations.items()}
    stand.until(lambda _: len(stand.journal.changes) == 8)
    assert stand.so_far() == [("a", "opened")]
    seen = [(each.kind, each.session.id, each.version, each.length) for each in stand.journal.changes]
    length = len(turn.result(60).input) + len(turn.result(20).output)
    assert seen == [
        ("open", "a", 0, 0),
        ("commit", "a", 1, length),
        ("open", "b", 0, 0),
        ("open", "c", 0, 0),
        ("fork", "c", 0, length),
        ("adopt", "b", 1, 3),
        ("rewind", "a", 2, 0),
        ("close", "b", 1, 3),
    ]
    for most, told in ((2, ("a", EndReason.LENGTH)), (3, ("open", "answered")), (4, None), (5, ("fork", "answered"))):
        stand.journal.most = most
        stand.loop.wake()
        assert stand.so_far() == ([told] if told is not None else [])
    assert [name for name, future in asked.items() if future.done()] == ["open", "fork"]
    stand.journal.failing = True
    stand.loop.wake()
    for name in ("adopt", "rewind", "close"):
        with pytest.raises(NotAcknowledged):
            asked[name].result(60)


def test_a_turn_whose_start_cannot_be_acknowledged_is_aborted(stand: Stand) -> None:
    stand.open("a", "b")
    stand.start("a")
    stand.committed(1)
    opening = stand.start("b", LONG)
    stand.until(lambda engine: engine.registry.get("b").turn is not None)
    stand.journal.failing = True
    stand.loop.wake()
    with pytest.raises(NotAcknowledged):
        opening.result(60)
    stand.until(lambda engine: engine.registry.get("b").turn is None)
    assert stand.loop.call(version("b")).result(60) == 0


def test_callers_waiting_for_an_acknowledgement_get_an_error_when_the_engine_ends(stand: Stand) -> None:
    stand.open("a", "b")
    stand.start("a")
    stand.committed(1)
    shown, opening = stand.ask("version", version("a")), stand.start("b", LONG)
    stand.until(lambda engine: engine.registry.get("b").turn is not None)
    stand.loop.close()
    for future in (shown, opening):
        with pytest.raises(EngineStopped):
            future.result(60)
    told = []
    while not stand.told.empty():
        name, event = stand.told.get()
        told += [name] if isinstance(event, EngineStopped) else []
    assert sorted(told) == ["a", "b"]


@pytest.mark.parametrize("safe", [-1, 9])
def test_an_acknowledger_that_miscounts_stops_the_engine(safe: int) -> None:
    class Wrong(Journal):
        def acknowledge(self, changes: Sequence[Change]) -> int:
            super().acknowledge(changes)
            return safe if self.commits else len(self.changes)

    stand = Stand(Wrong())
    stand.open("a")
    stand.start("a")
    while not isinstance(event := stand.told.get(timeout=60)[1], EngineStopped):
        assert not isinstance(event, Delta) or event.result is None
    assert "acknowledged" in str(event)
    stand.loop.close()


def test_a_session_that_another_replica_owns_is_dropped_and_its_turns_end_unacknowledged() -> None:
    journal = Journal()
    stand = Stand(journal)
    stand.open("a")
    session = stand.loop.call(lambda engine: engine.registry.get("a")).result(60)
    told: list[object] = []
    loops.start(stand.loop, lambda engine: engine.turns.submit("a", [1], LONG), told.append)
    eventually(lambda: len(told) > 2)
    journal.lost = [session]
    with pytest.raises(NotAcknowledged, match="another replica has the session"):
        stand.loop.execute(lambda engine: engine.sessions.open("b")).result(60)
    eventually(lambda: isinstance(told[-1], NotAcknowledged))
    assert stand.loop.call(lambda engine: [each.id for each in engine.registry]).result(60) == ["b"]
    assert [change.kind for change in journal.changes] == ["open", "open"]
    assert stand.loop.execute(lambda engine: engine.sessions.open("a").id).result(60) == "a"
    stand.loop.audit().result(60)
    stand.loop.close()
