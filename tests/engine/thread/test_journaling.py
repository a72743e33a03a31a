"""The journal is written beside the steps: its commits are reported, those it cannot write are held back and
retried."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tenuto.base.errors import NotAcknowledged, TenutoError
from tenuto.base.options import TurnParams
from tenuto.base.turns import Delta, EndReason
from tenuto.engine.thread import journaling
from tenuto.engine.thread.journaling import JournalWriter
from tenuto.engine.thread.loop import EngineLoop
from tenuto.session.changes import Change
from tenuto.session.journal import Journal
from tenuto.session.session import Session
from tests.engine.thread import loops
from tests.engine.thread.test_loop import make_engine
from tests.eventually import eventually


class Stand:
    """A loop with a journal whose disk can be filled."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path, "tokens")
        writer = JournalWriter(self.journal)
        self.loop = EngineLoop(make_engine(), acknowledger=writer)
        writer.start(self.loop.wake)
        self.writer = writer
        self.ended: list[object] = []  # how turns ended: the reason, or the type of the error

    def fill(self, pages: int) -> None:
        """Leaves room on the disk for this many more pages."""
        (now,) = self.journal._db.execute("PRAGMA page_count").fetchone()
        self.journal._db.execute(f"PRAGMA max_page_count = {now + pages}")

    def turn(self, session: str, tokens: int) -> None:
        def told(news: Delta | TenutoError) -> None:
            if isinstance(news, TenutoError):
                self.ended.append(type(news))
            elif news.result is not None:
                self.ended.append(news.result.reason)

        params = TurnParams(max_new_tokens=2)
        loops.start(self.loop, lambda engine: engine.turns.submit(session, [1] * tokens, params), told)

    def open(self, session: str) -> None:
        self.loop.execute(lambda e: e.sessions.open(session)).result(60)

    def end(self, session: str) -> None:
        self.loop.execute(lambda e: e.sessions.close(session)).result(60)

    def opens(self, session: str) -> bool:
        try:
            self.open(session)
        except NotAcknowledged:
            return False
        return True

    def close(self) -> None:
        self.loop.close()
        self.writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def stand(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    monkeypatch.setattr(journaling, "RETRY_SECONDS", 0.01)
    made = Stand(path)
    yield made
    made.close()


def lengths(path: Path) -> dict[str, int]:
    journal = Journal(path, "tokens")
    found = {saved.session: len(saved.tokens) for saved in journal.sessions()}
    journal.close()
    return found


def test_every_reported_commit_is_in_the_journal_when_the_process_ends(stand: Stand, path: Path) -> None:
    for name in "abc":
        stand.open(name)
        stand.turn(name, 3)
    eventually(lambda: len(stand.ended) == 3)
    assert stand.ended == [EndReason.LENGTH] * 3
    stand.close()
    assert lengths(path) == dict.fromkeys("abc", 5)


def test_while_the_disk_is_full_nothing_is_reported_or_started_and_then_all_continues(stand: Stand, path: Path) -> None:
    stand.open("a")
    stand.fill(0)
    stand.turn("a", 4000)
    eventually(lambda: len(stand.ended) == 1)
    with pytest.raises(NotAcknowledged, match="cannot be written: database or disk is full"):
        stand.open("b")
    stand.turn("a", 3)
    eventually(lambda: len(stand.ended) == 2)
    stand.fill(1000)
    eventually(lambda: stand.opens("b"))
    stand.turn("a", 3)
    eventually(lambda: len(stand.ended) == 3)
    assert stand.ended == [NotAcknowledged, NotAcknowledged, EndReason.LENGTH]
    stand.close()
    assert lengths(path) == {"a": 4007, "b": 0}


def test_an_engine_closed_while_the_disk_is_full_ends(stand: Stand, path: Path) -> None:
    stand.open("a")
    stand.fill(0)
    stand.turn("a", 4000)
    eventually(lambda: stand.ended == [NotAcknowledged])
    stand.close()
    assert lengths(path) == {"a": 0}


def test_errors_other_than_the_disks_also_hold_everything_back(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    write, failing = stand.journal.write, [True]

    def fail(changes: Sequence[Change]) -> frozenset[Session]:
        if failing:
            raise MemoryError
        return write(changes)

    monkeypatch.setattr(stand.journal, "write", fail)
    with pytest.raises(NotAcknowledged, match="cannot be written: MemoryError"):
        stand.open("a")
    failing.clear()
    eventually(lambda: stand.opens("b"))
    stand.close()


def test_nothing_is_reported_while_it_is_being_written(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    write, go = stand.journal.write, threading.Event()

    def wait(changes: Sequence[Change]) -> frozenset[Session]:
        go.wait(60)
        return write(changes)

    stand.open("a")
    monkeypatch.setattr(stand.journal, "write", wait)
    stand.turn("a", 3)
    asked = stand.loop.execute(lambda e: e.sessions.open("b"))
    eventually(lambda: stand.loop.call(lambda engine: len(engine.registry.get("a").history)).result(60) == 5)
    assert (stand.ended, asked.done()) == ([], False)
    go.set()
    asked.result(60)
    eventually(lambda: stand.ended == [EndReason.LENGTH])


def test_space_of_closed_sessions_is_given_back_once_nothing_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaling, "IDLE_SECONDS", 0.01)
    stand = Stand(path)
    for name in "abc":
        stand.open(name)
        stand.turn(name, 4000)
    eventually(lambda: len(stand.ended) == 3)
    for name in "abc":
        stand.end(name)
    stand.open("d")
    eventually(lambda: not Path(f"{path}-wal").stat().st_size and path.stat().st_size < 60_000)
    stand.close()
    assert lengths(path) == {"d": 0}
