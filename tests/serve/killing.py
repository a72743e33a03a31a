"""`python -m tests.serve.killing --times 1000`: a server is killed at random moments under load and started again, and
what comes back is what was acknowledged. What was under way when it was killed is there whole, or not at all."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import httpx

from tests.serve.server import Server, serving
from tests.serve.test_killed_streams import VOCABULARY, witness_output

Turns = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Input and output of each turn of a session."""

WORKERS = 6
MAX_TURNS = 12
"""A session with more is closed."""


@dataclass
class Known:
    """What clients know: the turns of every session that was acknowledged, and the sessions that an operation under way
    may have changed, with what they would be then; `None`: closed."""

    sessions: dict[str, Turns] = field(default_factory=dict)
    under_way: dict[str, Turns | None] = field(default_factory=dict)
    operations: int = 0

    def begins(self, session: str, after: Turns | None) -> None:
        self.under_way[session] = after

    def acknowledged(self, session: str) -> None:
        after = self.under_way.pop(session)
        self.operations += 1
        if after is None:
            del self.sessions[session]
        else:
            self.sessions[session] = after


def tokens_of(turns: Turns) -> list[int]:
    return [token for turn in turns for part in turn for token in part]


class Worker:
    """One client after the other's answer: opens, extends, forks, rewinds and closes sessions of its own."""

    def __init__(self, http: httpx.AsyncClient, known: Known, rng: Random, name: str) -> None:
        self._http = http
        self._known = known
        self._rng = rng
        self._name = name

    async def run(self) -> None:
        while True:
            own = sorted(name for name in self._known.sessions if name.startswith(self._name))
            if not own or (len(own) < 4 and self._rng.random() < 0.1):
                await self._open()
                continue
            session = self._rng.choice(own)
            turns, dice = self._known.sessions[session], self._rng.random()
            if len(turns) >= MAX_TURNS or dice < 0.03:
                await self._do(session, None, "DELETE", f"/v1/sessions/{session}")
            elif dice < 0.1 and turns:
                kept = self._rng.randrange(len(turns))
                await self._do(session, turns[:kept], "POST", f"/v1/sessions/{session}/rewind", {"turn": kept})
            elif dice < 0.17 and len(own) < 6:
                kept, child = self._rng.randint(0, len(turns)), self._new_name()
                body = {"turn": kept, "id": child}
                await self._do(child, turns[:kept], "POST", f"/v1/sessions/{session}/fork", body)
            else:
                await self._turn(session, turns)

    def _new_name(self) -> str:
        return f"{self._name}{self._rng.getrandbits(40):x}"

    async def _open(self) -> None:
        name = self._new_name()
        await self._do(name, (), "POST", "/v1/sessions", {"id": name})

    async def _turn(self, session: str, turns: Turns) -> None:
        given = tuple(self._rng.randrange(VOCABULARY) for _ in range(self._rng.randint(1, 30)))
        wanted = self._rng.choice((0, 1, 8, 40))
        output = tuple(witness_output([*tokens_of(turns), *given], wanted))
        body = {"input": list(given), "max_new_tokens": wanted, "stream": False}
        if wanted == 0:
            await self._do(
                session, (*turns, (given, ())), "POST", f"/v1/sessions/{session}/append", {"input": list(given)}
            )
        else:
            await self._do(session, (*turns, (given, output)), "POST", f"/v1/sessions/{session}/turns", body)

    async def _do(
        self, session: str, after: Turns | None, method: str, path: str, body: dict[str, object] | None = None
    ) -> None:
        self._known.begins(session, after)
        answer = await self._http.request(method, path, json=body)
        assert answer.is_success, (method, path, answer.text)
        self._known.acknowledged(session)


async def load_until_killed(server: Server, known: Known, rng: Random, seconds: float) -> None:
    """Work for so long, then kill server and engine."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        workers = [Worker(http, known, Random(rng.random()), f"w{number}-") for number in range(WORKERS)]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        await asyncio.sleep(seconds)
        server.kill_all()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, httpx.TransportError), f"a worker ended with {outcome!r}"


def check(server: Server, known: Known) -> None:
    """Every session is what was acknowledged, or what an operation under way would have made of it."""
    with server.client() as http:
        found: dict[str, Turns] = {}
        for name in [each["id"] for each in listed(http)]:
            records = http.get(f"/v1/sessions/{name}/turns", params={"limit": 1000}).json()["data"]
            found[name] = tuple((tuple(each["input_tokens"]), tuple(each["output_tokens"])) for each in records)
    for name in found.keys() | known.sessions.keys() | known.under_way.keys():
        allowed = [known.sessions.get(name)]
        if name in known.under_way:
            allowed.append(known.under_way[name])
        assert found.get(name) in allowed, f"session {name} is {found.get(name)}; allowed: {allowed}"
    known.sessions, known.under_way = found, {}


def listed(http: httpx.Client) -> list[dict[str, str]]:
    sessions: list[dict[str, str]] = []
    after: str | None = ""
    while after is not None:
        page = http.get("/v1/sessions", params={"limit": 1000, "after": after}).json()
        sessions += page["data"]
        after = page["next"]
    return sessions


def kill_often(
    journal: Path, times: int, seed: int, model: str = "witness:0.002", say: Callable[[str], None] = lambda _: None
) -> Known:
    """Kill a server so often; what clients know in the end."""
    rng, known, began = Random(seed), Known(), time.monotonic()
    for number in range(times + 1):
        with serving("--model", model, "--journal", str(journal), "--log-level", "warning") as server:
            check(server, known)
            if number < times:
                asyncio.run(load_until_killed(server, known, rng, 0.02 + rng.random() * 0.6))
        if number % 20 == 0:
            say(f"{number} kills, {known.operations} operations acknowledged, {time.monotonic() - began:.0f} s")
    return known


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.killing", description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, suppress(KeyboardInterrupt):
        known = kill_often(Path(directory) / "journal", arguments.times, arguments.seed, say=partial(print, flush=True))
        print(f"{arguments.times} kills, {known.operations} operations acknowledged, none lost")


if __name__ == "__main__":
    main()
