"""Rewriting of a journal, without its damage or in a later format. If anything was lost, the old file is kept under
another name."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from tenuto.base.private import create_private
from tenuto.session.journal_log import mended_log
from tenuto.session.journal_rows import (
    APPLICATION,
    FORMAT,
    RECORD,
    RESULT,
    SCHEMA,
    SESSION,
    DamagedSession,
    SessionRows,
    checksum_of,
    columns_of,
    insert,
)


@dataclass(frozen=True, slots=True)
class Damage:
    """The losses of a journal: `sessions` were set aside, `missing` more could not be identified, and `changes`
    acknowledged changes are lost. The old journal is kept in the file `aside`."""

    sessions: Sequence[DamagedSession]
    missing: int
    changes: int
    aside: Path


def connected(path: Path, lock_seconds: float) -> sqlite3.Connection:
    """Returns a connection that locks out all others from its first query on."""
    db = sqlite3.connect(path, timeout=lock_seconds, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA locking_mode = EXCLUSIVE")  # set before any read, so that SQLite needs no file for its index
    return db


def has_schema(db: sqlite3.Connection) -> bool:
    """Whether the schema, and so any row, can be read."""
    try:
        return db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return False


def execute(db: sqlite3.Connection, statements: str) -> None:
    """Executes `statements`, separated by semicolons, in the current transaction."""
    for statement in filter(str.strip, statements.split(";")):
        db.execute(statement)


def write_header(db: sqlite3.Connection, fingerprint: str, journal: bytes, changes: int, sessions: int) -> None:
    """Writes the row of the table `journal`; see `journal_rows.SCHEMA`."""
    row = fingerprint, journal, changes, sessions
    db.execute("DELETE FROM journal")
    insert(db, "journal", (*row, checksum_of(*row)))


def write_schema(db: sqlite3.Connection) -> None:
    """Creates the tables in a new file."""
    execute(db, SCHEMA)
    db.execute(f"PRAGMA user_version = {FORMAT}")
    db.execute(f"PRAGMA application_id = {APPLICATION}")


def written_anew(path: Path, source: sqlite3.Connection, rows: SessionRows, fingerprint: str, journal: bytes) -> Path:
    """Writes a new journal beside the one at `path`, with the sound sessions of `rows`, which have been read; returns
    its path. If it raises `sqlite3.Error` or `OSError`, it leaves no file."""
    new = path.with_name(f"{path.name}.new")
    _remove(new)
    try:
        create_private(new)
        with closing(sqlite3.connect(new, isolation_level=None)) as db:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA synchronous = OFF")  # the whole file is flushed at the end
            db.execute("BEGIN")
            write_schema(db)
            pieces: set[int] = set()
            for number in rows.sound:
                _copy(source, db, fingerprint, number, pieces)
            write_header(db, fingerprint, journal, 0, len(rows.sound))
            db.execute("COMMIT")
            db.execute("PRAGMA journal_mode = WAL")
        _flush(new)
    except BaseException:
        _remove(new)
        raise
    return new


def _copy(source: sqlite3.Connection, db: sqlite3.Connection, fingerprint: str, number: int, pieces: set[int]) -> None:
    """Copies one session, with those of its pieces that are not in `pieces` yet."""
    query = columns_of(source, "sessions", "tenant, name, policy, system, version, used, born")
    *of_it, born = source.execute(f"SELECT {query} FROM sessions NOT INDEXED WHERE id = ?", (number,)).fetchone()
    history = source.execute(
        "SELECT position, piece, length, tokens FROM history JOIN pieces ON id = piece WHERE session = ? "
        "ORDER BY position",
        (number,),
    )
    length = 0
    for position, piece, count, tokens in history:
        content = checksum_of(tokens)
        if piece not in pieces:
            pieces.add(piece)
            insert(db, "pieces", (piece, tokens, content))
        row = number, position, piece, count
        insert(db, "history", (*row, checksum_of(*row, content)))
        length = position + count
    counts = []
    for table, columns in (("records", RECORD), ("results", RESULT)):
        query = columns_of(source, table, columns)
        rows = source.execute(f"SELECT {query} FROM {table} WHERE session = ?", (number,)).fetchall()
        for numbered in rows:
            insert(db, f"{table} ({columns}, checksum)", (*numbered, checksum_of(*numbered)))
        counts.append(len(rows))
    about = number, *of_it, length, *counts, born
    insert(db, f"sessions ({SESSION}, checksum)", (*about, checksum_of(fingerprint, *about)))


def take_place(path: Path, db: sqlite3.Connection, new: Path, lock_seconds: float) -> sqlite3.Connection:
    """Replaces the file at `path`, which `db` has open, by the file `new`, and connects to it. If the process is
    killed, one of the two files is there, and complete."""
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # so that the old log is not applied to the new file
    new.replace(path)
    _flush(path.parent)
    db.close()
    return connected(path, lock_seconds)


def set_aside(path: Path, db: sqlite3.Connection) -> Path:
    """Gives the file a second name, and returns it."""
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    aside = _free_name(path)
    try:
        aside.hardlink_to(path)
    except OSError:  # not every file system has links
        _copy_with_log(db, aside, b"")
    return aside


def copied_aside(path: Path, db: sqlite3.Connection) -> Path:
    """Copies the file to another name, with the whole log, of which SQLite itself would copy only the beginning."""
    aside = _free_name(path)
    _copy_with_log(db, aside, _read_log(path))
    return aside


def searched_log(path: Path, db: sqlite3.Connection) -> Path | None:
    """Makes a copy of the journal with all commits of its log, also those after damage. Returns `None` if the log has
    no commits."""
    size = int(db.execute("PRAGMA page_size").fetchone()[0])
    found = path.with_name(f"{path.name}.found")
    remove_copy(found)
    _copy_with_log(db, found, b"")
    with found.open("rb") as copy:
        log = mended_log(_read_log(path), copy.read(size))
    if log is None:
        remove_copy(found)
        return None
    Path(f"{found}-wal").write_bytes(log)
    return found


def _read_log(path: Path) -> bytes:
    with suppress(FileNotFoundError):
        return Path(f"{path}-wal").read_bytes()
    return b""


def _copy_with_log(db: sqlite3.Connection, target: Path, log: bytes) -> None:
    """Copies the database to `target`, with `log` as its log. SQLite makes the copy: if this process opened and closed
    the file itself, `db` would lose its lock."""
    create_private(target)
    with closing(sqlite3.connect(target)) as copy:
        db.backup(copy)
    _remove(Path(f"{target}-wal"))
    create_private(Path(f"{target}-wal"))
    Path(f"{target}-wal").write_bytes(log)


def remove_copy(path: Path) -> None:
    """Removes a journal and its log."""
    _remove(Path(f"{path}-wal"))
    _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
