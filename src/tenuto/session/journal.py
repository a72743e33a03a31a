"""The journal: committed sessions in one SQLite file, from which they are rebuilt after a restart.

Histories consist of pieces, which never change and which forks share. A change writes what is new and nothing else.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tenuto.base.errors import ConfigError, InvalidRequest
from tenuto.base.options import Policy
from tenuto.base.private import create_private
from tenuto.base.views import SessionKey
from tenuto.session.changes import Change
from tenuto.session.records import SavedSession, TurnRecord
from tenuto.session.session import Session
from tenuto.text.chat import Conversation

_FORMAT = 2
_APPLICATION = 0x54454E55
"""In the file's header, so that no other program's file is taken for a journal: TENU."""
_LOCK_SECONDS = 5.0
"""How long a file that another process still has open is waited for."""

_SCHEMA = """
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
_MIGRATIONS = {
    1: """
ALTER TABLE sessions ADD COLUMN used REAL;
CREATE TABLE results (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, key TEXT NOT NULL, turn BLOB NOT NULL, UNIQUE (session, key)
);
"""
}
"""By format: what makes the next one of it."""
# `history`: tokens [position, position + length) of a session are the first `length` of the piece. `tokens`: int32,
# little-endian. `policy` and `conversation`: JSON. `records`: numbered from 1. `used`: when a change was last written,
# seconds since the epoch. `results`: MessagePack, see `KeptTurns`; numbered in the order of their commits.


