"""The rows of a journal: their schema and checksums, and sessions read from them."""

from __future__ import annotations

import sqlite3
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import Policy
from tenuto.base.wire.document import Conversation
from tenuto.session.records import Made, Origin, SavedSession, TurnRecord

FORMAT = 5
"""The format of new journals. In format 4, rows are those of format 3, except that a policy may name an adapter, which
versions that know only format 3 would ignore. Format 5 adds the columns of `ADDED`."""
CHECKED = 3
"""The first format with checksums and counts. A journal of it becomes one of `FORMAT` with the first change."""
STAMPED = 5
"""The first format with the columns of `ADDED`."""
ADDED = {"records": "made", "sessions": "born"}
"""Columns that older formats do not have, and which are their tables' last ones."""
APPLICATION = 0x54454E55
"""The application id in the file's header (TENU), which distinguishes a journal from files of other programs."""
UNSOUND = -1
"""The checksum of a row that was made from a damaged row."""
TOGETHER = 100
"""The number of sessions that are read at a time."""

SCHEMA = """
CREATE TABLE journal (
    fingerprint TEXT NOT NULL, id BLOB NOT NULL, changes INTEGER NOT NULL, sessions INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, policy BLOB NOT NULL, system TEXT,
    version INTEGER NOT NULL, used REAL, length INTEGER NOT NULL, turns INTEGER NOT NULL, results INTEGER NOT NULL,
    checksum INTEGER NOT NULL, born BLOB, UNIQUE (tenant, name)
);
CREATE TABLE pieces (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE history (
    session INTEGER NOT NULL, position INTEGER NOT NULL, piece INTEGER NOT NULL, length INTEGER NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (session, position)
) WITHOUT ROWID;
CREATE INDEX users_of_pieces ON history (piece);
CREATE TABLE records (
    session INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, input_end INTEGER NOT NULL,
    end INTEGER NOT NULL, conversation BLOB, cut INTEGER NOT NULL, checksum INTEGER NOT NULL, made BLOB,
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
# `made`: MessagePack, see `Made`. `born`: MessagePack, the session's `birth` and `origin`. Both are NULL in rows of
# older formats.
#
# `checksum`: see `checksum_of`; it covers the tokens of a piece, and the whole row in other tables. In `history` it
# also covers the checksum of the piece, and in `sessions` the model's fingerprint. A session counts its tokens, turns
# and results, and `journal` counts sessions, so that missing rows are detected too. `changes`: the number of changes
# ever written; see `Acknowledged`.

SESSION = "id, tenant, name, policy, system, version, used, length, turns, results, born"
RECORD = 'session, number, start, input_end, "end", conversation, cut, made'
RESULT = "number, session, key, turn"

Value = int | float | str | bytes | None


@dataclass(frozen=True, slots=True)
class DamagedSession:
    """A session with a damaged or missing row. `name`: its id if it can still be read, otherwise its number."""

    tenant: str
    name: str
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_policies = msgspec.json.Decoder(Policy)
_made = msgspec.msgpack.Decoder(Made)
_born = msgspec.msgpack.Decoder(tuple[int, Origin | None])


def policy_of(stored: bytes) -> Policy:
    """Returns the policy in a row of a session. Raises errors of damage."""
    return _policies.decode(stored)


class Unsound(Exception):
    """Raised if a row is damaged or missing."""


DAMAGE = (sqlite3.Error, Unsound, ValueError, TypeError, msgspec.MsgspecError, InvalidRequest)
"""What reading a damaged row raises."""


def checksum_of(*values: Value) -> int:
    """Returns the CRC-32 of values and their types, without a `None` at the end, so that rows to which a column was
    added keep their checksums."""
    return zlib.crc32(_encode(values if values[-1] is not None else values[:-1]))


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")


def added(db: sqlite3.Connection) -> bool:
    """Whether the tables have the columns of `ADDED`."""
    return int(db.execute("PRAGMA user_version").fetchone()[0]) >= STAMPED


def columns_of(db: sqlite3.Connection, table: str, columns: str) -> str:
    """Returns `columns`, with NULL in place of the one that the file lacks because its format is older."""
    return columns if added(db) or table not in ADDED else columns.replace(f", {ADDED[table]}", ", NULL")


def insert(db: sqlite3.Connection, table: str, row: tuple[Value, ...]) -> int | None:
    """Inserts a row, which ends with its checksum. Returns its number, if the table has numbers."""
    return db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row).lastrowid


class Rows(Protocol):
    """The result of a query, as in Python's interface of databases."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """A database with the tables of a journal. A `?` in a query stands for a value."""

    def execute(self, query: str, values: Sequence[Value] = (), /) -> Rows: ...

    def insert(self, table: str, row: Sequence[Value], number: str = "") -> int:
        """Inserts a row, which ends with its checksum. Returns the row's number if a column has it, named `number`."""


