"""Faults of journals, planted one at a time."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from tenuto.session import journal
from tenuto.session import journal_rows as rows
from tenuto.session.acknowledged import Acknowledged
from tenuto.session.journal import Journal
from tests.sim.faults import replaced


def a_damaged_row_is_trusted() -> Any:
    """Checksums are not compared."""
    return replaced(rows, "check", lambda original: lambda name, row, given: None)


def a_missing_row_is_not_noticed() -> Any:
    """Row counts are not compared."""

    def make(original: Any) -> Any:
        def histories(self: rows.StoredSessions, numbers: list[int]) -> Any:
            self._checked = True
            found = original(self, numbers)
            self._checked = False
            return found

        return histories

    return replaced(rows.StoredSessions, "_histories", make)


def sessions_read_together_with_a_damaged_one_are_dropped() -> Any:
    """They are not read again one by one."""
    return replaced(rows.SessionRows, "_one_by_one", lambda original: lambda self, numbers: iter(()))


def a_truncated_log_is_trusted() -> Any:
    """The number of acknowledged changes is not checked."""
    return replaced(Acknowledged, "read", lambda original: lambda self, owner: 0)


def changes_after_damage_in_the_log_are_dropped() -> Any:
    """SQLite drops them, and recovery does not look for them."""

    def make(original: Any) -> Any:
        def searched_log(path: Path, db: sqlite3.Connection) -> Path | None:
            return None

        return searched_log

    return replaced(journal, "searched_log", make)


def a_damaged_session_leaves_no_trace() -> Any:
    """It is set aside without a report."""
    return replaced(Journal, "mend", lambda original: lambda self: original(self) and None)


FAULTS_OF_JOURNALS = (
    a_damaged_row_is_trusted,
    a_missing_row_is_not_noticed,
    sessions_read_together_with_a_damaged_one_are_dropped,
    a_truncated_log_is_trusted,
    changes_after_damage_in_the_log_are_dropped,
    a_damaged_session_leaves_no_trace,
)
