"""`python -m tests.serve.killing_fleets --times 1000`: kills, pauses and cuts off the replicas of a fleet under load.

Three replicas of the witness serve clients, each of which goes through all replicas. Sessions move from one to another
all the time, also during their turns. Again and again one replica is killed and started again, or its processes, or
only its engine, sleep for longer than a lease. Where this process may make network namespaces, a replica is also cut
off from the database, from clients and other replicas, or from all of them. Clients repeat unanswered requests with
their idempotency keys, and resume broken streams at any replica. In the end every session has exactly the turns that
were acknowledged to its client, and every token is the witness's. In the database no two replicas have committed to a
session in the same epoch, and no commit has an earlier epoch than the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import msgspec
import psycopg

from tests.postgres import database
from tests.present import present
from tests.serve.lines import lines
from tests.serve.networks import Link, networks, possible
from tests.serve.replicas import Replicas, replicas
from tests.serve.test_killed_streams import VOCABULARY, witness_output

WITNESS = ("--model", "witness:0.002", "--context-length", "8192")
WORKERS = 6
PATIENCE_SECONDS = 60.0
MAX_TURNS = 12
KINDS = ("kill", "pause", "pause the engine")
CUTS: dict[str, tuple[Link, ...]] = {
    "cut off": ("network", "database"),
    "cut off from the database": ("database",),
    "cut off from replicas and clients": ("network",),
}


@dataclass
class Session:
    """A session, as its client has seen it. `outputs`: of each turn, with its input."""

    name: str
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for turn in self.turns for part in turn for token in part]


@dataclass
class Figures:
    """What has happened. `gaps`: seconds from a break of a stream to its next token."""

    turns: int = 0
    retries: int = 0
    resumed: int = 0
    events: Counter[str] = field(default_factory=Counter)
    moves: Counter[int] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)


class Down(Exception):
    """A replica has not answered as one that is up would."""


def difference(output: list[int], right: list[int]) -> str:
    """Says where two outputs differ first, with the tokens around that."""
    pairs = zip(output, right, strict=False)
    first = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(output), len(right)))
    around = slice(max(0, first - 4), first + 8)
    return (
        f"they differ at token {first}; from token {around.start} on there are {output[around]}, not {right[around]}; "
        f"there are {len(output)} tokens, not {len(right)}"
    )


class Client:
    """A client that asks any replica which seems to be up about its own sessions."""

    def __init__(
        self, fleet: Replicas, urls: Callable[[], list[str]], figures: Figures, rng: Random, name: str
    ) -> None:
        self._urls = urls
        self._figures = figures
        self._rng = rng
        self._name = name
        self._http = fleet.client(httpx.Timeout(2 * fleet.lease + 4, connect=1))
        self.sessions: list[Session] = []
        self.done = False
        self._retried = False  # whether the last request was sent more than once

    async def run(self) -> None:
        async with self._http:
            while not self.done:
                open_ones = [session for session in self.sessions if len(session.turns) < MAX_TURNS]
                if len(open_ones) < 3:
                    open_ones.append(await self._open())
                session = self._rng.choice(open_ones)
                await (self._streamed(session) if self._rng.random() < 0.5 else self._whole(session))
                self._figures.turns += 1

    async def _open(self) -> Session:
        session = Session(f"{self._name}-{len(self.sessions)}")
        answer = await self._ask("POST", "/v1/sessions", {"id": session.name}, {}, (201, 409))
        if answer.status_code == 409:
            assert self._retried, f"{session.name} was open already: {answer.text}"
            await self._ask("GET", f"/v1/sessions/{session.name}", None, {})  # it is, wherever one asks
        self.sessions.append(session)
        return session

    def _input(self) -> tuple[list[int], int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randint(1, 20))], self._rng.choice(
            (1, 30, 400)
        )

    async def _whole(self, session: Session) -> None:
        given, wanted = self._input()
        body = {"input": given, "max_new_tokens": wanted, "ignore_eos": True, "stream": False}
        headers = {"idempotency-key": f"{self._rng.getrandbits(60):x}"}
        answer = await self._ask("POST", f"/v1/sessions/{session.name}/turns", body, headers)
        told = answer.json()
        assert told["committed"], told
        self._learn(session, given, told["tokens"], wanted, told["version"], told["id"])

    def _learn(
        self, session: Session, given: list[int], output: list[int], wanted: int, version: int, turn: str
    ) -> None:
        right = witness_output([*session.tokens, *given], wanted)
        assert output == right, f"wrong tokens in {session.name}, turn {turn}: {difference(output, right)}"
        session.turns.append((given, output))
        assert version == len(session.turns), f"{session.name} has version {version}, not {len(session.turns)}"

    async def _ask(
        self, method: str, path: str, body: Any, headers: dict[str, str], allowed: tuple[int, ...] = (200,)
    ) -> httpx.Response:
        """Repeats a request until a replica answers it."""
        self._retried = False
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                url = self._rng.choice(self._urls())
                answer = await self._http.request(method, url + path, json=body, headers=headers)
                if answer.status_code != 503:
                    assert answer.status_code in allowed, (method, path, answer.status_code, answer.text)
                    return answer
            except (httpx.TransportError, IndexError):
                pass
            self._figures.retries += 1
            self._retried = True
            assert time.monotonic() < deadline, f"no answer to {method} {path}"
            await asyncio.sleep(0.1)

    async def _streamed(self, session: Session) -> None:
        given, wanted = self._input()
        body = {"input": given, "max_new_tokens": wanted, "ignore_eos": True, "on_disconnect": "continue"}
        stream = _Stream(f"/v1/sessions/{session.name}/turns", body, f"{self._rng.getrandbits(60):x}", self._figures)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not stream.version:
            try:
                await stream.read(self._http, self._rng.choice(self._urls()))
            except (httpx.TransportError, IndexError, Down):
                stream.broke = stream.broke or time.monotonic()
                self._figures.retries += 1
                await asyncio.sleep(0.1)
            assert time.monotonic() < deadline, f"a turn of {session.name} does not end"
        self._learn(session, given, stream.output, wanted, stream.version, stream.turn)


class _Stream:
    """A turn whose events are read, after every break from where it ended. `version`: of the session, once the turn is
    committed. `broke`: when the stream broke, until its next tokens."""

    def __init__(self, path: str, body: dict[str, Any], key: str, figures: Figures) -> None:
        self._path = path
        self._body = body
        self._key = key
        self._figures = figures
        self.turn = self._last = ""
        self.output: list[int] = []
        self.version = 0
        self.broke = 0.0

    async def read(self, http: httpx.AsyncClient, url: str) -> None:
        """Reads events from a replica until the turn ends. Raises `Down`, and httpx's errors."""
        if self.turn:
            more = {"last-event-id": self._last} if self._last else {}
            asked = http.stream("GET", f"{url}{self._path}/{self.turn}/events", headers=more)
        else:
            key = {"idempotency-key": self._key}
            asked = http.stream("POST", url + self._path, json=self._body, headers=key)
        async with asked as answer:
            if answer.status_code == 503:
                raise Down
            assert answer.status_code == 200, (await answer.aread(), self.turn, self._last)
            self.turn = self.turn or answer.headers["x-turn-id"]
            name = number = ""
            async for line in lines(answer):
                kind, _, value = line.partition(": ")
                name, number = (value if kind == "event" else name), (value if kind == "id" else number)
                if kind == "data":
                    self._take(name, number, msgspec.json.decode(value))

    def _take(self, name: str, number: str, told: dict[str, Any]) -> None:
        if name == "error":
            raise Down
        assert name != "aborted", told
        if name == "committed":
            self.version = told["version"]
        elif name == "delta":
            self.output += told["tokens"]
            self._last = number
            if self.broke:
                self._figures.gaps.append(time.monotonic() - self.broke)
                self._figures.resumed += 1
            self.broke = 0.0


