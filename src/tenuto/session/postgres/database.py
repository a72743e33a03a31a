"""The PostgreSQL database of a fleet: its connections, its tables, and their format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from tenuto.base.errors import ConfigError, ExtraMissing
from tenuto.session.journal_rows import Rows, Value

if TYPE_CHECKING:
    import psycopg

FORMAT = 5
"""The format of new databases."""
CONNECT_SECONDS = 5
STATEMENT_SECONDS = 10
"""How long a statement may take, or wait for another replica's transaction."""
_LOCK = 0x54454E55
"""The advisory lock of those who create or upgrade the tables, and of changes that touch pieces others may use."""

GIVEN_UP = "CREATE INDEX given_up_sessions ON sessions (left_by) WHERE owner IS NULL"
OBJECTS = """
CREATE TABLE objects (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    revision TEXT NOT NULL, head BYTEA NOT NULL, size BIGINT NOT NULL, worker BIGINT, checksum BIGINT NOT NULL,
    UNIQUE (tenant, kind, name)
);
CREATE INDEX workers_of_objects ON objects (kind, worker) WHERE worker IS NOT NULL;
CREATE TABLE items (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, object BIGINT NOT NULL, part TEXT NOT NULL,
    name TEXT NOT NULL, body BYTEA NOT NULL, checksum BIGINT NOT NULL, UNIQUE (object, part, name)
);
CREATE INDEX items_of_objects ON items (object, part, number)
"""
SCHEMA = f"""
CREATE TABLE fleet (format INTEGER NOT NULL, fingerprint TEXT NOT NULL, secret TEXT NOT NULL);
CREATE SEQUENCE epochs;
CREATE TABLE replicas (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, url TEXT NOT NULL, lease DOUBLE PRECISION NOT NULL,
    started TIMESTAMPTZ NOT NULL, heartbeat TIMESTAMPTZ NOT NULL, ended BOOLEAN NOT NULL DEFAULT FALSE,
    lost BOOLEAN NOT NULL DEFAULT FALSE, load TEXT, tenants TEXT
);
CREATE TABLE writers (replica BIGINT PRIMARY KEY, changes BIGINT NOT NULL);
CREATE TABLE sessions (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, policy BYTEA NOT NULL,
    system TEXT, version BIGINT NOT NULL, used DOUBLE PRECISION, length BIGINT NOT NULL, turns BIGINT NOT NULL,
    results BIGINT NOT NULL, checksum BIGINT NOT NULL, born BYTEA, owner BIGINT,
    epoch BIGINT NOT NULL DEFAULT nextval('epochs'), left_by BIGINT, UNIQUE (tenant, name)
);
CREATE INDEX sessions_of_owners ON sessions (owner);
{GIVEN_UP};
CREATE TABLE pieces (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tokens BYTEA NOT NULL, checksum BIGINT NOT NULL
);
CREATE TABLE history (
    session BIGINT NOT NULL, position BIGINT NOT NULL, piece BIGINT NOT NULL, length BIGINT NOT NULL,
    checksum BIGINT NOT NULL, PRIMARY KEY (session, position)
);
CREATE INDEX users_of_pieces ON history (piece);
CREATE TABLE records (
    session BIGINT NOT NULL, number BIGINT NOT NULL, start BIGINT NOT NULL, input_end BIGINT NOT NULL,
    "end" BIGINT NOT NULL, conversation BYTEA, cut BIGINT NOT NULL, made BYTEA, checksum BIGINT NOT NULL,
    epoch BIGINT, owner BIGINT, PRIMARY KEY (session, number)
);
CREATE TABLE begun (
    session BIGINT PRIMARY KEY, version BIGINT NOT NULL, request BYTEA NOT NULL, checksum BIGINT NOT NULL
);
CREATE TABLE results (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, session BIGINT NOT NULL, key TEXT NOT NULL,
    turn BYTEA NOT NULL, checksum BIGINT NOT NULL, UNIQUE (session, key)
);
{OBJECTS}"""
# Tables and checksums are those of `journal_rows.SCHEMA`, and besides:
#
# `sessions.owner`: the replica that may commit; `epoch`: drawn from one sequence whenever a session is opened or
# claimed, so no two ownerships have the same. `left_by`: the replica that has saved the state of a session without an
# owner, if there is one; of no meaning while the session has an owner. `records`: the epoch and the owner that
# committed the turn.
# `replicas`: a lease ends `lease` seconds after its heartbeat, by the database's clock, or when it is `ended`. `lost`:
# whether a session may have been claimed since the heartbeat. `load`: a `ReplicaLoad` in JSON. `tenants`:
# what each tenant with limits has there, as a `TenantUse`, in JSON.
# `begun`: the request of a session's open turn, a `StartTurn` in MessagePack, if another replica may begin it again,
# which it may while the session has this version.
# `objects`: see `StoredObject`; `items` are those of objects, in the order of their numbers.
# `writers`: how many changes of a replica are committed, so that it knows after a lost connection.

MIGRATIONS = {
    1: "ALTER TABLE replicas ADD COLUMN load TEXT",
    2: "ALTER TABLE replicas ADD COLUMN tenants TEXT",
    3: OBJECTS,
    4: f"ALTER TABLE sessions ADD COLUMN left_by BIGINT;\n{GIVEN_UP}",
}
"""The statements that turn a database of each format into the next format."""


