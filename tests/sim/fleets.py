"""`python -m tests.sim.fleets --seeds 20`: replicas of a fleet in one thread, with a real database and simulated time.

Each replica is an engine on the witness, with the `Member` and the journal that a server has. The world decides what
happens next: a client's operation takes its next step, a replica keeps its lease, sleeps, is cut off from the database,
or is killed and begins again. Statements and commits may fail before they are carried out, or after. The clocks of
the database and of the replicas are the world's, and the database's may jump.

Checked: what was acknowledged is the beginning of every later history, unless a client has cut it; a replica that says
a session is here has all of it; a session that is open is never said to be absent; no session has commits of two owners
in one epoch, or of an earlier epoch after a later one; an open turn that was recorded is handed over with its session; a
turn that is repeated with its idempotency key, at whatever replica, is carried out once; nothing is left of sessions
that were closed or erased; and once nothing fails any more, every session can be used through every replica within a
few leases.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar, cast

import msgspec
import psycopg

from tenuto.base.errors import AlreadyExists, NotAcknowledged, NotFound
from tenuto.base.views import Place
from tenuto.base.wire.messages import StartTurn
from tenuto.runtime.member import BEATS
from tenuto.session.postgres.database import Database
from tenuto.session.session import Session
from tests.postgres import database
from tests.sim.fleet_replicas import LEASE, Replica, asked_turn

T = TypeVar("T")

REPLICAS = 3
NAMES = ("a", "b", "c", "d")
MOST = 7
"""Sessions beyond which none is forked."""
JUMP_SECONDS = 5.0
CLOCK = """
CREATE SCHEMA world;
CREATE TABLE world.clock (now TIMESTAMPTZ NOT NULL);
INSERT INTO world.clock VALUES (to_timestamp(1e9));
CREATE SCHEMA fleet;
CREATE FUNCTION fleet.clock_timestamp() RETURNS TIMESTAMPTZ LANGUAGE SQL AS 'SELECT now FROM world.clock';
"""
"""A clock of the world's, found before PostgreSQL's own."""

Steps = Generator[None, None, None]
"""An operation of a client. Anything may happen between its steps."""


class Violation(AssertionError):
    """A replica has broken a promise."""


@dataclass
class Known:
    """What clients know of a session. `acknowledged`: the inputs of its acknowledged turns. `possible`: those of turns
    of which is unknown whether they are in the history. `ended`: those of all turns that were ever acknowledged.
    `begun`: the input of an acknowledged open turn. `asked`: key and input of a turn that is to be repeated until it is
    acknowledged. `answered`: those of the last such turn that was. `open`: `None` if that is unknown."""

    open: bool | None = None
    acknowledged: list[int] = field(default_factory=list)
    possible: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    begun: int | None = None
    asked: tuple[str, int] | None = None
    answered: tuple[str, int] | None = None
    busy: bool = False

    def learn(self, found: list[int]) -> None:
        """The history was acknowledged, while no turn was open."""
        self.acknowledged, self.possible, self.begun = found, set(), None
        self.ended |= {*found}
        if self.asked is not None and self.asked[1] in found:
            self.asked, self.answered = None, self.asked


class World:
    """Replicas, clients and time. `seed` decides everything."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.calm = False
        self._offset = 0.0  # of the database's clock
        self._jumped = -1e9
        self.url = database()
        self._db = psycopg.connect(self.url, autocommit=True)
        self._db.execute(CLOCK)
        name = self._db.info.dbname
        path = "search_path TO fleet, pg_catalog, public"
        self._db.execute(f"ALTER DATABASE {name} SET {path}".encode())
        self._db.execute(f"SET {path}".encode())
        self.dbs: list[Database] = []
        self.sessions = {name: Known() for name in NAMES}
        self._inputs = iter(range(1, 10**9))
        self._running: list[tuple[Replica, Steps]] = []
        self._over: set[Steps] = set()
        self.calm = True
        self.replicas = [Replica(self, f"replica-{number}") for number in range(REPLICAS)]
        self.calm = False
        self.operations = 0

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

    # -- what happens

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._happen()
        self._settle()

    def _happen(self) -> None:
        rng = self.rng
        self.advance(rng.choice((0.01, 0.05, 0.2)))
        for replica in self._awake():
            if rng.random() < 0.5:  # it is late
                replica.tick()
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
        for number in rng.sample(range(len(self._running)), len(self._running)):
            by, steps = self._running[number]
            if by.wakes <= self.now and rng.random() < 0.7:
                self._step(steps)
        self._running = [each for each in self._running if each[1] not in self._over]

    def _awake(self) -> list[Replica]:
        return [each for each in self.replicas if each.wakes <= self.now and not each.ended]

    def _restart(self, old: Replica) -> None:
        """Kills a replica and starts it again at its address."""
        for by, steps in self._running:
            if by is old:
                steps.close()
        self._running = [each for each in self._running if each[0] is not old]
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
        kinds = [self._turn, self._turn, self._turn, self._read]
        if known.asked is None:
            kinds += [self._repeat, self._rewind, self._fork, self.rng.choice((self._close, self._erase))]
        kind = self._open if known.open is not True else self.rng.choice(kinds)
        known.busy = True
        self.operations += 1
        steps = self._ended(kind, name, replica)
        self._running.append((replica, steps))
        self._step(steps)

    def _step(self, steps: Steps) -> None:
        if next(steps, self) is self:
            self._over.add(steps)

    def _ended(self, kind: Callable[[str, Known, Replica], Steps], name: str, replica: Replica) -> Steps:
        known = self.sessions[name]
        try:
            yield from kind(name, known, replica)
        except NotAcknowledged:
            pass  # 503: the client does not know
        except NotFound:
            if known.open:
                raise Violation(f"{name} is open, and said to be absent") from None
        finally:
            known.busy = False

    # -- operations of clients; each is carried out by the replica that the client, or a forwarding one, has asked

    def _here(self, name: str, known: Known, replica: Replica) -> bool:
        """Whether the replica says that it has the session."""
        place = replica.locate(name)
        if known.open and not place.exists:
            raise Violation(f"{name} is open, and said to be absent")
        if place.begun is not None:
            self._begin_again(name, known, replica, place.begun)
        return place.exists and place.url is None

    def _begin_again(self, name: str, known: Known, replica: Replica, request: bytes) -> None:
        """Begins a recorded turn again, as the edge does before it answers."""
        command = msgspec.msgpack.decode(request, type=StartTurn)
        given = int(command.name)
        if known.begun not in (None, given):
            raise Violation(f"{name}: another open turn is handed over")
        if given in known.ended:
            raise Violation(f"{name}: turn {given} is begun again after its commit")
        replica.start(command)

    def _open(self, name: str, known: Known, replica: Replica) -> Steps:
        if self._here(name, known, replica):
            yield
            if replica.acknowledges(replica.engine.registry.get(name)):
                known.open = True
            return
        yield
        known.open = None
        with suppress(AlreadyExists):
            session = replica.engine.sessions.open(name)
            yield
            if replica.acknowledges(session):
                known.open = True
                known.learn([])

    def _close(self, name: str, known: Known, replica: Replica) -> Steps:
        yield from self._end(name, known, replica, replica.engine.sessions.close)

    def _erase(self, name: str, known: Known, replica: Replica) -> Steps:
        yield from self._end(name, known, replica, replica.engine.erasure.erase)

    def _end(self, name: str, known: Known, replica: Replica, end: Callable[[str], object]) -> Steps:
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        del self.sessions[name]  # whether it has ended may never be known
        if len(self.sessions) < len(NAMES):
            self.sessions[f"session {next(self._inputs)}"] = Known()
        end(name)
        yield
        if (
            replica.acknowledges(session)
            and self._db.execute("SELECT 1 FROM sessions WHERE name = %s", (name,)).fetchone()
        ):
            raise Violation(f"{name} has ended, and is there")

    def _fork(self, name: str, known: Known, replica: Replica) -> Steps:
        if len(self.sessions) >= MOST or not self._here(name, known, replica):
            return
        yield
        found = inputs(replica.engine.registry.get(name))
        found = found[: self.rng.randint(0, len(found))]
        fork = f"session {next(self._inputs)}"
        child = self.sessions[fork] = Known(possible={*found}, busy=True)
        try:
            session = replica.engine.sessions.fork(name, turn=len(found), child=fork)
            yield
            if replica.acknowledges(session):
                child.open = True
                child.learn(found)
        finally:
            child.busy = False

    def _rewind(self, name: str, known: Known, replica: Replica) -> Steps:
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        found = inputs(session)
        if session.turn is not None or (known.begun is not None and known.begun not in found):
            return
        left = self.rng.randint(0, len(found))
        known.possible |= {*known.acknowledged[left:]}
        del known.acknowledged[left:]
        replica.engine.sessions.rewind(name, turn=left)
        yield
        if replica.acknowledges(session):
            self._require(name, known, found[:left])
            known.learn(found[:left])

    def _read(self, name: str, known: Known, replica: Replica) -> Steps:
        before = list(known.acknowledged)
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        found = inputs(session)
        if len(found) >= len(before):
            self._require(name, known, found)
        if self._is_current(session, replica) and found[: len(before)] != before:
            raise Violation(f"{name} has turns {before}, and {found} are shown")

    def _is_current(self, session: Session, replica: Replica) -> bool:
        """Whether a replica must show all of a session, of which it says that it is here."""
        return replica.acknowledges(session) and self._jumped < self.now - 2 * LEASE

    def _repeat(self, name: str, known: Known, replica: Replica) -> Steps:
        """Repeats a turn that was acknowledged, with its key."""
        if known.answered is None or not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        key, given = known.answered
        kept = replica.find(name, key)
        if self._is_current(session, replica) and (kept is None or kept.name != str(given)):
            raise Violation(f"{name}: the result of {given} is lost")

    def _turn(self, name: str, known: Known, replica: Replica) -> Steps:
        if not self._here(name, known, replica):
            return
        yield
        session = replica.engine.registry.get(name)
        if session.turn is not None:  # begun again, or the client has gone and it continues
            known.possible.add(session.turn.input[0])
        elif not (yield from self._started(session, known, replica)):
            return
        yield
        if replica.engine.registry.get(name) is not session:
            return
        replica.play()
        yield
        found = inputs(session)
        if replica.acknowledges(session):
            self._require(name, known, found)
            known.learn(found)

    def _started(self, session: Session, known: Known, replica: Replica) -> Generator[None, None, bool]:
        """Starts a turn, unless it was carried out already. Returns whether the client goes on."""
        if known.begun is not None and known.begun not in inputs(session):
            raise Violation(f"{session.id}: the open turn {known.begun} is lost")
        given, key = next(self._inputs), None
        if known.asked is None and self.rng.random() < 0.5:
            known.asked = f"key {given}", given
        if known.asked is not None:
            key, given = known.asked
            if (kept := replica.find(session.id, key)) is not None:
                if kept.name != str(given):
                    raise Violation(f"{session.id}: {key} has the result of {kept.name}")
                return True
        known.possible.add(given)
        resumable = self.rng.random() < 0.5
        replica.start(asked_turn(session.id, given, key, resumable=resumable))
        if resumable:
            yield
            if not replica.acknowledges(session):
                return False
            known.begun = given
        return True

    def _require(self, name: str, known: Known, found: list[int]) -> None:
        """Checks a history that a commit or a claim has shown."""
        sure, rest = found[: len(known.acknowledged)], found[len(known.acknowledged) :]
        if sure != known.acknowledged or not {*rest} <= known.possible:
            raise Violation(f"{name} has turns {found}; acknowledged: {known.acknowledged}, possible: {known.possible}")
        if len({*found}) < len(found):
            raise Violation(f"{name} has turns {found}, one of them twice")

    # -- the end

    def _settle(self) -> None:
        """Lets everything end, and checks that every session can be used through every replica."""
        self.calm, self._jumped = True, -1e9
        for replica in list(self.replicas):
            replica.wakes, replica.cut_off = 0.0, False
            if replica.ended:
                self._restart(replica)
        for _ in range(4 * BEATS + round(2 * JUMP_SECONDS * BEATS / LEASE)):
            self.advance(LEASE / BEATS)
            for replica in self.replicas:
                replica.tick()
                replica.write()
        for _, steps in self._running:
            for _ in steps:
                pass
        for name, known in self.sessions.items():
            self._check(name, known)
        self._check_owners()
        self._check_rest()
        for replica in self.replicas:
            replica.engine.audit()

    def _check(self, name: str, known: Known) -> None:
        places = [replica.locate(name) for replica in self.replicas]
        exists = {place.exists for place in places}
        if len(exists) != 1 or (known.open is not None and exists != {known.open}):
            raise Violation(f"{name} is open: {known.open}, and is said to be {places}")
        if places[0].exists:
            self._use(name, known, places)

    def _use(self, name: str, known: Known, places: list[Place]) -> None:
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
        self._require(name, known, inputs(owner.engine.registry.get(name)))

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


def inputs(session: Session) -> list[int]:
    """Returns the first token of each committed turn."""
    history: Any = session.history
    return [history[record.start] for record in session.records]


def simulate(seed: int, steps: int = 150) -> World:
    """Runs a world. Raises `Violation`, or whatever a replica raises."""
    world = World(seed)
    try:
        world.run(steps)
    finally:
        world.close()
    return world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    logging.getLogger("tenuto.fleet").setLevel(logging.CRITICAL)
    seeds = range(given.seeds) if given.seed is None else [given.seed]
    operations = 0
    for seed in seeds:
        try:
            operations += simulate(seed, given.steps).operations
        except BaseException:
            print(f"seed {seed} fails")
            raise
    print(f"{len(seeds)} worlds, {operations} operations")


if __name__ == "__main__":
    main()
