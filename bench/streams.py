"""Clients that stream turn after turn while the replicas of a fleet are restarted, and what they see of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.serve.lines import lines
from tests.serve.test_killed_streams import witness_output

TRIES = 100
PAUSE_SECONDS = 0.1


class Failed(Exception):
    """An error, as a client would see it."""


@dataclass(slots=True)
class Seen:
    """The clients' observations. `refused`: connections that a replica did not accept, so that the next one was asked,
    as load balancers do. `pauses`: seconds without a token in streams that were broken and resumed. `longest`: seconds
    between two tokens of any stream."""

    turns: int = 0
    refused: int = 0
    wrong: int = 0
    longest: float = 0.0
    pauses: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Streams:
    """So many clients, each with a session and connections of its own. Each streams turns of `tokens` tokens through
    changing replicas, until `stop`. `resumes`: whoever loses a stream asks another replica for the rest, with
    `Last-Event-ID`."""

    def __init__(self, addresses: Callable[[], Sequence[str]], count: int, tokens: int, *, resumes: bool) -> None:
        self.seen = Seen()
        self.live = 0  # streams that have begun and go on
        self._begun: set[httpx.AsyncClient] = set()  # those of clients that have streamed
        self._addresses = addresses
        self._resumes = resumes
        self._body = {
            "max_new_tokens": tokens,
            "ignore_eos": True,
            **({"on_disconnect": "continue"} if resumes else {}),
        }
        self._stopped = False
        self._clients = [asyncio.ensure_future(self._client(number)) for number in range(count)]

    async def all_begun(self) -> None:
        """Waits until all clients have streamed. From then on they do so all the time, but for the moments between two
        turns; so they may never all stream at one instant."""
        while len(self._begun) < len(self._clients):
            await asyncio.sleep(PAUSE_SECONDS)
        print(f"{self.live} of {len(self._clients)} streams are live", flush=True)

    async def stop(self) -> Seen:
        """Lets the clients end once their turns have. Returns what they have seen."""
        self._stopped = True
        await asyncio.gather(*self._clients)
        return self.seen

    async def _client(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=600, verify=False) as http:  # noqa: S501 - there is no TLS
            await self._turns(number, http)

    async def _turns(self, number: int, http: httpx.AsyncClient) -> None:
        sessions, turns = 0, 0
        session, history = "", list[int]()
        while not self._stopped:
            turns += 1
            try:
                if not session:
                    sessions += 1
                    session, history = f"s{number}-{sessions}", []
                    async with self._ask(http, number + turns, "POST", "/v1/sessions", {"id": session}):
                        pass
                history += [number, turns]
                history += await self._turn(http, number + turns, session, history)
                self.seen.turns += 1
            except (Failed, httpx.HTTPError) as error:
                self.seen.errors.append(f"{session}: {type(error).__name__} {error}")
                session = ""

    async def _turn(self, http: httpx.AsyncClient, first: int, session: str, history: list[int]) -> list[int]:
        """Streams a turn with the last two tokens of `history` as its input. Returns its output."""
        turn = _Turn()
        body = {**self._body, "input": history[-2:]}
        begin = "POST", f"/v1/sessions/{session}/turns", body, {"idempotency-key": f"{session}-{len(history)}"}
        asked: tuple[Any, ...] = begin
        for number in range(TRIES):
            try:
                await self._read(http, first + number, turn, asked)
                break
            except httpx.HTTPError:
                if not self._resumes or number == TRIES - 1:
                    raise
                turn.broken = turn.broken or time.perf_counter()
                if turn.name:
                    path = f"/v1/sessions/{session}/turns/{turn.name}/events"
                    asked = "GET", path, None, {"last-event-id": str(turn.last)}
                await asyncio.sleep(PAUSE_SECONDS)
        wanted = witness_output(history, len(turn.output))
        self.seen.wrong += turn.output != wanted or len(turn.output) != self._body["max_new_tokens"]
        return turn.output

    async def _read(self, http: httpx.AsyncClient, number: int, turn: _Turn, asked: tuple[Any, ...]) -> None:
        name = ""
        async with self._ask(http, number, *asked) as answer:
            self.live += 1
            self._begun.add(http)
            try:
                async for line in lines(answer):
                    kind, _, value = line.partition(": ")
                    if kind == "event":
                        name = value
                    elif kind == "id":
                        turn.last = int(value)
                    elif kind == "data":
                        self._heard(turn, name, json.loads(value))
            finally:
                self.live -= 1
        if name != "committed":
            raise httpx.RemoteProtocolError(f"the stream ended with {name!r}")

    def _heard(self, turn: _Turn, name: str, data: dict[str, Any]) -> None:
        if name == "started":
            turn.name = data["turn_id"]
        elif name == "delta":
            now = time.perf_counter()
            if turn.broken is not None:
                self.seen.pauses.append(now - (turn.heard or turn.broken))
                turn.broken = None
            elif turn.heard:
                self.seen.longest = max(self.seen.longest, now - turn.heard)
            turn.heard = now
            turn.output += data["tokens"]
        elif name in ("error", "aborted"):
            raise Failed(json.dumps(data))

    @asynccontextmanager
    async def _ask(
        self,
        http: httpx.AsyncClient,
        number: int,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Sends a request to the first of the replicas, from one on, that accepts the connection."""
        for tried in range(TRIES):
            addresses = self._addresses()
            request = http.build_request(
                method, addresses[(number + tried) % len(addresses)] + path, json=body, headers=headers
            )
            try:
                answer = await http.send(request, stream=True)
                break
            except httpx.ConnectError:
                self.seen.refused += 1
                await asyncio.sleep(PAUSE_SECONDS if tried else 0)
        else:
            raise Failed("no replica can be reached")
        try:
            if not answer.is_success:
                raise Failed(f"{path}: {answer.status_code} {(await answer.aread()).decode()}")
            yield answer
        finally:
            await answer.aclose()


@dataclass(slots=True)
class _Turn:
    """The output of a turn so far. `broken`: when its stream broke, until it goes on."""

    name: str = ""
    last: int = 0
    output: list[int] = field(default_factory=list)
    heard: float = 0.0
    broken: float | None = None


def show(seen: Seen, count: int) -> None:
    """Prints it."""
    print(
        f"{count} clients, {seen.turns} turns: {len(seen.errors)} errors, {seen.wrong} turns with wrong tokens "
        f"(goal: 0); {seen.refused} connections were refused, and made elsewhere"
    )
    if seen.pauses:
        pauses = sorted(seen.pauses)
        print(
            f"{len(pauses)} streams were broken and resumed: without a token for {pauses[len(pauses) // 2]:.2f} s "
            f"in the median, {pauses[-1]:.2f} s at most"
        )
    print(f"longest time between two tokens of a stream that was not broken: {seen.longest:.2f} s", flush=True)
    for error in seen.errors[:5]:
        print(error)
