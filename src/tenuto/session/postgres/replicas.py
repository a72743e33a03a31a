"""The replicas of a fleet: their leases, and which of them owns each session."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tenuto.base.errors import SessionDamaged
from tenuto.base.fleet_views import ReplicaLoad, ReplicaView, TenantUse, Uses
from tenuto.base.options import Policy
from tenuto.base.views import SessionInfo, SessionKey, SessionState
from tenuto.session.journal_rows import DAMAGE, StoredSessions, check, policy_of
from tenuto.session.postgres.database import Database
from tenuto.session.records import SavedSession
from tenuto.session.session import RECORD_BYTES, SESSION_BYTES

log = logging.getLogger("tenuto.fleet")

LIVE = "NOT ended AND heartbeat + lease * INTERVAL '1 second' > clock_timestamp()"
"""Whether a replica's lease has not ended, by the database's clock."""
_UNOWNED = f"(owner IS NULL OR owner NOT IN (SELECT id FROM replicas WHERE {LIVE}))"
"""Whether no live replica owns a session."""
_NUMBERS = "string_to_array(?, ',')::bigint[]"
"""A value with numbers, separated by commas."""
_TTL = """substring(encode(policy, 'escape') FROM '"ttl":([0-9]+([.][0-9]+){0,1}(e-[0-9]+){0,1})[,}]')::float8"""
"""A session's time to live; NULL if it has none, or if its policy is damaged. Quotes within a policy's texts are
escaped, so only the field is found. PostgreSQL cannot read all policies as JSON: it refuses texts with NUL."""
FORGOTTEN = "INTERVAL '1 day'"
"""How long the row of a replica without sessions stays after its lease."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Where a session is. `owner`: the number of its owner; `None` if it was given up. `live`: whether the owner's
    lease has not ended. `url`: of the owner. `left_by`: the replica that has saved the state of a session that was
    given up, if there is one."""

    owner: int | None
    epoch: int
    live: bool
    url: str
    left_by: int | None = None

    @property
    def saved_by(self) -> int | None:
        """The replica that may have saved the session's state, if there is one."""
        return self.owner if self.owner is not None else self.left_by


@dataclass(frozen=True, slots=True)
class ReadSession:
    """A session as it was read. `number`: its row's. `written`: the transaction that last wrote the row, as each change
    of the session, of its owner and of its epoch does."""

    saved: SavedSession
    number: int
    written: str


@dataclass(frozen=True, slots=True)
class Beat:
    """The findings of a heartbeat. `lost`: whether a session may have been claimed since the last one. `others`: the
    use at other live replicas of the tenants that this one has named."""

    lost: bool
    others: dict[str, TenantUse]


@dataclass(frozen=True, slots=True)
class Unowned:
    """The row of a session that no live replica owns. `used`: when its last turn ended, in seconds since the
    epoch."""

    name: str
    policy: Policy
    version: int
    length: int
    turns: int
    used: float | None

    def info(self, context_length: int) -> SessionInfo:
        """Returns the view of the session, of which nothing is in memory."""
        policy = self.policy
        limit = min(policy.max_tokens or context_length, context_length)
        return SessionInfo(
            session_id=self.name,
            state=SessionState.OPEN,
            turn=None,
            version=self.version,
            turns=self.turns,
            tokens=self.length,
            computed=0,
            context_left=limit - self.length,
            limit=limit,
            priority=policy.priority,
            ttl=policy.ttl,
            idle_seconds=round(max(0.0, time.time() - self.used), 3) if self.used is not None else 0.0,
            memory={},
            metadata=dict(policy.metadata),
            pinned=policy.pinned,
            adapter=policy.adapter.name if policy.adapter is not None else None,
        )


