"""The space of a journal: a full disk, and the space of deleted sessions."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenuto.session.journal import VACUUMED, Journal
from tests.session.journals import killed, put, written
from tests.session.test_journal import Journaled


@contextmanager
def no_room() -> Iterator[None]:
    """Makes every write to a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_killed_processs_journal_is_opened_though_the_disk_is_full(path: Path, tmp_path: Path) -> None:
    saved = written(path)
    files = killed(path)
    left = put(files, tmp_path / "left")
    with no_room():
        journal = Journal(left, "tokens")
        assert list(journal.sessions()) == saved
        assert journal.mend() is None
        talk = Journaled()
        talk.engine.sessions.open("new")
        changes = talk.new_changes()
        with pytest.raises(sqlite3.OperationalError):
            journal.write(changes)
    journal.write(changes)
    assert len(list(journal.sessions())) == len(saved) + 1
    journal.close()


def fill(talk: Journaled, journal: Journal, sessions: int) -> None:
    for number in range(sessions):
        name = f"large {number}"
        talk.engine.sessions.open(name)
        for _ in range(4):
            talk.engine.sessions.adopt(name, [7] * 2000, [8])
        journal.write(talk.new_changes())


@pytest.mark.parametrize("ending", ["close", "rewind"])
def test_the_space_of_deleted_sessions_is_reclaimed(ending: str, path: Path) -> None:
    talk = Journaled(10_000)
    journal = Journal(path, "tokens")
    kept = talk.engine.sessions.open("kept")
    fill(talk, journal, 60)
    while journal.tidy():
        pass
    full = path.stat().st_size + Path(f"{path}-wal").stat().st_size
    for number in range(60):
        if ending == "close":
            talk.engine.sessions.close(f"large {number}")
        else:
            talk.engine.sessions.rewind(f"large {number}", position=0)
    journal.write(talk.new_changes())
    pieces = 0
    while journal.tidy():
        pieces += 1
    assert pieces > 0
    assert path.stat().st_size + Path(f"{path}-wal").stat().st_size < full // 4
    assert {each.session for each in journal.sessions()} == {session.id for session in talk.engine.registry}
    assert journal.mend() is None
    assert kept.id == "kept"
    journal.close()


def test_a_file_that_cannot_shrink_is_left_as_it_is(path: Path) -> None:
    Journal(path, "tokens").close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA auto_vacuum = NONE")
    db.execute("VACUUM")
    db.close()
    talk = Journaled(10_000)
    journal = Journal(path, "tokens")
    fill(talk, journal, 60)
    for number in range(60):
        talk.engine.sessions.close(f"large {number}")
    journal.write(talk.new_changes())
    assert not journal.tidy()
    journal.close()


def test_a_little_free_space_is_left(path: Path) -> None:
    talk = Journaled()
    journal = Journal(path, "tokens")
    talk.begin(talk.engine.sessions.open("s"), [1] * 100, 2)
    talk.play()
    talk.engine.sessions.close("s")
    journal.write(talk.new_changes())
    assert not journal.tidy()
    assert VACUUMED > 100
    journal.close()