class Disturber:
    """Kills, pauses and cuts off one replica after another. `up`: the numbers of those that clients can use."""

    def __init__(self, fleet: Replicas, rng: Random, figures: Figures) -> None:
        self._fleet = fleet
        self._rng = rng
        self._figures = figures
        self.up = set(range(len(fleet.servers)))

    def urls(self) -> list[str]:
        """Returns the addresses of those that are up, and at times of another one, as a load balancer would."""
        late = self._rng.random() < 0.05
        return [server.url for number, server in enumerate(self._fleet.servers) if late or number in self.up]

    async def disturb(self, kind: str) -> None:
        await asyncio.sleep(self._rng.random())
        number = self._rng.choice(sorted(self.up))
        self._figures.events[kind] += 1
        if kind == "kill":
            await asyncio.to_thread(self._fleet.servers[number].kill_all)
            self.up.discard(number)
            await asyncio.sleep(self._rng.random() * 2 * self._fleet.lease)
            await asyncio.to_thread(self._fleet.restart, number)
        elif kind == "pause":
            self._fleet.signal(number, signal.SIGSTOP)
            self.up.discard(number)
            await asyncio.sleep(self._fleet.lease * (0.5 + 1.5 * self._rng.random()))
            self._fleet.signal(number, signal.SIGCONT)
        elif (links := CUTS.get(kind)) is not None:
            cables = present(self._fleet.networks)
            cables.cut(number, *links)
            if "network" in links:
                self.up.discard(number)
            await asyncio.sleep(self._fleet.lease * (0.5 + 1.5 * self._rng.random()))
            cables.mend(number, *links)
        else:
            engine = await asyncio.to_thread(lambda: self._fleet.servers[number].engine_pid)
            os.kill(engine, signal.SIGSTOP)
            self.up.discard(number)
            await asyncio.sleep(self._fleet.lease * (0.5 + 1.5 * self._rng.random()))
            os.kill(engine, signal.SIGCONT)
        self.up.add(number)


