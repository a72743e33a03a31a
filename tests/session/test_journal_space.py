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


def pages(journal: Journal) -> int:
    return int(journal._db.execute("PRAGMA page_count").fetchone()[0])


def opened_and_closed(talk: Journaled, journal: Journal) -> None:
    for number in range(60):
        talk.engine.sessions.fork(f"large {number}", position=3000, child=f"fork {number}")
        talk.engine.sessions.rewind(f"large {number}", position=2500)
    journal.write(talk.new_changes())
    for number in range(60):
        talk.engine.sessions.close(f"large {number}")
        talk.engine.sessions.close(f"fork {number}")
    journal.write(talk.new_changes())


def test_a_journal_at_rest_is_as_small_as_one_that_never_had_its_closed_sessions(path: Path) -> None:
    talk = Journaled(10_000)
    journal, fresh = Journal(path, "tokens"), Journal(path.with_name("fresh"), "tokens")
    talk.engine.sessions.open("kept")
    talk.engine.sessions.adopt("kept", [1] * 500, [2])
    changes = talk.new_changes()
    fresh.write(changes)
    journal.write(changes)
    fill(talk, journal, 60)
    opened_and_closed(talk, journal)
    while journal.tidy(whole=True):
        pass
    assert pages(journal) == pages(fresh)
    assert path.stat().st_size == 4096 * pages(fresh)
    assert not Path(f"{path}-wal").stat().st_size
    assert list(journal.sessions()) == talk.saved()
    journal.close()
    fresh.close()


def test_a_process_killed_while_it_gives_space_back_loses_nothing_and_the_next_goes_on(
    path: Path, tmp_path: Path
) -> None:
    talk = Journaled(10_000)
    journal = Journal(path, "tokens")
    fill(talk, journal, 70)
    for number in range(5, 70):
        talk.engine.sessions.close(f"large {number}")
    journal.write(talk.new_changes())
    assert journal.tidy(whole=True)
    left = put(killed(path), tmp_path / "left")
    while journal.tidy(whole=True):
        pass
    least = pages(journal)
    journal.close()
    later = Journal(left, "tokens")
    assert list(later.sessions()) == talk.saved()
    assert later.mend() is None
    assert pages(later) > least
    while later.tidy(whole=True):
        pass
    assert pages(later) == least
    later.close()


def tokens_kept(journal: Journal) -> int:
    return int(journal._db.execute("SELECT sum(length(tokens)) / 4 FROM pieces").fetchone()[0])


def test_a_rewind_within_a_turn_keeps_only_what_a_session_needs(path: Path) -> None:
    talk = Journaled(10_000)
    journal = Journal(path, "tokens")
    talk.engine.sessions.open("s")
    talk.engine.sessions.adopt("s", [7] * 2000, [8])
    talk.engine.sessions.fork("s", position=1500, child="fork")
    talk.engine.sessions.rewind("s", position=100)
    journal.write(talk.new_changes())
    assert tokens_kept(journal) == 2001  # both have a part of it
    talk.engine.sessions.close("s")
    journal.write(talk.new_changes())
    assert tokens_kept(journal) == 1500
    talk.engine.sessions.rewind("fork", position=10)
    journal.write(talk.new_changes())
    assert tokens_kept(journal) == 10
    assert list(journal.sessions()) == talk.saved()
    assert journal.mend() is None
    journal.close()
