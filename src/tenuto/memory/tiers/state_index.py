"""The index of a disk tier: the files that hold the state of each session, for the process that uses them next."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tenuto.base.private import create_private
from tenuto.base.views import SessionKey
from tenuto.memory.tiers.contents import MARK
from tenuto.memory.tiers.disk import DiskFailed, IndexUnusable, Listed, Listing, Run, Watcher

SCHEMA = """
CREATE TABLE meaning (identity TEXT NOT NULL);
CREATE TABLE files (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, size INTEGER NOT NULL);
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, position INTEGER NOT NULL, UNIQUE (tenant, name)
);
CREATE TABLE runs (
    session INTEGER NOT NULL, kind INTEGER NOT NULL, first INTEGER NOT NULL, file INTEGER NOT NULL,
    row INTEGER NOT NULL, count INTEGER NOT NULL, marks BLOB NOT NULL, PRIMARY KEY (session, kind, first)
) WITHOUT ROWID;
"""
# `runs`: units [first, first + count) of a session in group `kind` are in rows from `row` on of that group in a file.
# `marks`: those of their contents; see `Content.mark`.
_RUNS = """
SELECT kind, first, files.name, row, count, marks FROM runs JOIN files ON files.id = runs.file
WHERE session = (SELECT id FROM sessions WHERE tenant = ? AND name = ?) ORDER BY kind, first
"""
_FILES = """
SELECT DISTINCT files.name, size FROM runs JOIN files ON files.id = runs.file
WHERE session = (SELECT id FROM sessions WHERE tenant = ? AND name = ?)
"""
MEMORY = ":memory:"
SUFFIXES = ("", "-wal")
"""Of the files that hold an index."""


class StateIndex:
    """An index in a SQLite database. Every change is a transaction, so even if the process is killed within one, the
    index is as it was after some change. Its write-ahead log is not flushed with each change: after a loss of power the
    last changes may be missing, which costs only time. Nothing in it is trusted: whatever the index lists, units have
    to hold the contents that a session's tokens demand.

    The engine's thread reads, and the thread that writes files changes the index; each has its connection.
    """

    def __init__(self, path: Path | str, watcher: Watcher | None = None) -> None:
        """With path `MEMORY`, the index is not kept. `watcher`: is notified of changes."""
        self._path = path
        self._watcher = watcher
        self._connections: dict[str, sqlite3.Connection] = {}

    @classmethod
    def copy_of(cls, path: Path) -> StateIndex:
        """Returns a copy in memory of an index that another process has left, or still changes. Raises
        `IndexUnusable`."""
        copy = cls(MEMORY)
        try:
            with TemporaryDirectory(prefix="tenuto-") as directory:
                for suffix in SUFFIXES:
                    with suppress(FileNotFoundError) if suffix else nullcontext():
                        shutil.copyfile(f"{path}{suffix}", Path(directory) / f"index{suffix}")
                with closing(sqlite3.connect(Path(directory) / "index")) as found:
                    found.backup(copy._connection("write"))
        except (OSError, sqlite3.Error) as error:
            raise IndexUnusable("unreadable") from error
        return copy

    def begin(self, identity: str) -> dict[SessionKey, Listed]:
        try:
            found = self._found(identity)
        except sqlite3.OperationalError as error:
            raise IndexUnusable("unreadable") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self._begin_anew(identity)
            raise IndexUnusable("damaged") from error
        if found is None:
            self._begin_anew(identity)
            raise IndexUnusable("foreign")
        return found

    def _found(self, identity: str) -> dict[SessionKey, Listed] | None:
        database = self._connection("write")
        if self._is_empty(database):
            self._create(identity)
        if database.execute("SELECT identity FROM meaning").fetchall() != [(identity,)]:
            return None
        with database:
            database.execute("DELETE FROM files WHERE id NOT IN (SELECT file FROM runs)")
        files = {number: (str(name), int(size)) for number, name, size in database.execute("SELECT * FROM files")}
        used: dict[int, dict[int, None]] = {}
        for session, file in database.execute("SELECT session, file FROM runs ORDER BY session"):
            used.setdefault(session, {})[file] = None
        rows = database.execute("SELECT id, tenant, name, position FROM sessions").fetchall()
        try:
            return {
                (str(tenant), str(name)): Listed(int(position), [files[file] for file in used.get(number, ())])
                for number, tenant, name, position in rows
            }
        except (KeyError, TypeError, ValueError) as error:
            raise sqlite3.DatabaseError("a row of the index is malformed") from error

    def _begin_anew(self, identity: str) -> None:
        self.close()
        if self._path != MEMORY:
            with suppress(OSError):
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        with suppress(sqlite3.Error):
            self._create(identity)

    @staticmethod
    def _is_empty(database: sqlite3.Connection) -> bool:
        return database.execute("SELECT 1 FROM sqlite_master").fetchone() is None

    def _create(self, identity: str) -> None:
        database = self._connection("write")
        database.executescript(SCHEMA)
        with database:
            database.execute("INSERT INTO meaning VALUES (?)", (identity,))

    def _connection(self, purpose: str) -> sqlite3.Connection:
        if self._path == MEMORY:
            purpose = MEMORY
        found = self._connections.get(purpose)
        if found is None:
            if self._path != MEMORY:
                with suppress(OSError):
                    create_private(Path(self._path))
            found = sqlite3.connect(self._path, check_same_thread=False)
            for setting in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
                found.execute(f"PRAGMA {setting}")
            self._connections[purpose] = found
        return found

    def runs(self, key: SessionKey) -> list[Run]:
        return [Run(*row) for row in self._read(_RUNS, key)]

    def meaning(self) -> str:
        return "".join(str(identity) for (identity,) in self._read("SELECT identity FROM meaning"))

    def find(self, key: SessionKey) -> Listed | None:
        found = self._read("SELECT position FROM sessions WHERE tenant = ? AND name = ?", key)
        files = [(str(name), int(size)) for name, size in self._read(_FILES, key)]
        return Listed(int(found[0][0]), files) if found else None

    def listing(self, key: SessionKey) -> tuple[str, Listing] | None:
        """Returns the meaning of units, and all that is listed for a session as a change of an empty index, or `None`.
        Another thread may change the index meanwhile. Raises `DiskFailed`, and `ValueError` for a damaged row."""
        self._read("BEGIN")  # so that all of it is of one moment
        try:
            if (listed := self.find(key)) is None:
                return None
            runs, sizes = self.runs(key), dict(listed.files)
            groups = max((run.group for run in runs), default=-1) + 1
            return self.meaning(), Listing(key, listed.position, (0,) * groups, runs, sizes)
        finally:
            self._read("COMMIT")

    def _read(self, query: str, values: Sequence[str] = ()) -> list[Any]:
        try:
            return self._connection("read").execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise DiskFailed("read", f"the index could not be read: {error}") from error

    def apply(self, changes: Sequence[Listing]) -> None:
        try:
            database = self._connection("write")
            with database:
                for change in changes:
                    _apply(database, change)
        except sqlite3.Error as error:
            cause = "full" if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL else "write"
            raise DiskFailed(cause, f"the index could not be written: {error}") from error
        if self._watcher is not None:
            self._watcher.listed(change.key for change in changes)

    def empty_log(self) -> None:
        try:
            [(busy, _, _)] = self._connection("write").execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise DiskFailed("write", f"the log of the index could not be emptied: {error}") from error
        if busy:
            raise DiskFailed("write", "the log of the index could not be emptied: another program reads it")

    def clear(self, identity: str) -> None:
        try:
            database = self._connection("write")
            if self._is_empty(database):
                self._create(identity)
                return
            with database:
                database.execute("DELETE FROM runs")
                database.execute("DELETE FROM sessions")
                database.execute("DELETE FROM files")
                database.execute("UPDATE meaning SET identity = ?", (identity,))
        except sqlite3.Error as error:
            raise DiskFailed("write", f"the index could not be written: {error}") from error
        if self._watcher is not None:
            self._watcher.cleared()

    def close(self) -> None:
        """Closes the database, which may be used again."""
        for connection in self._connections.values():
            with suppress(sqlite3.Error):
                connection.close()
        self._connections.clear()


def _apply(database: sqlite3.Connection, change: Listing) -> None:
    if change.position is None:
        database.execute(
            "DELETE FROM runs WHERE session = (SELECT id FROM sessions WHERE tenant = ? AND name = ?)", change.key
        )
        database.execute("DELETE FROM sessions WHERE tenant = ? AND name = ?", change.key)
        return
    [(session,)] = database.execute(
        "INSERT INTO sessions (tenant, name, position) VALUES (?, ?, ?)"
        " ON CONFLICT DO UPDATE SET position = excluded.position RETURNING id",
        (*change.key, change.position),
    ).fetchall()
    for group, stay in enumerate(change.stay):
        database.execute("DELETE FROM runs WHERE session = ? AND kind = ? AND first >= ?", (session, group, stay))
        database.execute(
            "UPDATE runs SET count = ? - first, marks = substr(marks, 1, ? * (? - first))"
            " WHERE session = ? AND kind = ? AND first + count > ?",
            (stay, MARK, stay, session, group, stay),
        )
    database.executemany("INSERT OR IGNORE INTO files (name, size) VALUES (?, ?)", change.sizes.items())
    database.executemany(
        "INSERT INTO runs SELECT ?, ?, ?, id, ?, ?, ? FROM files WHERE name = ?",
        [(session, run.group, run.first, run.row, run.number, run.marks, run.file) for run in change.runs],
    )