class Journal:
    """An open journal. One process has it open at a time, and one thread uses it at a time.

    What `write` has returned from survives the death of the process, and, as far as the disk keeps its promises, a loss
    of power: every call ends with one flush to the disk.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        """`fingerprint`: of what tokens mean to the model. Raises `ConfigError` if the file cannot be used, is in use,
        is damaged, of a later format, or of a model whose tokens mean something else."""
        self.path = path
        try:
            with suppress(OSError):  # SQLite says what is wrong; its other files get the mode of this one
                create_private(path)
            self._db = sqlite3.connect(path, _LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise ConfigError(f"the journal {path} cannot be used: {error}") from error
        try:
            self._set_up(fingerprint)
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"the journal {path} cannot be used: {error}") from error
        except ConfigError:
            self.close()
            raise

    def _set_up(self, fingerprint: str) -> None:
        found, application = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
        )
        fresh = not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        if application != _APPLICATION and not fresh:
            raise ConfigError(f"the journal {self.path} cannot be used: it is a database of another program")
        if not 1 <= found <= _FORMAT and not fresh:
            raise ConfigError(f"the journal {self.path} is of format {found}; supported: 1 to {_FORMAT}")
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {setting}")
        with self._transaction():
            if fresh:
                self._execute(_SCHEMA)
                self._db.execute("INSERT INTO model VALUES (?)", (fingerprint,))
                self._db.execute(f"PRAGMA user_version = {_FORMAT}")
                self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
            (owner,) = self._db.execute("SELECT fingerprint FROM model").fetchone()
            if owner == fingerprint and not fresh:
                for older in range(found, _FORMAT):
                    self._execute(_MIGRATIONS[older])
                self._db.execute(f"PRAGMA user_version = {_FORMAT}")
        if owner != fingerprint:
            raise ConfigError(
                f"the journal {self.path} is of a model whose tokens mean something else; give this one another path"
            )

    def _execute(self, statements: str) -> None:
        for statement in filter(str.strip, statements.split(";")):
            self._db.execute(statement)

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
        self._db.close()

    # -- reading

    def sessions(self) -> Iterator[SavedSession]:
        """All open sessions, in the order in which they were opened. Raises `ConfigError` if the file is damaged."""
        try:
            rows = self._db.execute("SELECT id, name, policy, system, version, used FROM sessions ORDER BY id")
            for number, name, policy, system, version, used in rows.fetchall():
                tokens = self._tokens(number)
                records = tuple(self._records(number))
                results = self._db.execute("SELECT key, turn FROM results WHERE session = ? ORDER BY number", (number,))
                yield SavedSession(
                    name,
                    msgspec.json.decode(policy, type=Policy),
                    system,
                    version,
                    tuple(tokens),
                    records,
                    tuple(results.fetchall()),
                    used,
                )
        except (sqlite3.Error, ValueError, msgspec.MsgspecError, InvalidRequest) as error:
            raise ConfigError(f"the journal {self.path} is damaged: {error}") from error

    def _tokens(self, session: int) -> array[int]:
        tokens = array("i")
        pieces = self._db.execute(
            "SELECT position, length, tokens FROM history JOIN pieces ON id = piece WHERE session = ? "
            "ORDER BY position",
            (session,),
        )
        for position, length, data in pieces:
            piece = array("i", data)
            if position != len(tokens) or length > len(piece):
                raise ValueError(f"a piece at {position} of {len(piece)} tokens follows {len(tokens)}")
            tokens.extend(piece[:length])
        return tokens

    def _records(self, session: int) -> Iterator[TurnRecord]:
        rows = self._db.execute(
            "SELECT start, input_end, end, conversation, cut FROM records WHERE session = ? ORDER BY number", (session,)
        )
        for start, input_end, end, conversation, cut in rows:
            about = msgspec.json.decode(conversation, type=Conversation) if conversation is not None else None
            yield TurnRecord(start, input_end, end, about, bool(cut))

    # -- writing

    def write(self, changes: Iterable[Change]) -> None:
        """Write changes, in order, all or none. Only lasting sessions leave a trace. Raises `sqlite3.Error`."""
        with self._transaction():
            for change in changes:
                if change.session.policy.lasting:
                    self._write(change)

    def _write(self, change: Change) -> None:
        session = change.session
        if change.kind == "open":
            values = (*session.key, msgspec.json.encode(session.policy), session.system, change.used)
            self._db.execute(
                "INSERT INTO sessions (tenant, name, policy, system, version, used) VALUES (?, ?, ?, ?, 0, ?)", values
            )
            return
        number = self._number(session.key)
        if change.kind == "close":
            self._cut(number, 0)
            self._db.execute("DELETE FROM records WHERE session = ?", (number,))
            self._db.execute("DELETE FROM results WHERE session = ?", (number,))
            self._db.execute("DELETE FROM sessions WHERE id = ?", (number,))
            return
        if change.parent is not None:
            self._share(change, change.parent, number)
        else:
            self._cut(number, change.kept)
        self._append(number, change.kept, change.tokens)
        self._replace_records(number, change.turns, change.records)
        self._keep_result(number, change)
        self._db.execute(
            "UPDATE sessions SET version = ?, used = ? WHERE id = ?", (change.version, change.used, number)
        )

    def _keep_result(self, session: int, change: Change) -> None:
        for key in change.forgotten:
            self._db.execute("DELETE FROM results WHERE session = ? AND key = ?", (session, key))
        if change.result is not None:
            self._db.execute("INSERT INTO results (session, key, turn) VALUES (?, ?, ?)", (session, *change.result))

    def _number(self, key: SessionKey) -> int:
        (number,) = self._db.execute("SELECT id FROM sessions WHERE tenant = ? AND name = ?", key).fetchone()
        return int(number)

    def _cut(self, session: int, length: int) -> None:
        """The history is its first `length` tokens; pieces that nobody uses any more go."""
        beyond = "FROM history WHERE session = ? AND position >= ?"
        gone = self._db.execute(f"SELECT piece {beyond}", (session, length)).fetchall()
        self._db.execute(f"DELETE {beyond}", (session, length))
        self._db.execute(
            "UPDATE history SET length = ?2 - position WHERE session = ?1 AND position + length > ?2", (session, length)
        )
        for (piece,) in gone:
            self._db.execute(
                "DELETE FROM pieces WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM history WHERE piece = ?1)", (piece,)
            )

    def _share(self, change: Change, parent: Session, number: int) -> None:
        """A fork begins with its parent's pieces and records."""
        shared = self._number(parent.key)
        self._db.execute(
            "INSERT INTO history SELECT ?1, position, piece, min(length, ?3 - position) FROM history "
            "WHERE session = ?2 AND position < ?3",
            (number, shared, change.kept),
        )
        self._db.execute(
            "INSERT INTO records SELECT ?1, number, start, input_end, end, conversation, cut FROM records "
            "WHERE session = ?2 AND number <= ?3 - ?4",
            (number, shared, change.turns, len(change.records)),
        )

    def _append(self, session: int, position: int, tokens: array[int]) -> None:
        if tokens:
            piece = self._db.execute("INSERT INTO pieces (tokens) VALUES (?)", (tokens.tobytes(),)).lastrowid
            self._db.execute("INSERT INTO history VALUES (?, ?, ?, ?)", (session, position, piece, len(tokens)))

    def _replace_records(self, session: int, turns: int, records: Sequence[TurnRecord]) -> None:
        """There are `turns` records, the last of which are `records`."""
        first = turns - len(records) + 1
        self._db.execute("DELETE FROM records WHERE session = ? AND number >= ?", (session, first))
        for number, record in enumerate(records, first):
            about = msgspec.json.encode(record.conversation) if record.conversation is not None else None
            values = (session, number, record.start, record.input_end, record.end, about, record.cut)
            self._db.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", values)
