"""The journal: committed sessions in one SQLite file, from which they are rebuilt after a restart."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tenuto.base.errors import ConfigError
from tenuto.base.private import create_private
from tenuto.session.acknowledged import ID_BYTES, Acknowledged
from tenuto.session.changes import Change
from tenuto.session.journal_changes import ChangeTables
from tenuto.session.journal_mending import (
    Damage,
    connected,
    copied_aside,
    execute,
    has_schema,
    remove_copy,
    searched_log,
    set_aside,
    take_place,
    write_header,
    write_schema,
    written_anew,
)
from tenuto.session.journal_rows import (
    ADDED,
    APPLICATION,
    CHECKED,
    FORMAT,
    Header,
    SessionRows,
    SqliteDatabase,
    added,
)
from tenuto.session.records import SavedSession
from tenuto.session.session import Session

log = logging.getLogger("tenuto.journal")

_LOCK_SECONDS = 5.0
"""How long to wait for a file that another process still has open."""
_MIGRATIONS = {
    1: """
ALTER TABLE sessions ADD COLUMN used REAL;
CREATE TABLE results (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, key TEXT NOT NULL, turn BLOB NOT NULL, UNIQUE (session, key)
);
"""
}
"""The statements that turn a journal of each format into the next format. A journal of format 2 is rewritten."""
_LOG_BYTES = 2**22
"""The size to which SQLite cuts its log when it restarts it."""
VACUUMED = 256
"""The number of free pages that one call of `tidy` gives back. Fewer free pages stay while changes come."""


class Journal:
    """An open journal. One process has it open at a time, and one thread uses it at a time.

    Changes survive the death of the process once `write` has returned, and also a loss of power if the disk flushes
    reliably: every call ends with one flush to the disk.

    Invariant: every row has a checksum, and the rows of each session are counted (`journal_rows`). A session with a
    damaged or missing row is never read; `mend` sets it aside and reports it. If the journal has fewer changes than
    were acknowledged (`Acknowledged`), `mend` reports the difference. Opening
    a sound journal only reads it, so it works on a full disk too.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        """`fingerprint`: identifies the meaning of the model's tokens. Raises `ConfigError` if the file cannot be used,
        is in use, is unreadable, has a later format, or belongs to a model whose tokens mean something else."""
        self.path = path
        self._fingerprint = fingerprint
        self._acknowledged = Acknowledged(Path(f"{path}-acknowledged"))
        self._id = os.urandom(ID_BYTES)
        self._changes = self._sessions = self._lost = 0
        self._owned = True  # whether the row of `journal` shows that it is this model's
        self._damage: Damage | None = None  # the damage found by a migration
        self._found: Path | None = None  # a copy with changes that SQLite would have dropped
        self._vacuumed = False
        self._log_holds = False  # whether the log has rows of an erased session
        try:
            with suppress(OSError):  # SQLite reports the error; its other files get the mode of this one
                create_private(path)
            self._connect(connected(path, _LOCK_SECONDS))
        except sqlite3.Error as error:
            raise ConfigError(f"the journal {path} cannot be used: {error}") from error
        try:
            self._set_up()
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise ConfigError(f"the journal {path} cannot be used: {error}") from error
        except BaseException:
            self.close()
            raise
        self._rows = SessionRows(self._source, self._fingerprint)

    def _set_up(self) -> None:
        found, application = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
        )
        fresh = not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        if application != APPLICATION and not fresh:
            raise ConfigError(f"the journal {self.path} cannot be used: it is a database of another program")
        if not 1 <= found <= FORMAT and not fresh:
            raise ConfigError(f"the journal {self.path} is of format {found}; supported: 1 to {FORMAT}")
        if fresh:
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._use_log()
        with self._transaction():
            if fresh:
                write_schema(self._db)
                write_header(self._db, self._fingerprint, self._id, 0, 0)
            elif found < CHECKED:
                self._require_own(self._db.execute("SELECT fingerprint FROM model").fetchone()[0])
                for older in range(found, CHECKED - 1):
                    execute(self._db, _MIGRATIONS[older])
        if fresh:  # written to the file itself, so that a journal that loses its log does not look new
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            if (gone := self._acknowledged.read(None)) > 0:
                log.warning("%s is new; the journal that was there before, with %d changes, is gone", self.path, gone)
        elif found < CHECKED:
            self._migrate()
        self._read_header()

    def _use_log(self) -> None:
        log = "journal_mode = WAL", f"journal_size_limit = {_LOG_BYTES}"
        for setting in (*log, "synchronous = FULL", "secure_delete = ON"):
            self._db.execute(f"PRAGMA {setting}")

    def _require_own(self, owner: object) -> None:
        if owner != self._fingerprint:
            raise ConfigError(
                f"the journal {self.path} is of a model whose tokens mean something else; use another path"
            )

    def _migrate(self) -> None:
        """Rewrites a journal of format 2 in the newest format."""
        rows = SessionRows(self._db, self._fingerprint, checked=False)
        for _ in rows.read():
            pass
        new = written_anew(self.path, self._db, rows, self._fingerprint, self._id)
        if rows.damaged:
            self._damage = Damage(rows.damaged, 0, 0, set_aside(self.path, self._db))
        self._take_place(new)

    def _take_place(self, new: Path) -> None:
        self._connect(take_place(self.path, self._db, new, _LOCK_SECONDS))
        self._use_log()

    def _connect(self, db: sqlite3.Connection) -> None:
        self._db = self._source = db
        self._tables = ChangeTables(SqliteDatabase(db), self._fingerprint)

    def _read_header(self) -> None:
        """Checks that the journal is this model's and has all acknowledged changes. If some are missing, or their
        number is damaged, looks for them in the part of the log that SQLite would drop."""
        header = SessionRows(self._db, self._fingerprint).header()
        self._owned = header is not None
        if header is not None:
            self._take_header(header)
        acknowledged = self._acknowledged.read(self._id if self._owned else None)
        if acknowledged > self._changes:
            self._search_log(acknowledged)
            self._lost = max(0, acknowledged - self._changes) if self._owned else 0

    def _take_header(self, header: Header) -> None:
        self._require_own(header.fingerprint)
        self._owned = True
        self._id, self._changes, self._sessions = header.journal, header.changes, header.sessions

    def _search_log(self, acknowledged: int) -> None:
        self._found = searched_log(self.path, self._db)
        if self._found is None:
            return
        source = connected(self._found, _LOCK_SECONDS)
        header = SessionRows(source, self._fingerprint).header()
        if header is not None and header.changes > self._changes:
            self._source = source
            self._take_header(header)
        elif header is None and self._owned and has_schema(source):  # only this row is damaged
            self._source = source
            self._changes, self._sessions = acknowledged, 0
        else:
            source.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._close_source()
        self._db.close()
        self._acknowledged.close()

    def _close_source(self) -> None:
        if self._source is not self._db:
            self._source.close()
            self._source = self._db
        if self._found is not None:
            remove_copy(self._found)
            self._found = None

    # -- reading

    def sessions(self) -> Iterator[SavedSession]:
        """Yields all sound sessions, in the order in which they were opened. `mend` handles the others."""
        self._rows = SessionRows(self._source, self._fingerprint)
        yield from self._rows.read()

    def mend(self) -> Damage | None:
        """Sets damaged sessions aside; called once all `sessions` have been read, and before anything is written. If
        anything is damaged or lost, keeps the file under another name, continues with a new one that has all sound
        sessions, and returns the losses. Raises `ConfigError` if that is impossible, or if no row shows that the
        journal is this model's."""
        rows = self._rows
        missing = max(0, self._sessions - len(rows.sound) - len(rows.damaged))
        moved = self._source is not self._db
        sound = self._owned and not (rows.damaged or missing or self._lost or moved)
        if sound and self._is_intact():
            return self._damage
        if not self._owned and rows.damaged and not rows.sound:
            raise ConfigError(f"the journal {self.path} is damaged, or of another model: it has no undamaged session")
        try:
            new = written_anew(self.path, self._source, rows, self._fingerprint, os.urandom(ID_BYTES))
            keep = copied_aside if self._lost or moved else set_aside
            damage = Damage(rows.damaged, missing, self._lost, keep(self.path, self._db))
            self._close_source()
            self._take_place(new)
        except (sqlite3.Error, OSError) as error:
            names = ", ".join(f"{each.name!r}" for each in rows.damaged) or "its structure"
            raise ConfigError(
                f"the journal {self.path} is damaged ({names}), and cannot be rewritten without the damage: {error}"
            ) from error
        self._lost = 0
        self._read_header()
        self._rows = SessionRows(self._db, self._fingerprint)
        return damage

    def _is_intact(self) -> bool:
        """Whether SQLite finds its structures intact. If they are not, it may overwrite rows as free space."""
        try:
            return bool(self._db.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",))
        except sqlite3.Error:
            return False

    # -- writing

    def write(self, changes: Iterable[Change]) -> frozenset[Session]:
        """Writes changes of lasting sessions, in order, all or none. Returns the sessions whose changes are refused,
        here none: only this process has the file. Raises `sqlite3.Error`."""
        lasting = [change for change in changes if change.session.policy.lasting]
        if not lasting:
            return frozenset()
        opened = sum((change.kind == "open") - (change.kind in ("close", "erase")) for change in lasting)
        total = self._changes + len(lasting), self._sessions + opened
        with self._transaction():
            if not added(self._db):
                for table, column in ADDED.items():
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column} BLOB")
            if self._count("user_version") < FORMAT:
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
            for change in lasting:
                self._tables.write(change)
            if erases := any(change.kind == "erase" for change in lasting):
                self._tables.cut_all()
            write_header(self._db, self._fingerprint, self._id, *total)
        self._changes, self._sessions = total
        if erases:
            self._log_holds, self._tables.untrimmed = True, set()
        self._acknowledged.write(self._id, self._changes)
        return frozenset()

    def forget_erased(self) -> None:
        """Empties the log, which may still have rows of sessions that `write` has erased. Raises `sqlite3.Error`."""
        if self._log_holds:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._log_holds = False

    def tidy(self, *, whole: bool = False) -> bool:
        """Gives some free space back to the file system. Returns False if there is no more to give back for now: some
        pages stay free for the next changes, but none with `whole`."""
        free, pages = self._count("freelist_count"), self._count("page_count")
        if free > (0 if whole else max(VACUUMED, pages // 4)):
            self._db.executescript(f"PRAGMA incremental_vacuum({VACUUMED})")
            self._vacuumed = self._count("freelist_count") < free  # not if another program has rewritten the file
            return self._vacuumed
        if self._vacuumed:
            self._vacuumed = False
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the file becomes shorter only now
        return False

    def _count(self, what: str) -> int:
        return int(self._db.execute(f"PRAGMA {what}").fetchone()[0])
