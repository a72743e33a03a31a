"""The journal: committed sessions in one SQLite file, from which they are rebuilt after a restart.

Histories consist of pieces, which forks share, and of which only an end that no session uses is ever cut off. A change
writes only the new tokens and rows.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tenuto.base.errors import ConfigError
from tenuto.base.private import create_private
from tenuto.base.views import SessionKey
from tenuto.session.acknowledged import ID_BYTES, Acknowledged
from tenuto.session.changes import Change
from tenuto.session.journal_erasing import RowsToErase, cut_to_use, too_long
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
    RECORD,
    UNSOUND,
    Header,
    SessionRows,
    added,
    checksum_of,
    insert,
)
from tenuto.session.records import SavedSession, TurnRecord
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
_PIECES = (
    "SELECT session, position, piece, length, history.checksum, pieces.checksum FROM history JOIN pieces ON id = piece"
)
_RECORDS = f"records ({RECORD}, checksum)"
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
    were acknowledged (`Acknowledged`), `mend` reports the difference. A piece that only
    one session uses has no tokens beyond that session's part. Opening a sound journal only reads it, so it works on a
    full disk too.
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
        # pieces that several sessions use, and whose ends perhaps none has; unknown until a session is erased
        self._untrimmed: set[int] | None = None
        self._log_holds = False  # whether the log has rows of an erased session
        try:
            with suppress(OSError):  # SQLite reports the error; its other files get the mode of this one
                create_private(path)
            self._db = self._source = connected(path, _LOCK_SECONDS)
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
        self._db = self._source = take_place(self.path, self._db, new, _LOCK_SECONDS)
        self._use_log()

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

    def write(self, changes: Iterable[Change]) -> None:
        """Writes changes of lasting sessions, in order, all or none. Raises `sqlite3.Error`."""
        lasting = [change for change in changes if change.session.policy.lasting]
        if not lasting:
            return
        opened = sum((change.kind == "open") - (change.kind in ("close", "erase")) for change in lasting)
        total = self._changes + len(lasting), self._sessions + opened
        with self._transaction():
            if not added(self._db):
                for table, column in ADDED.items():
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column} BLOB")
            if self._count("user_version") < FORMAT:
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
            for change in lasting:
                self._write(change)
            if erases := any(change.kind == "erase" for change in lasting):
                for piece in too_long(self._db) if self._untrimmed is None else self._untrimmed:
                    cut_to_use(self._db, piece)
            write_header(self._db, self._fingerprint, self._id, *total)
        self._changes, self._sessions = total
        if erases:
            self._log_holds, self._untrimmed = True, set()
        self._acknowledged.write(self._id, self._changes)

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

    def _write(self, change: Change) -> None:
        session = change.session
        if change.kind == "open":
            columns = "tenant, name, policy, system, version, used, length, turns, results, checksum"
            insert(self._db, f"sessions ({columns})", (*self._about(session), 0, change.used, 0, 0, 0, UNSOUND))
            self._seal(self._number(session.key)[0], 0, change, 0, 0, 0)
            return
        number, results = self._number(session.key)
        if change.kind == "erase":
            rows = RowsToErase.of(self._db, number)
            self._remove(number)
            gone = rows.require_gone(self._db)
            change.erased.rows, change.erased.shared = gone.rows, gone.shared
            return
        if change.kind == "close":
            self._remove(number)
            return
        if change.parent is not None:
            self._share(change, change.parent, number)
        else:
            self._cut(number, change.kept)
        self._append(number, change.kept, change.tokens)
        self._replace_records(number, change.turns, change.records)
        results += self._keep_result(number, change)
        self._seal(number, change.version, change, change.length, change.turns, results)

    @staticmethod
    def _about(session: Session) -> tuple[str, str, bytes, str | None]:
        """Returns the columns of a session that never change."""
        return (*session.key, msgspec.json.encode(session.policy), session.system)

    def _remove(self, session: int) -> None:
        self._cut(session, 0)
        for table, column in (("records", "session"), ("results", "session"), ("sessions", "id")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (session,))

    def _seal(self, session: int, version: int, change: Change, length: int, turns: int, results: int) -> None:
        """Writes a session's row with its counts and its checksum. All values come from memory, since the row in the
        file may have been damaged."""
        born = msgspec.msgpack.encode((change.session.birth, change.session.origin))
        row = (*self._about(change.session), version, float(change.used), length, turns, results, born)
        self._db.execute(
            "UPDATE sessions SET tenant = ?, name = ?, policy = ?, system = ?, version = ?, used = ?, length = ?, "
            "turns = ?, results = ?, born = ?, checksum = ? WHERE id = ?",
            (*row, checksum_of(self._fingerprint, session, *row), session),
        )

    def _keep_result(self, session: int, change: Change) -> int:
        """Adds and removes the change's kept results. Returns by how many their number has grown."""
        more = 0
        for key in change.forgotten:
            more -= self._db.execute("DELETE FROM results WHERE session = ? AND key = ?", (session, key)).rowcount
        if change.result is not None:
            row = session, *change.result, UNSOUND
            number = insert(self._db, "results (session, key, turn, checksum)", row)
            content = checksum_of(number, session, *change.result)
            self._db.execute("UPDATE results SET checksum = ? WHERE number = ?", (content, number))
            more += 1
        return more

    def _number(self, key: SessionKey) -> tuple[int, int]:
        """Returns a session's number, and the number of its results."""
        query = "SELECT id, results FROM sessions WHERE tenant = ? AND name = ?"
        number, results = self._db.execute(query, key).fetchone()
        return int(number), int(results)

    def _cut(self, session: int, length: int) -> None:
        """Cuts the history to its first `length` tokens."""
        beyond = "FROM history WHERE session = ? AND position >= ?"
        gone = self._db.execute(f"SELECT piece {beyond}", (session, length)).fetchall()
        self._db.execute(f"DELETE {beyond}", (session, length))
        self._shorten(session, length)
        for (piece,) in gone:
            self._trim(piece)

    def _shorten(self, session: int, length: int) -> None:
        """Shortens the use of the last piece so that the history has at most `length` tokens."""
        query = f"{_PIECES} WHERE session = ? ORDER BY position DESC LIMIT 1"
        for _, position, piece, count, own, content in self._db.execute(query, (session,)).fetchall():
            if position + count > length:
                row = session, position, piece, length - position
                sound = own == checksum_of(session, position, piece, count, content)
                self._db.execute(
                    "UPDATE history SET length = ?, checksum = ? WHERE session = ? AND position = ?",
                    (length - position, checksum_of(*row, content) if sound else UNSOUND, session, position),
                )
                self._trim(piece)

    def _trim(self, piece: int) -> None:
        """Deletes what no session uses of a piece any more: all of it, or the end that the only session with a part of
        it has not. A damaged piece is left."""
        users = self._db.execute(f"{_PIECES} WHERE piece = ? LIMIT 2", (piece,)).fetchall()
        if not users:
            self._db.execute("DELETE FROM pieces WHERE id = ?", (piece,))
        if len(users) > 1 and self._untrimmed is not None:
            self._untrimmed.add(piece)
        if len(users) != 1:
            return
        ((session, position, _, length, own, content),) = users
        longer = "SELECT tokens FROM pieces WHERE id = ? AND length(tokens) > ?"
        for (tokens,) in self._db.execute(longer, (piece, 4 * length)).fetchall():
            row = session, position, piece, length
            if checksum_of(tokens) == content and checksum_of(*row, content) == own:
                kept = tokens[: 4 * length]
                content = checksum_of(kept)
                self._db.execute("UPDATE pieces SET tokens = ?, checksum = ? WHERE id = ?", (kept, content, piece))
                self._db.execute(
                    "UPDATE history SET checksum = ? WHERE session = ? AND position = ?",
                    (checksum_of(*row, content), session, position),
                )

    def _share(self, change: Change, parent: Session, number: int) -> None:
        """Gives a fork its parent's pieces and records. Copies of damaged rows are marked as damaged."""
        shared, _ = self._number(parent.key)
        query = f"{_PIECES} WHERE session = ? AND position < ?"
        for _, position, piece, count, own, content in self._db.execute(query, (shared, change.kept)).fetchall():
            row = number, position, piece, min(count, change.kept - position)
            sound = own == checksum_of(shared, position, piece, count, content)
            insert(self._db, "history", (*row, checksum_of(*row, content) if sound else UNSOUND))
        query = f"SELECT {RECORD}, checksum FROM records WHERE session = ? AND number <= ?"
        for *old, own in self._db.execute(query, (shared, change.turns - len(change.records))).fetchall():
            row = (number, *old[1:])
            insert(self._db, _RECORDS, (*row, checksum_of(*row) if own == checksum_of(*old) else UNSOUND))

    def _append(self, session: int, position: int, tokens: array[int]) -> None:
        if tokens:
            data = tokens.tobytes()
            content = checksum_of(data)
            piece = insert(self._db, "pieces (tokens, checksum)", (data, content))
            row = session, position, piece, len(tokens)
            insert(self._db, "history", (*row, checksum_of(*row, content)))

    def _replace_records(self, session: int, turns: int, records: Sequence[TurnRecord]) -> None:
        """Replaces the last records, so that there are `turns` records and the last are `records`."""
        first = turns - len(records) + 1
        self._db.execute("DELETE FROM records WHERE session = ? AND number >= ?", (session, first))
        for number, record in enumerate(records, first):
            about = msgspec.json.encode(record.conversation) if record.conversation is not None else None
            made = msgspec.msgpack.encode(record.made) if record.made is not None else None
            row = (session, number, record.start, record.input_end, record.end, about, int(record.cut), made)
            insert(self._db, _RECORDS, (*row, checksum_of(*row)))
