"""The rows of a journal: their schema and checksums, and sessions read from them."""

from __future__ import annotations

import sqlite3
import zlib
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import Policy
from tenuto.base.wire.document import Conversation
from tenuto.session.records import SavedSession, TurnRecord

FORMAT = 3
APPLICATION = 0x54454E55
"""The application id in the file's header (TENU), which distinguishes a journal from files of other programs."""
UNSOUND = -1
"""The checksum of a row that was made from a damaged row."""

SCHEMA = """
CREATE TABLE journal (
    fingerprint TEXT NOT NULL, id BLOB NOT NULL, changes INTEGER NOT NULL, sessions INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, policy BLOB NOT NULL, system TEXT,
    version INTEGER NOT NULL, used REAL, length INTEGER NOT NULL, turns INTEGER NOT NULL, results INTEGER NOT NULL,
    checksum INTEGER NOT NULL, UNIQUE (tenant, name)
);
CREATE TABLE pieces (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE history (
    session INTEGER NOT NULL, position INTEGER NOT NULL, piece INTEGER NOT NULL, length INTEGER NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (session, position)
) WITHOUT ROWID;
CREATE INDEX users_of_pieces ON history (piece);
CREATE TABLE records (
    session INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, input_end INTEGER NOT NULL,
    end INTEGER NOT NULL, conversation BLOB, cut INTEGER NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (session, number)
) WITHOUT ROWID;
CREATE TABLE results (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, key TEXT NOT NULL, turn BLOB NOT NULL,
    checksum INTEGER NOT NULL, UNIQUE (session, key)
);
"""
# `history`: tokens [position, position + length) of a session are the first `length` tokens of the piece. `tokens`:
# int32, little-endian. `policy` and `conversation`: JSON. `records`: numbered from 1. `used`: the time of the last
# written change, in seconds since the epoch. `results`: MessagePack, see `KeptTurns`; numbered in the order of commits.
#
# `checksum`: see `checksum_of`; it covers the tokens of a piece, and the whole row in other tables. In `history` it
# also covers the checksum of the piece, and in `sessions` the model's fingerprint. A session counts its tokens, turns
# and results, and `journal` counts sessions, so that missing rows are detected too. `changes`: the number of changes
# ever written; see `Acknowledged`.

SESSION = "id, tenant, name, policy, system, version, used, length, turns, results"
RECORD = "session, number, start, input_end, end, conversation, cut"
RESULT = "number, session, key, turn"

Value = int | float | str | bytes | None


@dataclass(frozen=True, slots=True)
class DamagedSession:
    """A session with a damaged or missing row. `name`: its id if it can still be read, otherwise its number."""

    tenant: str
    name: str
    reason: str


class Unsound(Exception):
    """Raised if a row is damaged or missing."""


def checksum_of(*values: Value) -> int:
    """Returns the CRC-32 of values and their types."""
    return zlib.crc32(msgspec.msgpack.encode(values))


def insert(db: sqlite3.Connection, table: str, row: tuple[Value, ...]) -> int | None:
    """Inserts a row, which ends with its checksum. Returns its number, if the table has numbers."""
    return db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row).lastrowid


def check(name: str, row: tuple[Value, ...], given: object) -> None:
    """Raises `Unsound` unless `given` is the checksum of the row."""
    if checksum_of(*row) != given:
        raise Unsound(f"a row of {name} is damaged")


class Header(NamedTuple):
    """The row about the whole journal: the model whose tokens it has, the journal's id, and how many changes were ever
    written to it and sessions are in it."""

    fingerprint: str
    journal: bytes
    changes: int
    sessions: int


