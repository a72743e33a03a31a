"""`python -m tests.sim.fleets --seeds 20`: replicas of a fleet in one thread, with a real database and simulated time.

Each replica is an engine on the witness, with the `Member` and the journal that a server has. The world decides what
happens next: a client's operation takes its next step, a replica keeps its lease, sleeps, is cut off from the database,
or is killed and begins again. Statements and commits may fail before they are carried out, or after. The clocks of
the database and of the replicas are the world's, and the database's may jump.

Checked: what was acknowledged is the beginning of every later history, unless a client has cut it; a replica that has a
session has all of it; a session that is open is never said to be absent; no session has commits of two owners in one
epoch, or of an earlier epoch after a later one; an open turn that was recorded is handed over with its session; every
token follows from those before it, however often its session has moved; a turn
that is repeated with its idempotency key, at whatever replica, is carried out once; nothing is left of sessions that
were closed or erased; and once nothing fails any more, every replica knows what tenants have at the others, and every
session can be used through every replica within a few leases. In worlds of odd seeds, replicas also give sessions up.
In every other pair of worlds, replicas share saved state in an object store, which fails and lies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import TypeVar, cast

import psycopg

from tenuto.base.errors import Misdirected, NotAcknowledged, NotFound, SessionBusy
from tenuto.base.fleet_views import Place, TenantUse
from tenuto.runtime.member import BEATS
from tenuto.session.postgres.database import Database
from tenuto.session.postgres.replicas import Replicas
from tenuto.session.session import RECORD_BYTES, SESSION_BYTES, Session
from tests.postgres import database
from tests.serve.test_killed_streams import witness_output
from tests.sim.disk import FaultyDisk
from tests.sim.fleet_clients import Known, Steps, inputs
from tests.sim.fleet_moves import Mover
from tests.sim.fleet_replicas import LEASE, Replica
from tests.sim.seeds import run
from tests.sim.shared_store import SharedStore
from tests.sim.violation import Violation

T = TypeVar("T")

REPLICAS = 3
JUMP_SECONDS = 5.0
CLOCK = """
CREATE SCHEMA world;
CREATE TABLE world.clock (now TIMESTAMPTZ NOT NULL);
INSERT INTO world.clock VALUES (to_timestamp(1e9));
CREATE SCHEMA fleet;
CREATE FUNCTION fleet.clock_timestamp() RETURNS TIMESTAMPTZ LANGUAGE SQL AS 'SELECT now FROM world.clock';
"""
"""A clock of the world's, found before PostgreSQL's own."""


class World(Mover):
    """Replicas, clients and time. `seed` decides everything. `gives_up`: whether replicas give sessions up, as when
    they are drained. With a `shared` tier, no replica can read the disk of another."""

    def __init__(self, seed: int, *, gives_up: bool = False, shared: bool = False) -> None:
        self._gives_up = gives_up
        self.url = database()
        super().__init__(Random(seed), psycopg.connect(self.url, autocommit=True))
        self._offset = 0.0  # of the database's clock
        self._db.execute(CLOCK)
        name = self._db.info.dbname
        path = "search_path TO fleet, pg_catalog, public"
        self._db.execute(f"ALTER DATABASE {name} SET {path}".encode())
        self._db.execute(f"SET {path}".encode())
        self._asks = Replicas(Database(self.url), "tokens")
        self.dbs = [self._asks.db]
        self.disks: dict[int, FaultyDisk] = {}
        self.chance = Random(seed * 31 + 7)
        self.reads_ahead = seed % 3 != 0
        self.calm = True
        weather = Random(seed * 17 + 3)
        self.store: SharedStore | None = None
        if shared:
            self.store = SharedStore(weather, self.disks, lambda: self.calm, self._needed, loses=seed % 4 == 3)
        self.running: list[tuple[Replica, Steps]] = []
        self._over: set[Steps] = set()
        self.replicas = [Replica(self, f"replica-{number}") for number in range(REPLICAS)]
        self.calm = False
        self.operations = self.moves = self.given_up = self._taken_over = 0

    def close(self) -> None:
        for each in self.dbs:
            each.close()
        self._db.close()

    def failure(self) -> str:
        draw = self.rng.random()
        return "" if self.calm or draw > 0.04 else "before" if draw < 0.02 else "after"

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._db.execute("UPDATE world.clock SET now = to_timestamp(%s)", (1e9 + self.now + self._offset,))

    def jump(self, seconds: float) -> None:
        """Changes the database's clock."""
        self._offset += seconds
        self._jumped = self.now
        self.advance(0)

    @property
    def taken_over(self) -> int:
        """The number of sessions that went on with state that others had saved."""
        return self._taken_over + sum(replica.taken_over for replica in self.replicas)

    # -- what happens

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._happen()
        self._settle()

    def _happen(self) -> None:
        rng = self.rng
        self.advance(rng.choice((0.01, 0.05, 0.2)))
        for replica in self._awake():
            self._pass(replica)
            if replica.tier is not None:
                replica.tier.check()
        draw, replica = rng.random(), rng.choice(self.replicas)
        if replica.ended or draw < 0.01:
            self._restart(replica)
        elif draw < 0.05:
            replica.wakes = self.now + rng.uniform(0.2, 3 * LEASE)
        elif draw < 0.08:
            replica.cut_off = not replica.cut_off
        elif draw < 0.09:
            self.jump(rng.uniform(-JUMP_SECONDS, JUMP_SECONDS))
        elif draw < 0.45:
            self._begin()
        there = list(self.running)  # steps may add others
        for number in rng.sample(range(len(there)), len(there)):
            by, steps = there[number]
            if by.wakes <= self.now and rng.random() < 0.7:
                self._step(steps)
        self.running = [each for each in self.running if each[1] not in self._over]

    def _pass(self, replica: Replica) -> None:
        """Lets a replica do what it does beside its clients' operations."""
        if self.rng.random() < 0.5:  # it is late
            replica.tick()
        if self.chance.random() < 0.7:
            replica.rest()

    def _awake(self) -> list[Replica]:
        return [each for each in self.replicas if each.wakes <= self.now and not each.ended]

    def _restart(self, old: Replica) -> None:
        """Kills a replica and starts it again at its address."""
        self._taken_over += old.taken_over
        for by, steps in self.running:
            if by is old:
                steps.close()
        self.running = [each for each in self.running if each[0] is not old]
        was, self.calm = self.calm, True
        self.replicas[self.replicas.index(old)] = Replica(self, old.name)
        self.calm = was

    def _begin(self) -> None:
        """Has a client begin an operation on a session that it does not use yet, by a replica that is awake."""
        free = [name for name, known in self.sessions.items() if not known.busy]
        if not free or not (awake := self._awake()):
            return
        name, replica = self.rng.choice(free), self.rng.choice(awake)
        known = self.sessions[name]
        kinds = [self._turn, self._turn, self._turn, self._read, self._move, self._move, self._move]
        kinds += [self._give_up] * 4 if self._gives_up else []
        if known.asked is None:
            kinds += [self._repeat, self._rewind, self._fork, self.rng.choice((self._close, self._erase))]
        kind = self._open if known.open is not True else self.rng.choice(kinds)
        known.busy = True
        self.operations += 1
        steps = self._ended(kind, name, replica)
        self.running.append((replica, steps))
        self._step(steps)

    def _step(self, steps: Steps) -> None:
        if next(steps, self) is self:
            self._over.add(steps)

    def _ended(self, kind: Callable[[str, Known, Replica], Steps], name: str, replica: Replica) -> Steps:
        known = self.sessions[name]
        try:
            yield from kind(name, known, replica)
        except (NotAcknowledged, Misdirected, SessionBusy):
            pass  # the client does not know, or asks again
        except NotFound:
            if known.open:
                raise Violation(f"{name} is open, and said to be absent") from None
        finally:
            known.busy = False

    # -- the end

    def _settle(self) -> None:
        """Lets everything end, and checks that every session can be used through every replica."""
        self.calm, self._jumped = True, -1e9
        for replica in list(self.replicas):
            replica.wakes, replica.cut_off = 0.0, False
            if replica.ended:
                self._restart(replica)
        self._live_on(4 + 2 * JUMP_SECONDS / LEASE)
        for _, steps in self.running:  # grows meanwhile
            for _ in steps:
                pass
        self._live_on(3)
        self._check_counts()
        for name, known in self.sessions.items():
            self._check(name, known)
        self._check_owners()
        self._check_rest()
        for replica in self.replicas:
            replica.engine.audit()
        self._check_store()

    def _needed(self, numbers: Collection[int]) -> Collection[int]:
        """Returns those of these replicas that live or own sessions; no message about that is lost."""
        return self._asks.needed(numbers)

    def _check_store(self) -> None:
        """Checks that the store has what the disks of replicas have, and nothing that nobody needs."""
        if self.store is None:
            return
        for replica in self.replicas:
            tier = replica.tier
            assert tier is not None
            saves = replica.engine.idle_memory.saves
            for _ in range(100):  # the disk still fails
                saves._retry_at = 0.0
                saves.settle(self.now)
            tier.settle(self.now)
            for _ in range(2):
                tier.tidy(self._needed)
            if unneeded := self.store.replicas() - set(self._needed(self.store.replicas())):
                raise Violation(f"the store has objects of replicas {unneeded}, which nobody needs")

    def _live_on(self, leases: float) -> None:
        """Lets replicas keep their leases, and write what they have, for so long."""
        for _ in range(round(leases * BEATS)):
            self.advance(LEASE / BEATS)
            for replica in self.replicas:
                replica.tick()
                replica.write()

    def _check(self, name: str, known: Known) -> None:
        places = [replica.locate(name) for replica in self.replicas]
        exists = {place.exists for place in places}
        if len(exists) != 1 or (known.open is not None and exists != {known.open}):
            raise Violation(f"{name} is open: {known.open}, and is said to be {places}")
        if places[0].exists:
            self._use(name, known, places)

    def _use(self, name: str, known: Known, places: list[Place]) -> None:
        self._check_count()
        owners = [replica for replica, place in zip(self.replicas, places, strict=True) if place.url is None]
        if len(owners) != 1 or {place.url for place in places} != {None, f"http://{owners[0].name}"}:
            raise Violation(f"{name} has other owners than one: {places}")
        (owner,) = owners
        for place in places:
            if place.begun is not None:
                self._begin_again(name, known, owner, place.begun)
        known.open = True
        for _ in self._turn(name, known, owner):
            pass
        session = owner.engine.registry.get(name)
        self._require(name, known, inputs(session))
        _check_outputs(session)

    def _check_counts(self) -> None:
        """Checks that each replica knows what all others have, and what nobody owns."""
        live = [replica.member.number for replica in self.replicas]
        query = "SELECT length, turns FROM sessions WHERE NOT owner = ANY(%s) IS TRUE"
        rows = cast("list[tuple[int, int]]", self._db.execute(query, (live,)).fetchall())
        tokens, turns = sum(length for length, _ in rows), sum(count for _, count in rows)
        size = SESSION_BYTES * len(rows) + RECORD_BYTES * turns + 4 * tokens
        unowned = TenantUse(sessions=len(rows), tokens=tokens, journal_bytes=size)
        counts = {replica.name: replica.engine.registry.counted("") for replica in self.replicas}
        for replica in self.replicas:
            others = sum((each for name, each in counts.items() if name != replica.name), unowned)
            if (known := replica.engine.registry.elsewhere.get("")) != others:
                raise Violation(f"{replica.name} knows of {known} elsewhere; there is {others}")

    def _check_count(self) -> None:
        """Checks that no session counts twice, also if it was taken over just now."""
        ((sessions, tokens),) = self._db.execute("SELECT count(*), sum(length)::bigint FROM sessions").fetchall()
        for replica in self.replicas:
            used = replica.engine.registry.used("")
            if used.sessions > sessions or used.tokens > tokens:
                raise Violation(f"{replica.name} counts {used}; there are {sessions} sessions of {tokens} tokens")

    def _check_owners(self) -> None:
        last: dict[str, int] = {}
        owners: dict[int, tuple[str, int]] = {}
        query = (
            "SELECT name, records.epoch, records.owner FROM records JOIN sessions ON id = session "
            "ORDER BY name, records.number"
        )
        for name, epoch, owner in cast("list[tuple[str, int, int]]", self._db.execute(query).fetchall()):
            if owners.setdefault(epoch, (name, owner)) != (name, owner):
                raise Violation(f"{name} has commits of two owners in epoch {epoch}")
            if epoch < last.get(name, 0):
                raise Violation(f"{name} has a commit of epoch {epoch} after {last[name]}")
            last[name] = epoch

    def _check_rest(self) -> None:
        """Checks that the database has nothing of sessions that are not there."""
        for table in ("history", "records", "results", "begun"):
            query = f"SELECT count(*) FROM {table} WHERE session NOT IN (SELECT id FROM sessions)"
            self._require_none(table, query)
        self._require_none("pieces", "SELECT count(*) FROM pieces WHERE id NOT IN (SELECT piece FROM history)")

    def _require_none(self, table: str, query: str) -> None:
        ((count,),) = self._db.execute(query.encode()).fetchall()
        if count:
            raise Violation(f"{count} rows of {table} belong to no session")


def _check_outputs(session: Session) -> None:
    """Checks that every token follows from those before it, wherever its turn was computed."""
    history = list(session.history)
    for record in session.records:
        output = history[record.input_end : record.end]
        if output != witness_output(history[: record.input_end], len(output)):
            raise Violation(f"{session.id} has other tokens than follow from its history")


def simulate(seed: int, steps: int = 150, *, gives_up: bool = False, shared: bool = False) -> World:
    """Runs a world. Raises `Violation`, or whatever a replica raises."""
    world = World(seed, gives_up=gives_up, shared=shared)
    try:
        world.run(steps)
    finally:
        world.close()
    return world


if __name__ == "__main__":
    run(
        __doc__,
        lambda seed, steps: simulate(seed, steps, gives_up=seed % 2 == 1, shared=seed // 2 % 2 == 1).operations,
        150,
        "tenuto.fleet",
    )
