"""Journals of earlier formats are read, rewritten or raised to the newest format, whatever happens meanwhile."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_

from tenuto.base.errors import ConfigError
from tenuto.base.options import Policy, SessionAdapter
from tenuto.session.journal import Journal
from tenuto.session.journal_files import check, compact
from tenuto.session.journal_rows import ADDED, APPLICATION, checksum_of
from tenuto.session.records import SavedSession
from tests.present import present
from tests.session.journals import SESSIONS, began, left_open, written
from tests.session.test_journal import Journaled

FORMAT_2 = """
CREATE TABLE model (fingerprint TEXT NOT NULL);
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, policy BLOB NOT NULL, system TEXT,
    version INTEGER NOT NULL, used REAL, UNIQUE (tenant, name)
);
CREATE TABLE pieces (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL);
CREATE TABLE history (
    session INTEGER NOT NULL, position INTEGER NOT NULL, piece INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (session, position)
) WITHOUT ROWID;
CREATE INDEX users_of_pieces ON history (piece);
CREATE TABLE records (
    session INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, input_end INTEGER NOT NULL,
    end INTEGER NOT NULL, conversation BLOB, cut INTEGER NOT NULL, PRIMARY KEY (session, number)
) WITHOUT ROWID;
CREATE TABLE results (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, key TEXT NOT NULL, turn BLOB NOT NULL, UNIQUE (session, key)
);
"""


def as_format_2(path: Path, older: Path) -> None:
    """Rewrites a journal in format 2."""
    left_open.pop().close()
    db = sqlite3.connect(older)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(FORMAT_2)
    db.execute("ATTACH ? AS later", (str(path),))
    db.execute("INSERT INTO model SELECT fingerprint FROM later.journal")
    for table, columns in (
        ("sessions", "id, tenant, name, policy, system, version, used"),
        ("pieces", "id, tokens"),
        ("history", "session, position, piece, length"),
        ("records", "session, number, start, input_end, end, conversation, cut"),
        ("results", "number, session, key, turn"),
    ):
        db.execute(f"INSERT INTO {table} SELECT {columns} FROM later.{table}")
    db.commit()
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute("PRAGMA user_version = 2")
    db.close()


def as_format(version: int, path: Path) -> None:
    """Turns a journal into one of format 3 or 4."""
    left_open.pop().close()
    db = sqlite3.connect(path)
    (owner,) = db.execute("SELECT fingerprint FROM journal").fetchone()
    for table, columns, key, salt in (
        ("records", "session, number, start, input_end, end, conversation, cut", "session = ? AND number = ?", ()),
        ("sessions", "id, tenant, name, policy, system, version, used, length, turns, results", "id = ?", (owner,)),
    ):
        db.execute(f"ALTER TABLE {table} DROP COLUMN {ADDED[table]}")
        for row in db.execute(f"SELECT {columns} FROM {table}").fetchall():
            values = checksum_of(*salt, *row), *row[: key.count("?")]
            db.execute(f"UPDATE {table} SET checksum = ? WHERE {key}", values)
    db.execute(f"PRAGMA user_version = {version}")
    db.commit()
    db.close()


def without_stamps(saved: list[SavedSession]) -> list[SavedSession]:
    """Returns the sessions as journals before format 5 have them."""
    return [replace(each, records=tuple(replace_(record, made=None) for record in each.records)) for each in saved]


def format_of(path: Path) -> int:
    db = sqlite3.connect(path)
    (found,) = db.execute("PRAGMA user_version").fetchone()
    db.close()
    return int(found)


def test_a_journal_of_format_2_is_rewritten_with_checksums(path: Path, tmp_path: Path) -> None:
    saved = without_stamps(written(path))
    older = tmp_path / "older"
    as_format_2(path, older)
    assert began(older) == (saved, None)
    assert format_of(older) == 5
    db = sqlite3.connect(older)
    assert db.execute("SELECT count(*) FROM pieces").fetchone() == (14,)  # forks share them as before
    db.close()
    assert began(older) == (saved, None)
    assert sorted(each.name for each in tmp_path.iterdir() if "older" in each.name and each.stat().st_size) == ["older"]


def test_a_damaged_session_does_not_keep_a_journal_of_format_2_from_opening(path: Path, tmp_path: Path) -> None:
    saved = without_stamps(written(path))
    older = tmp_path / "older"
    as_format_2(path, older)
    db = sqlite3.connect(older)
    db.execute("DELETE FROM history WHERE session = 2 AND position = 0")
    db.commit()
    db.close()
    journal = Journal(older, "tokens")
    assert list(journal.sessions()) == [each for each in saved if each.session != SESSIONS[1]]
    assert [each.name for each in present(journal.mend()).sessions] == [SESSIONS[1]]
    journal.close()
    assert (tmp_path / "older.damaged-1").exists()


@pytest.mark.parametrize("killed_in", ["written_anew", "take_place"])
def test_a_process_killed_while_it_rewrites_a_journal_loses_nothing(
    killed_in: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = without_stamps(written(path))
    older = tmp_path / "older"
    as_format_2(path, older)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    if killed_in == "written_anew":
        monkeypatch.setattr("tenuto.session.journal_mending.write_header", kill)
    else:
        monkeypatch.setattr("tenuto.session.journal.take_place", kill)
    with pytest.raises(KeyboardInterrupt):
        Journal(older, "tokens")
    monkeypatch.undo()
    assert began(older) == (saved, None)


@pytest.mark.parametrize("older", [3, 4])
def test_a_journal_of_an_older_format_is_read_as_it_is_and_gets_the_newest_with_the_first_change(
    path: Path, older: int
) -> None:
    saved = without_stamps(written(path))
    as_format(older, path)
    assert check(path).sound
    assert began(path) == (saved, None)
    compact(path)
    assert (began(path), format_of(path)) == ((saved, None), older)
    talk, journal = Journaled(), Journal(path, "tokens")
    talk.engine.sessions.open("new")
    journal.write(talk.new_changes())
    journal.close()
    assert format_of(path) == 5
    assert check(path).sound
    assert began(path) == ([*saved, *talk.saved()], None)


def test_adapters_of_sessions_are_kept_and_versions_without_adapters_refuse_the_journal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, journal = Journaled(), Journal(path, "tokens")
    policy = Policy(adapter=SessionAdapter("poet", "5eed"))
    talk.engine.sessions.open("ode", policy)
    journal.write(talk.new_changes())
    journal.close()
    assert began(path) == (talk.saved(), None)
    assert [each.policy for each in talk.saved()] == [policy]
    monkeypatch.setattr("tenuto.session.journal.FORMAT", 3)  # as before there were adapters
    with pytest.raises(ConfigError, match="of format 5; supported: 1 to 3"):
        Journal(path, "tokens")
