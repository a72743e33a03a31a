"""Databases of fleets in earlier formats are upgraded when a replica joins, whole or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tenuto.base.errors import ConfigError
from tenuto.base.fleet_views import TenantUse
from tenuto.base.objects import NewItem, ObjectEdit, ObjectItem, ObjectKey
from tenuto.session.postgres.database import FORMAT, Database
from tenuto.session.postgres.objects import Objects
from tests.postgres import database
from tests.present import present
from tests.session.test_fleet_journals import Replica, history

FIRST = """
CREATE TABLE fleet (format INTEGER NOT NULL, fingerprint TEXT NOT NULL, secret TEXT NOT NULL);
CREATE SEQUENCE epochs;
CREATE TABLE replicas (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, url TEXT NOT NULL, lease DOUBLE PRECISION NOT NULL,
    started TIMESTAMPTZ NOT NULL, heartbeat TIMESTAMPTZ NOT NULL, ended BOOLEAN NOT NULL DEFAULT FALSE,
    lost BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE TABLE writers (replica BIGINT PRIMARY KEY, changes BIGINT NOT NULL);
CREATE TABLE sessions (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, policy BYTEA NOT NULL,
    system TEXT, version BIGINT NOT NULL, used DOUBLE PRECISION, length BIGINT NOT NULL, turns BIGINT NOT NULL,
    results BIGINT NOT NULL, checksum BIGINT NOT NULL, born BYTEA, owner BIGINT,
    epoch BIGINT NOT NULL DEFAULT nextval('epochs'), UNIQUE (tenant, name)
);
CREATE INDEX sessions_of_owners ON sessions (owner);
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
"""
"""The tables of format 1."""
ADDED = {2: ("replicas", "load TEXT"), 3: ("replicas", "tenants TEXT"), 5: ("sessions", "left_by BIGINT")}
"""The column that a later format has added."""
NEW = {
    4: {
        "objects": """
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    revision TEXT NOT NULL, head BYTEA NOT NULL, size BIGINT NOT NULL, worker BIGINT, checksum BIGINT NOT NULL,
    UNIQUE (tenant, kind, name)
""",
        "items": """
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, object BIGINT NOT NULL, part TEXT NOT NULL,
    name TEXT NOT NULL, body BYTEA NOT NULL, checksum BIGINT NOT NULL, UNIQUE (object, part, name)
""",
    }
}
"""The tables that a later format has added."""
OLDER = range(1, FORMAT)
BEATS = {1: "lost = FALSE", 2: "lost = FALSE, load = '{}'", 3: "lost = FALSE, load = '{}', tenants = '{}'"}
BEATS[4] = BEATS[3]
"""What a heartbeat of each earlier format sets, besides its time."""


class Old:
    """A database of an earlier format, in which a replica that has died has a session."""

    def __init__(self, url: str, number: int) -> None:
        self.url = url
        owner = Replica(url, "old")
        owner.open()
        owner.turn("s", [1, 2, 3])
        owner.turn("s", [4])
        owner.write()
        owner.replicas.end()
        owner.end()
        self.history = history(owner)
        self.secret = owner.replicas.secret
        with self._connected() as db:
            for added in range(FORMAT, number, -1):
                for table in NEW.get(added, ()):
                    db.execute(f"DROP TABLE {table}".encode())
                if added in ADDED:
                    table, column = ADDED[added]
                    db.execute(f"ALTER TABLE {table} DROP COLUMN {column.split()[0]}".encode())
            db.execute("UPDATE fleet SET format = %s", (number,))

    def _connected(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.url, autocommit=True)

    def execute(self, statement: str) -> None:
        with self._connected() as db:
            for each in statement.split(";\n"):
                db.execute(each.encode()) if each.strip() else None

    @property
    def format(self) -> object:
        with self._connected() as db:
            return present(db.execute("SELECT format FROM fleet").fetchone())[0]

    def columns(self) -> list[tuple[object, ...]]:
        with self._connected() as db:
            query = (
                "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns"
                " WHERE table_schema = 'public' ORDER BY 1, 2"
            )
            return db.execute(query).fetchall()

    def indexes(self) -> list[tuple[object, ...]]:
        with self._connected() as db:
            return db.execute("SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1").fetchall()


def use_objects(url: str) -> None:
    """Checks that objects can be kept."""
    objects, key = Objects(Database(url)), ObjectKey("t", "k", "a")
    edit = ObjectEdit(expected="", revision="1", head=b"h", added=[NewItem("p", "i", b"b")])
    assert objects.edit(key, edit)
    assert present(objects.find(key)).size == 2
    assert present(objects.items(key, "p", 1)).items == [ObjectItem("i", b"b")]
    objects.db.close()


@pytest.fixture(params=OLDER)
def old(request: pytest.FixtureRequest) -> Old:
    return Old(database(), request.param)


def test_an_old_database_of_these_tests_has_the_tables_of_its_format(old: Old) -> None:
    blank = Old.__new__(Old)
    blank.url = database()
    blank.execute(FIRST)
    for added in range(2, int(str(old.format)) + 1):
        if added in ADDED:
            table, column = ADDED[added]
            blank.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
        for table, columns in NEW.get(added, {}).items():
            blank.execute(f"CREATE TABLE {table} ({columns})")
    assert old.columns() == blank.columns()


def test_a_replica_that_joins_upgrades_the_database_and_keeps_everything(old: Old) -> None:
    new = Replica(old.url, "new")
    assert old.format == FORMAT
    blank = Old(database(), FORMAT)
    assert (old.columns(), old.indexes()) == (blank.columns(), blank.indexes())
    use_objects(old.url)
    assert new.replicas.secret == old.secret
    new.take()
    assert history(new) == old.history
    new.turn("s", [5])
    assert new.write() == set()
    assert present(new.replicas.beat("{}", {})).others == {}
    new.end()


def test_a_replica_of_an_earlier_version_goes_on_beside_newer_ones_and_cannot_start_again(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    was = int(str(old.format))
    row = "INSERT INTO replicas (url, lease, started, heartbeat) VALUES ('http://old', 60, %s, %s)"
    old.execute(row.replace("%s", "clock_timestamp()"))
    new = Replica(old.url, "new")
    old.execute(
        f"UPDATE replicas SET heartbeat = clock_timestamp(), {BEATS[was]} WHERE url = 'http://old' AND NOT ended"
    )
    assert {each.url: each.live for each in new.replicas.all() if not each.url.endswith("/old") or each.live} == {
        "http://old": True,
        "http://new": True,
    }
    assert present(new.replicas.beat("{}", {"": TenantUse()})).others == {"": TenantUse()}
    before = old.columns()
    monkeypatch.setattr("tenuto.session.postgres.database.FORMAT", was)
    again = Database(old.url)
    with pytest.raises(ConfigError, match=f"is of format {FORMAT}; supported: 1 to {was}"):
        again.set_up("tokens", "")
    again.close()
    assert old.columns() == before
    new.end()


def test_replicas_that_join_at_once_upgrade_it_once(old: Old) -> None:
    with ThreadPoolExecutor(4) as joining:
        replicas = list(joining.map(lambda number: Replica(old.url, f"new-{number}"), range(4)))
    assert old.format == FORMAT
    assert len({each.replicas.number for each in replicas}) == 4
    for each in replicas:
        each.end()


def test_an_upgrade_that_fails_changes_nothing(old: Old) -> None:
    old.execute("CREATE INDEX given_up_sessions ON sessions (version)")  # so the last statement fails
    before, number = old.columns(), old.format
    late = Database(old.url)
    with pytest.raises(psycopg.errors.DuplicateTable):
        late.set_up("tokens", "")
    late.close()
    assert (old.columns(), old.format) == (before, number)