class SqliteDatabase:
    """A `Database` in a file of SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.execute = db.execute
        self._db = db

    def insert(self, table: str, row: Sequence[Value], number: str = "") -> int:  # noqa: ARG002 - SQLite knows it
        """See `Database.insert`."""
        return insert(self._db, table, tuple(row)) or 0


def check(name: str, row: Sequence[Value], given: object) -> None:
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


class StoredSessions:
    """Reads sessions from the tables of a database.

    `checked`: whether the rows have checksums and counts.
    """

    _scan = ""  # how to read the table of sessions without its index

    def __init__(self, db: Database, fingerprint: str, *, checked: bool = True) -> None:
        self._database = db
        self._fingerprint = fingerprint
        self._checked = checked
        self._conversations: dict[bytes, Conversation] = {}  # decoded; most are equal

    def _columns(self, table: str, columns: str) -> str:  # noqa: ARG002 - older files lack some of a table's
        return columns

    def together(self, numbers: list[int]) -> list[SavedSession]:
        """Returns the sessions with these ascending numbers. Raises `Unsound`, and other errors of damage."""
        columns = f"{self._columns('sessions', SESSION)}, checksum"
        if not self._checked:
            columns = "id, tenant, name, policy, system, version, used, NULL, 0"
        query = f"SELECT {columns} FROM sessions{self._scan} WHERE id BETWEEN ? AND ? ORDER BY id"
        rows = self._database.execute(query, (numbers[0], numbers[-1])).fetchall()
        if [row[0] for row in rows] != numbers:
            raise Unsound("its row is missing")
        histories, records, results = self._histories(numbers), self._records(numbers), self._results(numbers)
        found = []
        for *row, own in rows:
            number, _, name, policy, system, version, used, *counts, born = row
            tokens, turns, kept = histories[number], records[number], results[number]
            if self._checked:
                check("sessions", (self._fingerprint, *row), own)
                if counts != [len(tokens), len(turns), len(kept)]:
                    raise Unsound("one of its rows is missing")
            about = policy_of(policy)
            birth, origin = _born.decode(born) if born is not None else (number, None)
            found.append(
                SavedSession(name, about, system, version, tokens, tuple(turns), tuple(kept), used, birth, origin)
            )
        return found

    def _histories(self, numbers: list[int]) -> dict[int, array[int]]:
        found: defaultdict[int, array[int]] = defaultdict(lambda: array("i"))
        sums = "history.checksum, pieces.checksum" if self._checked else "0, 0"
        query = (
            f"SELECT session, position, piece, length, tokens, {sums} FROM history JOIN pieces ON id = piece "
            "WHERE session BETWEEN ? AND ? ORDER BY session, position"
        )
        rows = self._database.execute(query, (numbers[0], numbers[-1]))
        for session, position, piece, length, data, own, content in rows:
            if self._checked:
                check("history", (session, position, piece, length, content), own)
                check("pieces", (data,), content)
            tokens = found[session]
            if position != len(tokens) or not 0 <= 4 * length <= len(data):
                raise Unsound(f"a piece at {position} with {len(data) // 4} tokens follows {len(tokens)} tokens")
            tokens.frombytes(data[: 4 * length])
        return found

    def _records(self, numbers: list[int]) -> dict[int, list[TurnRecord]]:
        found: defaultdict[int, list[TurnRecord]] = defaultdict(list)
        rows = self._numbered("records", RECORD, numbers)
        for session, _, start, input_end, end, conversation, cut, made, _ in rows:
            about = self._conversations.get(conversation)
            if about is None and conversation is not None:
                about = self._conversations[conversation] = msgspec.json.decode(conversation, type=Conversation)
            stamps = _made.decode(made) if made is not None else None
            found[session].append(TurnRecord(start, input_end, end, about, bool(cut), stamps))
        return found

    def _results(self, numbers: list[int]) -> dict[int, list[tuple[str, bytes]]]:
        found: defaultdict[int, list[tuple[str, bytes]]] = defaultdict(list)
        for _, session, key, turn, _ in self._numbered("results", RESULT, numbers):
            found[session].append((key, turn))
        return found

    def _numbered(self, table: str, columns: str, numbers: list[int]) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of sessions, each session's in the order of their numbers, with
        their checksums."""
        own = "checksum" if self._checked else "0"
        columns = self._columns(table, columns)
        query = f"SELECT {columns}, {own} FROM {table} WHERE session BETWEEN ? AND ? ORDER BY session, number"
        for row in self._database.execute(query, (numbers[0], numbers[-1])):
            if self._checked:
                check(table, row[:-1], row[-1])
            yield row


