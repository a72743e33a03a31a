"""`python -m tests.sim.objects --seeds 20`: conversations and batches that replicas share, with a real database and
simulated time.

Each replica has what a server has of them: `Conversations`, `Batches`, and `SharedObjects` on a connection of its own.
All run in one event loop, whose time is the world's, like the clock of the database. Statements and commits may fail
before they are carried out, or after. Replicas sleep past their leases in the middle of anything, and are killed.

Checked: what was acknowledged to a client is in its conversation once and whole, in the order in which clients have
seen it; a result of a batch that was recorded never changes, and each request gets one; a batch that has ended is the
same everywhere, for ever; and once nothing fails any more, every conversation is free and every batch ends.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations
from random import Random
from typing import Any, TypeVar, cast

import msgspec
import psycopg

from tenuto.base.errors import NotAcknowledged, SessionBusy, TenutoError
from tenuto.base.wire.fleet_messages import ListAbandoned
from tenuto.base.wire.request import Request
from tenuto.runtime.shared_objects import OfObjects, SharedObjects
from tenuto.serve.anthropic.batches import Batches, Result, Work, new_name
from tenuto.serve.openai.conversations import Conversations
from tenuto.serve.openai.response_schemas import Item
from tenuto.serve.shared.tenant_objects import TenantObjects
from tenuto.session.postgres.database import Database
from tenuto.session.postgres.objects import Objects
from tenuto.session.postgres.replicas import Replicas
from tests.postgres import database
from tests.sim.fleet_replicas import Lossy
from tests.sim.fleets import CLOCK
from tests.sim.seeds import run

T = TypeVar("T")

REPLICAS, LEASE = 3, 1.0
CONVERSATIONS, CLIENTS = 2, 4
SETTLING = 40.0
"""Seconds in which everything has to end once nothing fails any more."""


class Violation(Exception):
    """The world has broken a promise."""


class WorldLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once when nothing else is to be done."""

    def __init__(self, world: World) -> None:
        super().__init__(cast("selectors.BaseSelector", Waits(world)))
        self._world = world

    def time(self) -> float:
        return self._world.now


class Waits(selectors.SelectSelector):
    """Waits in the world's time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Violation("nothing will ever happen any more")
        if timeout > 0:
            self._world.advance(timeout)
        return super().select(0)


@dataclass(eq=False)
class Told:
    """A response or an item that a client was told about. `began`, `ended`: when it was asked for and acknowledged."""

    ids: list[str]
    began: float
    ended: float


@dataclass
class Known:
    """What the world knows of a conversation. `told`: what was acknowledged."""

    name: str
    told: list[Told] = field(default_factory=list)


class Replica:
    """A replica: its lease, and what it does with objects."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.wakes = 0.0  # until when it sleeps
        self._killed = False
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a seed decides everything
        self.replicas = Replicas(world.connect(), "tokens")
        was, world.calm = world.calm, True
        self.replicas.join(f"http://{world.rng.random()}", LEASE)
        world.calm = was
        self.number = self.replicas.number
        self._shared = SharedObjects(Objects(world.connect()))
        self.conversations = Conversations(
            TenantObjects(self.ask, "t", Conversations.KIND, self.number),
            world.fate,
        )
        self.batches = Batches(TenantObjects(self.ask, "t", Batches.KIND, self.number))
        self.spawn(self._beat())
        self.spawn(self._resume())

    async def ask(self, request: Request[T]) -> T:
        """Carries a request out, at some time, unless the replica was killed."""
        await self.pause(0.02)
        if self._killed:
            raise asyncio.CancelledError
        answer = self._shared.carry_out(cast("OfObjects", request))
        await self.pause(0.02)
        return cast("T", answer)

    async def pause(self, most: float) -> None:
        """Waits for a while, and until the replica is awake."""
        await asyncio.sleep(self.world.rng.uniform(0, most))
        while self.world.now < self.wakes:
            await asyncio.sleep(self.wakes - self.world.now)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks[task] = None
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.errors.append(error)

    def kill(self) -> None:
        """Ends whatever the replica does, at once."""
        self._killed = True
        for task in list(self.tasks):
            task.cancel()
        self._shared.close()
        self.replicas.db.close()

    async def _beat(self) -> None:
        while True:
            await self.pause(0)
            with suppress(psycopg.Error):
                self.replicas.beat("{}")
            await asyncio.sleep(LEASE / 4)

    async def _resume(self) -> None:
        while True:
            await asyncio.sleep(LEASE)
            try:
                for each in await self.ask(ListAbandoned(kind=Batches.KIND)):
                    self.spawn(self.work(self.batches.resume, each.name))
            except NotAcknowledged:
                pass

    async def work(self, how: Work, name: str) -> None:
        """Works on a batch, until it ends or this replica leaves it."""
        with suppress(TenutoError):  # it was not opened, or the database cannot be asked
            await how(name, self._answer, 4)

    async def _answer(self, params: bytes) -> Result | None:
        """Answers a request of a batch, differently each time; or not at all, as while the replica ends."""
        await self.pause(0.3)
        if self.world.rng.random() < 0.02 and not self.world.calm:
            return None
        self.world.answers += 1
        return {"type": "succeeded", "message": f"{params.decode()} {self.world.answers}"}