class SessionRows:
    """Reads the sessions of a journal one by one, so that a damaged one affects no other.

    Rows of format 2 have no checksums and no counts.
    """

    def __init__(self, db: sqlite3.Connection, fingerprint: str, format_: int) -> None:
        self._db = db
        self._fingerprint = fingerprint
        self._checked = format_ >= 3  # the first with checksums
        self.damaged: list[DamagedSession] = []
        self.sound: list[int] = []  # the numbers of sessions read without damage

    def read(self) -> Iterator[SavedSession]:
        """Yields all sound sessions, in the order in which they were opened, and adds the others to `damaged`."""
        for number in sorted(self._numbers()):
            try:
                saved = self._session(number)
            except (sqlite3.Error, Unsound, ValueError, TypeError, msgspec.MsgspecError, InvalidRequest) as error:
                self.damaged.append(DamagedSession(*self._name(number), str(error)))
            else:
                self.sound.append(number)
                yield saved

    def header(self) -> Header | None:
        """Returns the row about the whole journal; `None` if it is damaged or missing."""
        try:
            *row, given = self._db.execute("SELECT * FROM journal").fetchone()
            check("journal", tuple(row), given)
        except (sqlite3.Error, Unsound, ValueError, TypeError):
            return None
        return Header(*row)

    def _numbers(self) -> set[int]:
        """Returns the numbers of all sessions that any row mentions. A damaged page hides rows from some queries, but
        not from all."""
        found: set[int] = set()
        queries = [
            f"SELECT DISTINCT {column} FROM {table} ORDER BY {column} {order}"
            for table, column in (
                ("sessions NOT INDEXED", "id"),
                ("history", "session"),
                ("records", "session"),
                ("results", "session"),
            )
            for order in ("ASC", "DESC")
        ]
        for query in (*queries, "SELECT id FROM sessions INDEXED BY sqlite_autoindex_sessions_1"):
            with suppress(sqlite3.Error):
                for (number,) in self._db.execute(query):
                    if isinstance(number, int):
                        found.add(number)
        return found

    def _name(self, number: int) -> tuple[str, str]:
        """Returns tenant and name of a damaged session, from its row and from the index of names, which may differ."""
        tenants, names = dict[str, None](), dict[str, None]()
        for source in ("NOT INDEXED", "INDEXED BY sqlite_autoindex_sessions_1"):
            with suppress(sqlite3.Error, ValueError):
                query = f"SELECT tenant, name FROM sessions {source} WHERE +id = ?"
                for tenant, name in self._db.execute(query, (number,)):
                    tenants[str(tenant)] = names[str(name)] = None
        return " or ".join(tenants), " or ".join(names) or f"number {number}"

    def _session(self, number: int) -> SavedSession:
        columns = SESSION + ", checksum" if self._checked else "id, tenant, name, policy, system, version, used"
        query = f"SELECT {columns} FROM sessions NOT INDEXED WHERE id = ?"
        row = self._db.execute(query, (number,)).fetchone()
        if row is None:
            raise Unsound("its row is missing")
        if self._checked:
            check("sessions", (self._fingerprint, *row[:-1]), row[-1])
        _, _, name, policy, system, version, used, *counts = row[:10]
        tokens, records = self._tokens(number), tuple(self._records(number))
        results = tuple((key, turn) for _, _, key, turn in self._numbered("results", RESULT, number))
        if self._checked and counts != [len(tokens), len(records), len(results)]:
            raise Unsound("one of its rows is missing")
        decoded = msgspec.json.decode(policy, type=Policy)
        return SavedSession(name, decoded, system, version, tuple(tokens), records, results, used)

    def _tokens(self, session: int) -> array[int]:
        tokens = array("i")
        sums = "history.checksum, pieces.checksum" if self._checked else "0, 0"
        pieces = self._db.execute(
            f"SELECT position, piece, length, {sums}, tokens FROM history JOIN pieces ON id = piece WHERE session = ? "
            "ORDER BY position",
            (session,),
        )
        for position, number, length, own, content, data in pieces:
            if self._checked:
                check("history", (session, position, number, length, content), own)
                check("pieces", (data,), content)
            piece = array("i", data)
            if position != len(tokens) or length > len(piece):
                raise Unsound(f"a piece at {position} with {len(piece)} tokens follows {len(tokens)} tokens")
            tokens.extend(piece[:length])
        return tokens

    def _records(self, session: int) -> Iterator[TurnRecord]:
        for _, _, start, input_end, end, conversation, cut in self._numbered("records", RECORD, session):
            about = msgspec.json.decode(conversation, type=Conversation) if conversation is not None else None
            yield TurnRecord(start, input_end, end, about, bool(cut))

    def _numbered(self, table: str, columns: str, session: int) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of a session in the order of their numbers."""
        given = "checksum" if self._checked else "0"
        query = f"SELECT {columns}, {given} FROM {table} WHERE session = ? ORDER BY number"
        for *row, checksum in self._db.execute(query, (session,)):
            if self._checked:
                check(table, tuple(row), checksum)
            yield tuple(row)