async def move_on(fleet: Replicas, disturber: Disturber, clients: list[Client], rng: Random, figures: Figures) -> None:
    """Moves one session after another to some replica, until it is cancelled. Counts the answers by their status, with
    0 for a missing one."""
    async with fleet.client(4 * fleet.lease) as http:
        while True:
            await asyncio.sleep(rng.random() * 0.2)
            sessions = [session for client in clients for session in client.sessions[-3:]]
            urls = disturber.urls()
            if not sessions or not urls:
                continue
            body = {"session": rng.choice(sessions).name, "to": rng.choice(urls)}
            try:
                answer = await http.post(f"{rng.choice(urls)}/fleet/move", json=body)
            except httpx.TransportError:
                figures.moves[0] += 1
                continue
            assert answer.status_code in (200, 400, 404, 409, 421, 503, 507), answer.text
            figures.moves[answer.status_code] += 1


def check_database(url: str) -> None:
    """Checks that the turns of each session were committed in ascending epochs, and in each epoch by one replica."""
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT name, records.epoch, records.owner FROM records JOIN sessions ON id = session "
            "ORDER BY name, records.number"
        ).fetchall()
    owners: dict[int, tuple[str, int]] = {}
    last: dict[str, int] = {}
    unowned = [row for row in rows if None in row]
    assert rows, "no turns"
    assert not unowned, f"turns without an owner: {unowned}"
    for name, epoch, owner in rows:
        assert owners.setdefault(epoch, (name, owner)) == (name, owner), f"{name} had two owners in epoch {epoch}"
        assert epoch >= last.get(name, 0), f"{name} was changed in epoch {epoch} after {last[name]}"
        last[name] = epoch


async def check_sessions(fleet: Replicas, client: Client, url: str) -> None:
    """Checks that each session has the turns that its client expects, at whichever replica."""
    async with fleet.client(60) as http:
        for session in client.sessions:
            answer = await http.get(f"{url}/v1/sessions/{session.name}/turns", params={"limit": 1000})
            found = [(each["input_tokens"], each["output_tokens"]) for each in answer.json()["data"]]
            assert found == session.turns, f"{session.name} has {len(found)} turns, not {len(session.turns)}"


async def _disturbed(fleet: Replicas, times: int, seed: int, kinds: tuple[str, ...]) -> Figures:
    rng, figures = Random(seed), Figures()
    disturber = Disturber(fleet, rng, figures)
    clients = [Client(fleet, disturber.urls, figures, Random(rng.random()), f"c{seed}-{n}") for n in range(WORKERS)]
    running = [asyncio.create_task(client.run()) for client in clients]
    moving = asyncio.create_task(move_on(fleet, disturber, clients, Random(rng.random()), figures))
    for number in range(times):
        await disturber.disturb(kinds[number % len(kinds)])
        for task in (*running, moving):
            if task.done():
                await task
    moving.cancel()
    for client in clients:
        client.done = True
    await asyncio.gather(*running)
    for number, client in enumerate(clients):
        await check_sessions(fleet, client, fleet.servers[number % len(fleet.servers)].url)
    for server in fleet.servers:
        await asyncio.to_thread(server.audit)
    return figures


def disturb(fleet: Replicas, times: int, seed: int, kinds: tuple[str, ...] = KINDS) -> Figures:
    """Disturbs a fleet so often, and checks everything."""
    try:
        figures = asyncio.run(_disturbed(fleet, times, seed, kinds))
    except BaseException:
        for server in fleet.servers:
            told = (line for line in server.lines if '"level": "error"' in line or "taken over" in line)
            print("".join(told)[-4000:])
        raise
    check_database(fleet.url)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    with ExitStack() as made:
        url = database()
        cut = made.enter_context(networks(3, url)) if possible() else None
        fleet = made.enter_context(replicas(url, 3, *WITNESS, networks=cut))
        figures = disturb(fleet, given.times, given.seed, (*KINDS, *CUTS) if cut is not None else KINDS)
    gaps = sorted(figures.gaps)
    print(f"{dict(figures.events)} in {time.monotonic() - began:.0f} s: {figures.turns} turns, all as acknowledged")
    print(f"moves, by the status of their answers: {dict(figures.moves)}")
    print(f"{figures.retries} requests repeated; {figures.resumed} streams went on elsewhere")
    if gaps:
        print(f"seconds to the next token: median {gaps[len(gaps) // 2]:.2f}, longest {gaps[-1]:.2f}")


if __name__ == "__main__":
    main()