class World:
    """Replicas, clients and time. `seed` decides everything."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.calm = True
        self.answers = self.operations = 0
        self.errors: list[BaseException] = []
        self.replicas: list[Replica] = []
        self._dbs: list[Database] = []
        self.url = database()
        self._db = psycopg.connect(self.url, autocommit=True)
        self._db.execute(CLOCK)
        path = "search_path TO fleet, pg_catalog, public"
        self._db.execute(f"ALTER DATABASE {self._db.info.dbname} SET {path}".encode())
        self._db.execute(f"SET {path}".encode())
        self.committed: dict[str, list[dict[str, Any]]] = {}  # the output of responses whose turns were committed
        self._fenced: set[str] = set()  # responses whose turns can no more be committed
        self._orphans: list[tuple[Known, str]] = []  # committed responses that were never acknowledged
        self._recorded: dict[tuple[int, str], bytes] = {}
        self._over: dict[str, bytes] = {}  # the results of batches that have ended
        self._opened: dict[str, int] = {}  # batches that were acknowledged, with the number of their requests
        self._cancelled: set[str] = set()

    def connect(self) -> Database:
        db = Lossy(self.url, self._failure)
        self._dbs.append(db)
        return db

    def _failure(self) -> str:
        draw = self.rng.random()
        return "" if self.calm or draw > 0.06 else "before" if draw < 0.03 else "after"

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._db.execute("UPDATE world.clock SET now = to_timestamp(%s)", (1e9 + self.now,))

    def close(self) -> None:
        for each in self._dbs:
            each.close()
        self._db.close()

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends what still goes on after a violation."""
        for replica in self.replicas:
            replica.kill()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()

        async def over() -> None:
            await asyncio.gather(*left, return_exceptions=True)

        loop.run_until_complete(over())

    async def fate(self, response: str) -> list[dict[str, Any]] | None:
        """Says what has become of a response whose replica is gone: its session is claimed, so that nothing is
        committed any more."""
        if response not in self.committed:
            self._fenced.add(response)
        return self.committed.get(response)

    # -- what happens

    async def run(self, steps: int) -> None:
        self.replicas = [Replica(self) for _ in range(REPLICAS)]
        self.known = [Known((await self.replicas[0].conversations.open([], {})).id) for _ in range(CONVERSATIONS)]
        self.calm = False
        clients = [asyncio.ensure_future(self._client(number, steps)) for number in range(CLIENTS)]
        trouble = asyncio.ensure_future(self._trouble())
        await asyncio.gather(*clients)
        if trouble.done():
            trouble.result()
        trouble.cancel()
        await self._settle()
        for replica in self.replicas:
            replica.kill()
        await asyncio.sleep(0)

    async def _trouble(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0.1, 0.6))
            number = self.rng.randrange(REPLICAS)
            if self.rng.random() < 0.3:
                self.replicas[number].kill()
                self.replicas[number] = Replica(self)
            else:
                self.replicas[number].wakes = self.now + self.rng.uniform(0.2, 3 * LEASE)
            self._check_batches()

    async def _client(self, number: int, steps: int) -> None:
        for step in range(steps):
            self.operations += 1
            replica, known, name = self.rng.choice(self.replicas), self.rng.choice(self.known), f"{number}-{step}"
            kind = self.rng.choice((self._add, self._respond, self._respond, self._read, self._batch))
            doing = asyncio.ensure_future(kind(replica, known, name))
            replica.tasks[doing] = None
            await asyncio.wait({doing})
            replica.tasks.pop(doing, None)
            error = doing.exception() if not doing.cancelled() else None
            if error is not None and not isinstance(error, NotAcknowledged | SessionBusy):
                raise error
            await asyncio.sleep(self.rng.uniform(0, 0.3))

    async def _add(self, replica: Replica, known: Known, name: str) -> None:
        began = self.now
        items = await replica.conversations.add(known.name, [item(name)])
        known.told.append(Told([each["id"] for each in items], began, self.now))

    async def _respond(self, replica: Replica, known: Known, name: str) -> None:
        """Writes a response, as the routes do: its turn is committed, then the conversation has it, then it is
        answered. Some turns fail; some are not stored, so that no other replica can know of them."""
        began, stored, draw = self.now, self.rng.random() < 0.6, self.rng.random()
        going_on = await replica.conversations.go_on(known.name, [item(f"in-{name}")], name)
        earlier = [part.text for each in going_on.earlier for part in each.content or () if not isinstance(part, str)]
        lost = False
        try:
            await replica.pause(0.4)
            output = [{"id": f"out-{name}", "type": "message", "role": "assistant", "content": []}]
            if draw < 0.2:
                return
            if stored and name in self._fenced:
                lost = True
                raise NotAcknowledged("another replica has claimed the response")
            if stored:
                self.committed[name] = output
            try:
                await going_on.add(output)
            except asyncio.CancelledError:  # the replica was killed before it could say that it is added
                if stored:
                    self._orphans.append((known, name))
                raise
        finally:
            replica.spawn(going_on.leave() if lost else going_on.end())
        await replica.pause(0.05)
        known.told.append(Told([f"in-{name}", f"out-{name}"], began, self.now))
        self._check_earlier(known, earlier, began)

    def _check_earlier(self, known: Known, earlier: list[str], began: float) -> None:
        for told in known.told:
            text = told.ids[0]
            if told.ended < began and text.startswith("in-") and earlier.count(text) != 1:
                raise Violation(f"{text} was acknowledged, and a later response does not know it once: {earlier}")

    async def _read(self, replica: Replica, known: Known, _: str) -> None:
        began = self.now
        self._check(known, await ids_of(replica, known), began)

    async def _batch(self, replica: Replica, _: Known, __: str) -> None:
        if self._opened and self.rng.random() < 0.4:
            name = self.rng.choice(list(self._opened))
            if self.rng.random() < 0.3:
                await replica.batches.cancel(name)
                self._cancelled.add(name)
            elif (await replica.batches.find(name)).has_ended:
                self._check_results(name, await replica.batches.results(name))
            return
        name, count = new_name(), self.rng.randrange(1, 12)
        requests = [(f"r{number}", f"{name} {number}".encode()) for number in range(count)]
        try:
            await replica.batches.open(name, requests)
        finally:
            replica.spawn(replica.work(replica.batches.run, name))
        self._opened[name] = count

    # -- what is checked

    def _check(self, known: Known, ids: list[str], began: float) -> None:
        """Checks a list of ids that was read after `began`."""
        for told in known.told:
            if told.ended < began:
                self._place(told, ids)
        for name in {each.split("-", 1)[1] for each in ids if each.startswith(("in-", "out-"))}:
            place = ids.index(f"in-{name}") if f"in-{name}" in ids else -2
            if ids.count(f"out-{name}") != 1 or ids[place + 1 : place + 2] != [f"out-{name}"]:
                raise Violation(f"response {name} is not whole, or not once: {ids}")

    def _place(self, told: Told, ids: list[str]) -> int:
        if any(ids.count(each) != 1 for each in told.ids):
            raise Violation(f"{told.ids} were acknowledged, and are not there once: {ids}")
        return ids.index(told.ids[0])

    def _check_batches(self) -> None:
        """Checks that results which were recorded stay as they are."""
        query = "SELECT object, name, body FROM items WHERE part = 'results'"
        for number, name, body in cast("list[tuple[int, str, bytes]]", self._db.execute(query).fetchall()):
            if self._recorded.setdefault((number, name), body) != body:
                raise Violation(f"the result of {name} has changed")

    def _check_results(self, name: str, results: bytes) -> None:
        if self._over.setdefault(name, results) != results:
            raise Violation(f"batch {name} has ended, and changes")

    async def _settle(self) -> None:
        """Lets everything end, and checks what is left."""
        self.calm = True
        for replica in self.replicas:
            replica.wakes = 0.0
        deadline = self.now + SETTLING
        while not await self._rests():
            if self.now > deadline:
                raise Violation("a conversation is not free, or a batch does not end")
            await asyncio.sleep(LEASE)
        if self.errors:
            raise self.errors[0]
        for known in self.known:
            await self._check_conversation(known)
        self._check_batches()
        for batch in await self.replicas[0].batches.newest():
            await self._check_batch(batch.id)
        if missing := self._opened.keys() - {batch.id for batch in await self.replicas[0].batches.newest()}:
            raise Violation(f"batches {missing} were acknowledged, and are gone")

    async def _check_conversation(self, known: Known) -> None:
        found = [await ids_of(replica, known) for replica in self.replicas]
        if any(each != found[0] for each in found):
            raise Violation(f"replicas see different conversations: {found}")
        self._check(known, found[0], self.now + 1)
        for of, name in self._orphans:
            if of is known and f"out-{name}" not in found[0]:
                raise Violation(f"response {name} was committed, and its replica killed, and it was not added")
        for one, other in permutations(known.told, 2):
            if one.ended < other.began and self._place(one, found[0]) > self._place(other, found[0]):
                raise Violation(f"{one.ids} were acknowledged before {other.ids}, and come after them")

    async def _rests(self) -> bool:
        for replica in self.replicas:
            for known in self.known:
                if (await replica.conversations.find(known.name)).head.response:
                    return False
        return all(batch.has_ended for batch in await self.replicas[0].batches.newest())

    async def _check_batch(self, name: str) -> None:
        found = [await replica.batches.results(name) for replica in self.replicas]
        for results in found:
            self._check_results(name, results)
        lines = [msgspec.json.decode(line) for line in found[0].splitlines()]
        head = (await self.replicas[0].batches.find(name)).head
        if len({line["custom_id"] for line in lines}) != len(lines) or len(lines) != head.total:
            raise Violation(f"batch {name} has not one result for each request")
        if sum(head.counts.values()) != head.total or (name in self._opened and self._opened[name] != head.total):
            raise Violation(f"batch {name} has wrong counts: {head}")
        if name in self._cancelled and head.cancelled is None and head.ended is None:
            raise Violation(f"batch {name} was cancelled, and is not")


def item(text: str) -> Item:
    """Returns an item whose id in the conversation is its text: see `simulate`."""
    return Item.model_validate({"type": "message", "role": "user", "content": text})


async def ids_of(replica: Replica, known: Known) -> list[str]:
    """Returns what identifies the items of a conversation: of a response's input its text, otherwise the id."""
    await replica.conversations.find(known.name)
    found = await replica.conversations._items(known.name, "items")
    texts = [each["content"][0]["text"] if each["content"] else each["id"] for each in found]
    return [text if text.startswith(("in-", "out-")) else each["id"] for text, each in zip(texts, found, strict=True)]


def simulate(seed: int, steps: int = 25) -> World:
    """Runs a world. Raises `Violation`, or whatever a replica raises."""
    world = World(seed)
    loop = WorldLoop(world)
    try:
        loop.run_until_complete(world.run(steps))
    finally:
        world.end(loop)
        loop.close()
        world.close()
    return world


if __name__ == "__main__":
    run(__doc__, lambda seed, steps: simulate(seed, steps).operations, 25, "tenuto")
