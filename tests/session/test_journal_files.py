"""Journals are checked and counted without a change, and compacted at once or not at all."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tenuto.base.errors import ConfigError
from tenuto.session.journal import Journal
from tenuto.session.journal_files import check, compact, statistics
from tests.session.journals import SESSIONS, began, harmed_now, killed, left_open, put, written
from tests.session.test_damaged_journals import HARMS, flipped
from tests.session.test_journal import Journaled
from tests.session.test_journal_space import fill


def test_a_check_of_a_killed_servers_journal_finds_all_and_changes_nothing(path: Path, tmp_path: Path) -> None:
    saved = written(path)
    files = killed(path)
    left = put(files, tmp_path / "left")
    found = check(left)
    assert found.sound
    tokens, turns = sum(len(each.tokens) for each in saved), sum(len(each.records) for each in saved)
    assert (found.sessions, found.turns, found.tokens) == (6, turns, tokens)
    counted = statistics(left)
    assert (counted.all.sessions, counted.all.turns, counted.all.tokens) == (6, turns, tokens)
    assert counted.stored_tokens < tokens  # forks share
    assert counted.changes == 25
    assert killed(left) == files
    assert began(left) == (saved, None)


@pytest.mark.parametrize("harm", HARMS)
def test_a_check_names_damaged_sessions(harm: str, path: Path) -> None:
    written(path)
    harmed_now(path, HARMS[harm])
    before = killed(path)
    found = check(path)
    assert [each.name for each in found.damaged] == [SESSIONS[2]]
    assert (found.sound, found.sessions) == (False, 5)
    with pytest.raises(ConfigError, match="is damaged; start a server"):
        compact(path)
    assert killed(path) == before


def test_a_check_counts_what_left_no_trace(path: Path) -> None:
    written(path)
    harmed_now(
        path,
        *(f"DELETE FROM {table} WHERE session = 4" for table in ("history", "records")),
        "DELETE FROM sessions WHERE id = 4",
    )
    found = check(path)
    assert (found.sound, found.missing, found.damaged, found.sessions) == (False, 1, [], 5)


def test_a_check_counts_changes_behind_damage_in_the_log_and_leaves_them_for_a_server(
    path: Path, tmp_path: Path
) -> None:
    saved = written(path)
    files = killed(path)
    left = put({**files, "journal-wal": flipped(files["journal-wal"], 20_000, 1)}, tmp_path / "left")
    before = killed(left)
    found = check(left)
    assert found.lost_changes > 0
    with pytest.raises(ConfigError, match="is damaged"):
        compact(left)
    assert killed(left) == before
    assert began(left)[0] == saved


def test_a_journal_whose_own_row_is_damaged_is_not_sound(path: Path) -> None:
    written(path)
    harmed_now(path, "UPDATE journal SET changes = changes + 1")
    assert not check(path).sound


def test_a_compacted_journal_has_all_sessions_and_no_free_page(path: Path) -> None:
    talk = Journaled(10_000)
    journal = Journal(path, "tokens")
    fill(talk, journal, 60)
    for number in range(0, 60, 2):
        talk.engine.sessions.close(f"large {number}")
    journal.write(talk.new_changes())
    journal.close()
    assert statistics(path).free_pages
    before, after = compact(path)
    assert after < before * 2 / 3
    assert after == path.stat().st_size
    assert not statistics(path).free_pages
    assert began(path) == (talk.saved(), None)


@pytest.mark.parametrize("operation", [check, statistics, compact])
def test_a_journal_in_use_or_no_journal_is_refused(operation: object, path: Path) -> None:
    assert callable(operation)
    written(path)
    before = killed(path)
    with pytest.raises(ConfigError, match="is locked"):
        operation(path)
    assert killed(path) == before
    left_open.pop().close()
    other = path.with_name("other.db")
    sqlite3.connect(other).execute("CREATE TABLE mine (x)").connection.close()
    with pytest.raises(ConfigError, match="is no journal"):
        operation(other)
    with pytest.raises(ConfigError, match="no such file"):
        operation(path.with_name("nothing"))
    assert not path.with_name("nothing").exists()