class Database:
    """A connection to the database of a fleet, made when it is needed, and again after it broke. For one thread.

    Text has no NUL in PostgreSQL, so it is stored escaped.
    """

    idle_seconds = 1
    """How long a transaction may wait for the next statement, so that a replica that sleeps holds up nobody for
    long."""

    def __init__(self, url: str) -> None:
        """Raises `ExtraMissing` if psycopg is not installed."""
        try:
            import psycopg  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ExtraMissing("a fleet needs psycopg 3; install tenuto[fleet]") from error
        self._psycopg = psycopg
        self._url = url
        self._connection: psycopg.Connection[Any] | None = None
        self.errors = psycopg.Error
        """What a database that cannot be reached, or refuses a statement, raises."""

    @property
    def place(self) -> str:
        """The database's name and host, without secrets."""
        about = self._psycopg.conninfo.conninfo_to_dict(self._url)
        return f"{about.get('dbname', '')} at {about.get('host', 'localhost')}"

    def close(self) -> None:
        """Closes the connection; the next use makes another."""
        if self._connection is not None:
            with suppress(self.errors):
                self._connection.close()
            self._connection = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits what the block does, or nothing of it. Raises `errors`; if the connection broke during the commit, it
        may have been carried out all the same."""
        connection = self._connected()
        try:
            with connection.transaction():
                yield
        except self.errors:
            if connection.broken or connection.closed:
                self.close()
            raise

    def execute(self, query: str, values: Sequence[Value] = (), /) -> Rows:
        """Executes a statement, by itself unless a `transaction` is open. A `?` stands for a value. Raises `errors`."""
        connection = self._connected()
        try:
            done = connection.execute(cast("Any", query.replace("?", "%s")), [_stored(value) for value in values])
        except self.errors:
            if connection.broken or connection.closed:
                self.close()
            raise
        return _Rows([tuple(map(_read, row)) for row in done] if done.description else [], done.rowcount)

    def insert(self, table: str, row: Sequence[Value], number: str = "") -> int:
        """See `journal_rows.Database.insert`."""
        returning = f" RETURNING {number}" if number else ""
        done = self.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))}){returning}", row)
        return int(done.fetchone()[0]) if number else 0

    def lock_pieces(self) -> None:
        """Waits, in a transaction, until no other replica changes pieces that several sessions use."""
        self.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))

    def set_up(self, fingerprint: str, secret: str) -> str:
        """Creates the tables, or upgrades them. `secret`: of a new fleet. Returns the fleet's secret. Raises
        `ConfigError` if the database is of a later format, or of a model whose tokens mean something else, and
        `errors`."""
        with self.transaction():
            self.lock_pieces()
            if self.execute("SELECT to_regclass('fleet') IS NULL").fetchone()[0]:
                self._require_empty()
                for statement in SCHEMA.split(";\n"):
                    if statement.strip():
                        self.execute(statement)
                self.execute("INSERT INTO fleet VALUES (?, ?, ?)", (FORMAT, fingerprint, secret))
            found, owner, kept = self.execute("SELECT format, fingerprint, secret FROM fleet").fetchone()
            if not 1 <= found <= FORMAT:
                raise ConfigError(f"the database {self.place} is of format {found}; supported: 1 to {FORMAT}")
            if owner != fingerprint:
                raise ConfigError(
                    f"the database {self.place} is of a model whose tokens mean something else; use another"
                )
            for older in range(found, FORMAT):
                for statement in MIGRATIONS[older].split(";\n"):
                    self.execute(statement)
                self.execute("UPDATE fleet SET format = ?", (older + 1,))
        return str(kept)

    def _require_empty(self) -> None:
        query = "SELECT 1 FROM information_schema.tables WHERE table_schema = current_schema() LIMIT 1"
        if self.execute(query).fetchone() is not None:
            raise ConfigError(f"the database {self.place} cannot be used: it has tables of another program")

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = self._psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_SECONDS,
                options=f"-c statement_timeout={STATEMENT_SECONDS}s -c synchronous_commit=on"
                f" -c idle_in_transaction_session_timeout={self.idle_seconds}s",
                application_name="tenuto",
                keepalives_idle=CONNECT_SECONDS,
                keepalives_interval=1,
                keepalives_count=CONNECT_SECONDS,
                tcp_user_timeout=1000 * STATEMENT_SECONDS,
            )
        return self._connection


class _Rows:
    """Rows that have been read."""

    def __init__(self, rows: list[tuple[Any, ...]], rowcount: int) -> None:
        self._rows = iter(rows)
        self.rowcount = rowcount

    def fetchone(self) -> Any:
        return next(self._rows, None)

    def fetchall(self) -> list[Any]:
        return list(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return self._rows


def _stored(value: Value) -> Value:
    if isinstance(value, str) and ("\0" in value or "\\" in value):
        return value.replace("\\", "\\\\").replace("\0", "\\0")
    return value


def _read(value: Value) -> Value:
    if isinstance(value, str) and "\\" in value:
        return "\\".join(part.replace("\\0", "\0") for part in value.split("\\\\"))
    return value
