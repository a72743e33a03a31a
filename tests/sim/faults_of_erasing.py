"""Planted faults of erasures: something of an erased session stays. See `faults`."""

from __future__ import annotations

from typing import Any

from tenuto.engine.auditor import Auditor
from tenuto.engine.erasure import Erasure
from tenuto.memory.tiers import erasing
from tenuto.session.journal import Journal
from tenuto.session.journal_changes import ChangeTables
from tenuto.session.journal_erasing import RowsToErase
from tenuto.session.registry import Registry
from tenuto.session.session import Session
from tests.sim.checked import CheckedExecutor
from tests.sim.disk import FaultyDisk
from tests.sim.faults import replaced, together


def free_units_are_not_overwritten() -> Any:
    """They are counted all the same."""
    return replaced(Erasure, "_write_zeros", lambda original: lambda self, executor, group, lease: len(lease))


def a_unit_is_skipped_and_nobody_looks() -> Any:
    """All units but the first are overwritten, and the auditor does not read them."""

    def make(original: Any) -> Any:
        def write_units(self: CheckedExecutor, group: int, units: Any, data: Any) -> None:
            zeros = not any(each.any() for each in data)
            if not zeros or len(units) > 1:
                original(self, group, units[int(zeros) :], data[int(zeros) :])

        return write_units

    return together(
        replaced(CheckedExecutor, "write_units", make),
        replaced(Auditor, "require_zeros", lambda original: lambda self, executor, pool, group, units: None),
    )


def a_closed_session_keeps_what_it_shares() -> Any:
    """The prefix index goes on with the memory of closed sessions that have units of an erased one."""

    def make(original: Any) -> Any:
        def erase(self: Erasure, session_id: str, *, tenant: str = "") -> Any:
            registry = self._core.registry
            kept, registry.prefixes = registry.prefixes, {}
            try:
                return original(self, session_id, tenant=tenant)
            finally:
                registry.prefixes = kept

        return erase

    return replaced(Erasure, "erase", make)


def a_closed_session_stays_in_the_prefix_index() -> Any:
    """The erased session itself leaves its memory to others, as a closed one does."""

    def make(original: Any) -> Any:
        def close(self: Registry, session: Session, *, keep: bool = False) -> None:
            original(self, session, keep=keep or session.memory.computed > 0)

        return close

    return together(
        replaced(Registry, "close", make),
        replaced(Erasure, "_overwrite", lambda original: lambda self: {}),
    )


def rows_of_files_are_not_overwritten() -> Any:
    """A file that other sessions need keeps the units of the erased one."""
    return replaced(FaultyDisk, "overwrite", lambda original: lambda self, file, kept: 0)


def a_file_is_left() -> Any:
    """Files are forgotten, but stay on disk, and nobody looks for them."""
    return together(
        replaced(FaultyDisk, "remove", lambda original: lambda self, file: self._sizes.pop(file.name) and None),
        replaced(erasing, "_strays", lambda original: lambda tiers: set()),
    )


def a_journal_row_is_left() -> Any:
    """The rows of turns stay, and nobody looks for them."""

    def make(original: Any) -> Any:
        def remove(self: ChangeTables, session: int) -> None:
            self._cut(session, 0)
            self._db.execute("DELETE FROM sessions WHERE id = ?", (session,))

        return remove

    return replaced(ChangeTables, "remove", make)


def a_piece_of_history_is_left() -> Any:
    """The tokens stay, without a session that uses them, and nobody looks for them."""

    def make(original: Any) -> Any:
        def remove(self: ChangeTables, session: int) -> None:
            for table, column in (("history", "session"), ("records", "session"), ("sessions", "id")):
                self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (session,))

        return remove

    return together(
        replaced(ChangeTables, "remove", make),
        replaced(RowsToErase, "require_gone", lambda original: lambda self, db: self),
    )


def removed_rows_are_not_overwritten() -> Any:
    """SQLite frees them, and their bytes stay in the file."""

    def make(original: Any) -> Any:
        def use_log(self: Journal) -> None:
            original(self)
            self._db.execute("PRAGMA secure_delete = OFF")

        return use_log

    return replaced(Journal, "_use_log", make)


def the_log_keeps_removed_rows() -> Any:
    """The log is not emptied."""

    def make(original: Any) -> Any:
        def forget_erased(self: Journal) -> None:
            self._log_holds = False

        return forget_erased

    return replaced(Journal, "forget_erased", make)


def a_receipt_names_nobody() -> Any:
    """It does not say who still shares units."""
    return replaced(Erasure, "_sharing", lambda original: lambda self, *_: [])


FAULTS_OF_ERASING = (
    free_units_are_not_overwritten,
    a_unit_is_skipped_and_nobody_looks,
    a_closed_session_keeps_what_it_shares,
    a_closed_session_stays_in_the_prefix_index,
    rows_of_files_are_not_overwritten,
    a_file_is_left,
    a_journal_row_is_left,
    a_piece_of_history_is_left,
    removed_rows_are_not_overwritten,
    the_log_keeps_removed_rows,
    a_receipt_names_nobody,
)