class Replicas:
    """A replica's row in the database of its fleet, and its questions about others. One thread uses it at a time.

    Invariant: a session is claimed only if its owner's lease has ended, or the owner itself asks; the claim is one
    update on the condition that owner and epoch are still those, and raises the epoch. So is the change of owner with
    which a live owner hands a session over. When others claim, the owner's row says that it has `lost` a session, so it
    learns of that with its next heartbeat, whatever the clocks say.
    """

    def __init__(self, db: Database, fingerprint: str, number: int = 0) -> None:
        """`db`: a connection for this object alone. `fingerprint`: identifies the meaning of the model's tokens.
        `number`: of this replica, if it has joined already."""
        self.db = db
        self._fingerprint = fingerprint
        self._stored = StoredSessions(self.db, fingerprint)
        self.number = number
        self.secret = ""  # set by `join`

    def join(self, url: str, lease: float) -> None:
        """Sets up the database, and adds a replica at address `url`, whose lease lasts for `lease` seconds after each
        `beat`. Earlier replicas at this address have ended. Raises `ConfigError` and the database's errors."""
        self.secret = self.db.set_up(self._fingerprint, secrets.token_hex(32))
        with self.db.transaction():
            self.db.execute("UPDATE replicas SET ended = TRUE WHERE url = ?", (url,))
            old = f"heartbeat < clock_timestamp() - {FORGOTTEN}"
            unused = "NOT EXISTS (SELECT 1 FROM sessions WHERE owner = replicas.id)"
            self.db.execute(f"DELETE FROM replicas WHERE {old} AND {unused}")
            self.db.execute("DELETE FROM writers WHERE replica NOT IN (SELECT id FROM replicas)")
            row = "(url, lease, started, heartbeat) VALUES (?, ?, clock_timestamp(), clock_timestamp())"
            (self.number,) = self.db.execute(f"INSERT INTO replicas {row} RETURNING id", (url, lease)).fetchone()

    def beat(self, load: str = "", tenants: Uses | None = None) -> Beat | None:
        """Prolongs the lease, and writes the `load`, a `ReplicaLoad` in JSON, and the use of `tenants` with limits
        here. Returns `None` if another replica at the same address has ended the lease."""
        with self.db.transaction():
            query = "SELECT lost FROM replicas WHERE id = ? AND NOT ended FOR UPDATE"
            if (found := self.db.execute(query, (self.number,)).fetchone()) is None:
                return None
            beat = "UPDATE replicas SET heartbeat = clock_timestamp(), lost = FALSE, load = ?, tenants = ? WHERE id = ?"
            used = {name: use for name, use in tenants.items() if use != TenantUse()} if tenants else None
            self.db.execute(beat, (load, msgspec.json.encode(used).decode() if used else None, self.number))
            others = self._others(tenants) if tenants else {}
        return Beat(lost=bool(found[0]), others=others)

    def _others(self, tenants: Iterable[str]) -> dict[str, TenantUse]:
        found = dict.fromkeys(tenants, TenantUse())
        query = f"SELECT tenants FROM replicas WHERE id <> ? AND tenants IS NOT NULL AND {LIVE}"
        for (told,) in self.db.execute(query, (self.number,)):
            for tenant, use in msgspec.json.decode(told, type=dict[str, TenantUse]).items():
                if tenant in found:
                    found[tenant] += use
        return found

    def unowned_of(self, tenants: Collection[str]) -> dict[str, TenantUse]:
        """Returns the use of tenants by sessions that no live replica owns. Their bytes in the journal are counted
        without results and log-probabilities. Takes time in proportion to the sessions of the fleet."""
        pinned = "count(*) FILTER (WHERE position('\"pinned\":true'::bytea IN policy) > 0)"
        text = "coalesce(sum(octet_length(system)), 0)::bigint"
        query = (
            f"SELECT tenant, count(*), {pinned}, sum(length)::bigint, sum(turns)::bigint, {text} FROM sessions "
            f"WHERE {_UNOWNED} AND tenant IN ({', '.join('?' * len(tenants))}) GROUP BY tenant"
        )
        found: dict[str, TenantUse] = {}
        for tenant, sessions, pins, tokens, turns, system in self.db.execute(query, [*tenants]):
            size = SESSION_BYTES * sessions + RECORD_BYTES * turns + 4 * tokens + system
            found[tenant] = TenantUse(sessions=sessions, pinned=pins, tokens=tokens, journal_bytes=size)
        return found

    def end(self) -> None:
        """Ends the lease, so that others take over at once."""
        self.db.execute("UPDATE replicas SET ended = TRUE WHERE id = ?", (self.number,))

    def epochs(self) -> dict[SessionKey, int]:
        """Returns the sessions that this replica owns, with their epochs."""
        query = "SELECT tenant, name, epoch FROM sessions WHERE owner = ?"
        return {(tenant, name): epoch for tenant, name, epoch in self.db.execute(query, (self.number,))}

    def find(self, key: SessionKey) -> Owned | None:
        """Returns where a session is, or `None` if it does not exist."""
        query = (
            f"SELECT owner, epoch, coalesce({LIVE}, FALSE), coalesce(url, ''), left_by FROM sessions "
            "LEFT JOIN replicas ON replicas.id = owner WHERE tenant = ? AND name = ?"
        )
        found = self.db.execute(query, key).fetchone()
        return Owned(*found) if found is not None else None

    def unowned(self, tenant: str, after: str, limit: int) -> tuple[list[Unowned], bool]:
        """Returns up to `limit` of a tenant's sessions after id `after` which no live replica owns, by id, without
        damaged ones; and whether others follow."""
        query = (
            "SELECT name, policy, version, length, turns, used FROM sessions WHERE tenant = ? "
            'AND name COLLATE "C" > ? COLLATE "C" '
            f"AND {_UNOWNED} "
            'ORDER BY name COLLATE "C" LIMIT ?'
        )
        found, rows = [], self.db.execute(query, (tenant, after, limit + 1)).fetchall()
        for name, policy, *counts in rows[:limit]:
            try:
                found.append(Unowned(name, policy_of(policy), *counts))
            except DAMAGE as error:
                log.error("a damaged session is not listed", extra={"session": name, "reason": str(error)})  # noqa: TRY400
        return found, len(rows) > limit

    def expired(self, most: int) -> list[SessionKey]:
        """Returns sessions that no live replica owns, and whose time to live is over by the database's clock, without
        those with a turn that is to be begun again."""
        query = (
            "SELECT tenant, name FROM sessions "
            f"WHERE {_UNOWNED} AND used + {_TTL} < extract(epoch FROM clock_timestamp())"
            " AND NOT EXISTS (SELECT 1 FROM begun WHERE session = sessions.id AND begun.version = sessions.version)"
            " LIMIT ?"
        )
        return [(tenant, name) for tenant, name in self.db.execute(query, (most,))]

    def claim(self, key: SessionKey, seen: Owned) -> SavedSession | None:
        """Becomes the owner of a session whose owner was `seen`, and returns it with its epoch. `None` if it has
        changed its owner since, or the owner's lease has not ended. Raises `SessionDamaged` if its rows are damaged; it
        keeps its owner then."""
        claim = (
            "UPDATE sessions SET owner = ?, epoch = nextval('epochs') WHERE tenant = ? AND name = ? AND epoch = ? "
            "AND owner IS NOT DISTINCT FROM ? RETURNING id, epoch"
        )
        others = seen.owner not in (None, self.number)
        if others:
            self.db.execute("UPDATE replicas SET lost = TRUE WHERE id = ? AND NOT lost", (seen.owner,))
        with self.db.transaction():
            if others and self._lives(seen.owner):
                return None
            found = self.db.execute(claim, (self.number, *key, seen.epoch, seen.owner)).fetchone()
            if found is None:
                return None
            number, epoch = found
            with _undamaged(key):
                (saved,) = self._stored.together([number])
                begun = self._begun(number, saved.version)
        return replace(saved, epoch=epoch, begun=begun)

    def read(self, key: SessionKey) -> ReadSession | None:
        """Reads a session, which its owner may change meanwhile. Returns `None` if it does not exist. Raises
        `SessionDamaged`."""
        with self.db.transaction():
            self.db.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            query = "SELECT id, xmin::text FROM sessions WHERE tenant = ? AND name = ?"
            if (found := self.db.execute(query, key).fetchone()) is None:
                return None
            number, written = found
            with _undamaged(key):
                (saved,) = self._stored.together([number])
        return ReadSession(saved, number, written)

    def take(self, key: SessionKey, owner: int, epoch: int, read: ReadSession | None) -> SavedSession | None:
        """Becomes the owner of a session that replica `owner` owns in `epoch`, holds, and hands over. Returns the
        session with its new epoch, or `None` if its owner or its epoch has changed since. `read`: the session as it was
        read before; it is read again only if it has changed since. Raises `SessionDamaged`; the session then keeps its
        owner."""
        if read is not None:
            unchanged = (
                "UPDATE sessions SET owner = ?, epoch = nextval('epochs') WHERE id = ? AND xmin::text = ? "
                "AND epoch = ? AND owner = ? RETURNING epoch"
            )
            values = (self.number, read.number, read.written, epoch, owner)
            if (found := self.db.execute(unchanged, values).fetchone()) is not None:
                return replace(read.saved, epoch=found[0])
        take = (
            "UPDATE sessions SET owner = ?, epoch = nextval('epochs') WHERE tenant = ? AND name = ? AND epoch = ? "
            "AND owner = ? RETURNING id, epoch"
        )
        with self.db.transaction():
            found = self.db.execute(take, (self.number, *key, epoch, owner)).fetchone()
            if found is None:
                return None
            with _undamaged(key):
                (saved,) = self._stored.together([found[0]])
        return replace(saved, epoch=found[1])

    def keep(self, key: SessionKey) -> int | None:
        """Begins a new epoch of a session, if this replica owns it, so that no other can `take` it in an earlier one.
        Returns the epoch; `None` if another replica owns it. May be repeated."""
        keep = (
            "UPDATE sessions SET epoch = nextval('epochs') WHERE tenant = ? AND name = ? AND owner = ? RETURNING epoch"
        )
        found = self.db.execute(keep, (*key, self.number)).fetchone()
        return int(found[0]) if found is not None else None

    def _begun(self, session: int, version: int) -> bytes | None:
        """Returns the request of the session's open turn, if it is recorded."""
        query = "SELECT session, version, request, checksum FROM begun WHERE session = ? AND version = ?"
        if (found := self.db.execute(query, (session, version)).fetchone()) is None:
            return None
        check("begun", found[:3], found[3])
        return bytes(found[2])

    def _lives(self, owner: int | None) -> bool:
        """Whether a replica's lease has not ended, or was prolonged since the replica was marked as one that has `lost`
        a session. It cannot be prolonged before the caller's transaction ends."""
        query = f"SELECT {LIVE} OR NOT lost FROM replicas WHERE id = ? FOR SHARE"
        found = self.db.execute(query, (owner,)).fetchone()
        return found is not None and bool(found[0])

    def give_up(self, key: SessionKey, epoch: int, saved_by: int | None = None) -> None:
        """Gives up a session, if it is owned in this epoch, so that any replica may claim it. `saved_by`: the replica
        that has saved its state, if there is one."""
        query = (
            "UPDATE sessions SET owner = NULL, left_by = ? WHERE tenant = ? AND name = ? AND owner = ? AND epoch = ?"
        )
        self.db.execute(query, (saved_by, *key, self.number, epoch))

    def needed(self, replicas: Collection[int]) -> set[int]:
        """Returns those of these replicas that live, own sessions, or have the state of some that were given up."""
        asked = ",".join(map(str, replicas))
        query = (
            f"SELECT id FROM replicas WHERE id = ANY({_NUMBERS}) AND {LIVE} "
            f"UNION SELECT owner FROM sessions WHERE owner = ANY({_NUMBERS}) "
            f"UNION SELECT left_by FROM sessions WHERE owner IS NULL AND left_by = ANY({_NUMBERS})"
        )
        return {number for (number,) in self.db.execute(query, (asked, asked, asked))}

    def all(self) -> list[ReplicaView]:
        """Returns the fleet's replicas, with the number of sessions that each owns."""
        query = (
            f"SELECT id, url, {LIVE}, extract(epoch FROM clock_timestamp() - heartbeat)::float8, lease, "
            "(SELECT count(*) FROM sessions WHERE owner = replicas.id), load FROM replicas ORDER BY id"
        )
        return [_view(*row) for row in self.db.execute(query)]


def _view(number: int, url: str, live: bool, idle: float, lease: float, sessions: int, said: str | None) -> ReplicaView:
    load = msgspec.json.decode(said, type=ReplicaLoad) if said else ReplicaLoad()
    empty = load.draining and not (sessions or load.open_turns)
    known: dict[str, Any] = {name: getattr(load, name) for name in load.__struct_fields__}
    return ReplicaView(
        replica=number,
        url=url,
        live=live,
        idle_seconds=idle,
        lease_seconds=lease,
        sessions=sessions,
        empty=empty,
        **known,
    )


@contextmanager
def _undamaged(key: SessionKey) -> Iterator[None]:
    """Raises errors of a session's rows as `SessionDamaged`."""
    try:
        yield
    except DAMAGE as error:
        raise SessionDamaged(f"session {key[1]!r} is damaged in the database: {error}") from None
