"""What forwarding adds in a fleet: `python -m bench.forwarding [--blocks N] [--only one|many]`.

Three replicas of the witness share a PostgreSQL server that does not flush its files. The first one owns all sessions.
The same requests go to it and to the second one, in blocks of the owner, the other, the other, and the owner; so what
the machine does meanwhile counts for both alike, also if it grows or shrinks steadily. A session is asked for once at
the other replica before the measurement, since a replica asks the database where a session is only the first time.

With one client, the figures are the time of a GET of a session, and the time to the first event of a turn. With 64
clients, they are requests a second, and tokens a second of streamed turns on a model that takes `STEP_SECONDS` a step
for all of them. Clients, replicas and PostgreSQL share the machine. Short requests keep all of its cores busy, and so
their ratio is one of CPU time, of which a forwarded request has two edges' instead of one's. Each figure is the median
of the blocks, with an interval for the median in brackets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

import uvloop

from bench.spread import Spread
from tenuto.serve.fleet.peers import Peers
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas

STEP_SECONDS = 0.01
CLIENTS = 64
BLOCKS = 12
REQUESTS = 100
"""In a window of one client."""
REQUESTS_OF_EACH = 30
"""Of each of many clients in a window."""
TURNS_OF_EACH = 1
OUTPUT = 64


class Asking:
    """Clients of a fleet, which keep their connections as its replicas do. `sessions`: one for each client."""

    def __init__(self, owner: str, other: str, clients: int) -> None:
        self.owner = owner
        self.other = other
        self.sessions = [""] * clients
        self._peers = Peers()

    async def first_piece(self, url: str, method: str, path: str, body: object = None) -> tuple[float, bytes]:
        """Returns the seconds to the first piece of an answer, and the whole answer. Raises `RuntimeError` unless it is
        a success."""
        sent = b"" if body is None else json.dumps(body).encode()
        lines = (f"{method} {path} HTTP/1.1", f"host: {url.removeprefix('http://')}", f"content-length: {len(sent)}")
        request = "\r\n".join([*lines, "content-type: application/json", "", ""]).encode() + sent
        began = time.perf_counter()
        async with self._peers.ask(url, request) as reply:
            await reply.begun()
            pieces = [await reply.piece()]
            seconds = time.perf_counter() - began
            while pieces[-1]:
                pieces.append(await reply.piece())
        answer = b"".join(pieces)
        if reply.status >= 300:
            raise RuntimeError(f"{method} {path}: {reply.status} {answer.decode()}")
        return seconds, answer

    async def open(self) -> None:
        """Opens a new session for each client, and closes its last one."""

        async def one(client: int) -> None:
            if last := self.sessions[client]:
                await self.first_piece(self.owner, "DELETE", f"/v1/sessions/{last}")
            _, opened = await self.first_piece(self.owner, "POST", "/v1/sessions", {})
            self.sessions[client] = json.loads(opened)["id"]
            await self.get(self.other, client)

        await asyncio.gather(*(one(client) for client in range(len(self.sessions))))

    async def get(self, url: str, client: int) -> float:
        """Returns the seconds of a GET of a client's session."""
        return (await self.first_piece(url, "GET", f"/v1/sessions/{self.sessions[client]}"))[0]

    async def turn(self, url: str, client: int, output: int) -> float:
        """Streams a turn, and returns the seconds to its first event."""
        body = {"input": [client], "max_new_tokens": output, "ignore_eos": True}
        seconds, events = await self.first_piece(url, "POST", f"/v1/sessions/{self.sessions[client]}/turns", body)
        if b"event: committed" not in events:
            raise RuntimeError(f"a turn was not committed: {events[-300:].decode()}")
        return seconds


Window = Callable[[str], Awaitable[float]]
"""Measures requests to the replica at a URL."""


async def block(asking: Asking, window: Window) -> tuple[float, float]:
    """Returns the means of two windows at the owner, and of two at the other replica, on new sessions."""
    await asking.open()
    await window(asking.owner)
    await window(asking.other)
    order = (asking.owner, asking.other, asking.other, asking.owner)
    first, second, third, last = [await window(url) for url in order]
    return (first + last) / 2, (second + third) / 2


async def with_one(asking: Asking, blocks: int) -> None:
    """Measures the seconds that forwarding adds for one client."""

    async def requests(url: str) -> float:
        return statistics.median([await asking.get(url, 0) for _ in range(REQUESTS)])

    async def turns(url: str) -> float:
        return statistics.median([await asking.turn(url, 0, 1) for _ in range(REQUESTS)])

    for name, window in (("GET of a session", requests), ("first event of a turn", turns)):
        pairs = [await block(asking, window) for _ in range(blocks)]
        owner, other = (Spread.of_median(each).scaled(1000) for each in zip(*pairs, strict=True))
        added = Spread.of_median([late - early for early, late in pairs]).scaled(1000)
        print(f"{name:<24}{owner.shown('.2f')} ms at the owner, {other.shown('.2f')} elsewhere")
        print(f"{'':<24}{added.shown('.2f')} ms added (goal: 1)", flush=True)


async def with_many(asking: Asking, blocks: int) -> None:
    """Measures the part of the owner's throughput that many clients get elsewhere."""

    async def all_of(each: Callable[[int], Awaitable[object]], units: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(each(client) for client in range(CLIENTS)))
        return CLIENTS * units / (time.perf_counter() - began)

    async def requests(url: str) -> float:
        async def one(client: int) -> None:
            for _ in range(REQUESTS_OF_EACH):
                await asking.get(url, client)

        return await all_of(one, REQUESTS_OF_EACH)

    async def turns(url: str) -> float:
        async def one(client: int) -> None:
            for _ in range(TURNS_OF_EACH):
                await asking.turn(url, client, OUTPUT)

        return await all_of(one, TURNS_OF_EACH * OUTPUT)

    for name, window in (("tokens a second", turns), ("GETs a second", requests)):
        pairs = [await block(asking, window) for _ in range(blocks)]
        owner, other = (Spread.of_median(each) for each in zip(*pairs, strict=True))
        kept = Spread.of_median([late / early for early, late in pairs])
        print(f"{name:<24}{owner.shown('.0f')} at the owner, {other.shown('.0f')} elsewhere")
        print(f"{'':<24}{kept.shown('.3f')} times the owner's (goal for tokens: 0.95)", flush=True)


def asked(fleet: Replicas, clients: int) -> Asking:
    """Returns clients of a fleet's first two replicas."""
    owner, other, _ = fleet.servers
    return Asking(owner.url, other.url, clients)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--only", choices=("one", "many"))
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if given.only != "many":
            with replicas(database(), 3, "--model", "witness", "--context-length", "8192") as fleet:
                print("one client")
                runner.run(with_one(asked(fleet, 1), given.blocks))
        if given.only != "one":
            model = f"witness:{STEP_SECONDS}"
            with replicas(database(), 3, "--model", model, "--context-length", "8192") as fleet:
                print(f"{CLIENTS} clients; turns of {OUTPUT} tokens, {1000 * STEP_SECONDS:g} ms a step")
                runner.run(with_many(asked(fleet, CLIENTS), given.blocks))


if __name__ == "__main__":
    main()