class SessionRows(StoredSessions):
    """Reads the sessions of a journal so that a damaged one affects no other: many at a time, and one by one where that
    fails."""

    _scan = " NOT INDEXED"

    def __init__(self, db: sqlite3.Connection, fingerprint: str, *, checked: bool = True) -> None:
        super().__init__(SqliteDatabase(db), fingerprint, checked=checked)
        self._db = db
        self._names: defaultdict[int, dict[tuple[str, str], None]] | None = None  # read once a session is damaged
        self.damaged: list[DamagedSession] = []
        self.sound: list[int] = []  # the numbers of sessions read without damage

    def read(self) -> Iterator[SavedSession]:
        """Yields all sound sessions, in the order in which they were opened, and adds the others to `damaged`."""
        numbers = sorted(self._numbers())
        for first in range(0, len(numbers), TOGETHER):
            some = numbers[first : first + TOGETHER]
            try:
                found = self.together(some)
            except DAMAGE:
                yield from self._one_by_one(some)
            else:
                self.sound += some
                yield from found
        self._conversations.clear()

    def _one_by_one(self, numbers: list[int]) -> Iterator[SavedSession]:
        for number in numbers:
            try:
                (saved,) = self.together([number])
            except DAMAGE as error:
                self.damaged.append(DamagedSession(*self._name(number), str(error)))
            else:
                self.sound.append(number)
                yield saved

    def _columns(self, table: str, columns: str) -> str:
        return columns_of(self._db, table, columns)

    def header(self) -> Header | None:
        """Returns the row about the whole journal; `None` if it is damaged or missing."""
        try:
            *row, given = self._db.execute("SELECT * FROM journal").fetchone()
            check("journal", tuple(row), given)
        except (sqlite3.Error, Unsound, ValueError, TypeError):
            return None
        return Header(*row)

    def _numbers(self) -> set[int]:
        """Returns the numbers of all sessions: those with a row, if there are as many as the journal counts, otherwise
        those that any row mentions. A damaged page hides rows from some queries, but not from all."""
        header = self.header() if self._checked else None
        found = self._mentioned("SELECT id FROM sessions NOT INDEXED")
        if header is not None and len(found) == header.sessions:
            return found
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
        return found.union(
            *map(self._mentioned, (*queries, "SELECT id FROM sessions INDEXED BY sqlite_autoindex_sessions_1"))
        )

    def _mentioned(self, query: str) -> set[int]:
        """Returns the numbers that a query finds before it meets damage."""
        found: set[int] = set()
        with suppress(sqlite3.Error):
            for (number,) in self._db.execute(query):
                if isinstance(number, int):
                    found.add(number)
        return found

    def _name(self, number: int) -> tuple[str, str]:
        """Returns tenant and name of a damaged session, from its row and from the index of names, which may differ."""
        if self._names is None:
            self._names = defaultdict(dict)
            columns = "id, CAST(tenant AS BLOB), CAST(name AS BLOB)"  # a damaged one may be no text
            for source in ("NOT INDEXED", "INDEXED BY sqlite_autoindex_sessions_1"):
                with suppress(sqlite3.Error):
                    for found, tenant, name in self._db.execute(f"SELECT {columns} FROM sessions {source}"):
                        self._names[found][_text(tenant), _text(name)] = None
        tenants, names = zip(*self._names[number], strict=True) if number in self._names else ((), ())
        return " or ".join(dict.fromkeys(tenants)), " or ".join(dict.fromkeys(names)) or f"number {number}"
