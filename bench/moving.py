"""What moves of sessions cost in a fleet: `python -m bench.moving [--only gap|restart] [--model NAME]`.

`gap`: two replicas of the model share a PostgreSQL server that does not flush its files. A turn streams from a session
of `--tokens` tokens, and the session moves to the other replica and back, `--moves` times in all. The client stays
connected to the first replica. The figures are the time between two tokens while nothing moves, the longest time
between two tokens from the request for each move until it is answered, and the time that the whole move takes.

`restart`: three replicas of the witness, at which clients stream `--streams` turns through all of them. Each replica is
asked to end in turn, and started again once it has. The figures are the streams that ended with an error, and those
whose tokens were not the witness's. The replica on which a stream was opened goes on to pass it on until it ends.

Clients, replicas and PostgreSQL share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import httpx

from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.test_killed_streams import witness_output

QUIET = 25
"""Tokens between two moves."""
RESTART_STEP = 0.02
RESTART_TOKENS = 500


async def deltas(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[tuple[float, list[int]]]:
    """Starts a turn, and yields when each delta has come, and its tokens. Raises `RuntimeError` if it fails."""
    async with http.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url}: {answer.status_code} {await answer.aread()!r}")
        name = ""
        async for line in answer.aiter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data" and name == "delta":
                yield time.perf_counter(), json.loads(value)["tokens"]
            elif kind == "data" and name in ("error", "aborted"):
                raise RuntimeError(value)
        if name != "committed":
            raise RuntimeError(f"the stream ended with {name!r}")


async def gap(fleet: Replicas, tokens: int, moves: int) -> None:
    """Measures the times between tokens."""
    urls = [server.url for server in fleet.servers]
    async with httpx.AsyncClient(timeout=600) as http:
        (await http.post(f"{urls[0]}/v1/sessions", json={"id": "s"})).raise_for_status()
        given = [10 + number % 1000 for number in range(tokens)]
        fill = await http.post(f"{urls[0]}/v1/sessions/s/append", json={"input": given})
        fill.raise_for_status()
        await (await http.post(f"{urls[0]}/fleet/move", json={"session": "s", "to": urls[1]})).aread()  # hashes weights
        await (await http.post(f"{urls[0]}/fleet/move", json={"session": "s", "to": urls[0]})).aread()
        body = {"input": [5], "max_new_tokens": QUIET * (2 * moves + 4), "ignore_eos": True, "temperature": 0}
        times: list[float] = []
        spans: list[tuple[float, float]] = []
        moving: asyncio.Task[None] | None = None

        async def move(to: str) -> None:
            began = time.perf_counter()
            (await http.post(f"{urls[0]}/fleet/move", json={"session": "s", "to": to})).raise_for_status()
            spans.append((began, time.perf_counter()))

        async for at, _ in deltas(http, f"{urls[0]}/v1/sessions/s/turns", body):
            times.append(at)
            due = len(times) // (2 * QUIET)
            if (moving is None or moving.done()) and len(spans) < min(due, moves):
                if moving is not None:
                    await moving
                moving = asyncio.ensure_future(move(urls[(len(spans) + 1) % 2]))
        if moving is not None:
            await moving
    _show_gaps(times, spans)


def _show_gaps(times: Sequence[float], spans: Sequence[tuple[float, float]]) -> None:
    pairs = list(pairwise(times))
    quiet = [
        late - early for early, late in pairs if not any(early < end + 0.1 and late > begin for begin, end in spans)
    ]
    step = statistics.median(quiet)
    print(f"between two tokens: median {1000 * step:.1f} ms, longest {1000 * max(quiet):.1f} ms, while nothing moves")
    longest = []
    for begin, end in spans:
        during = [late - early for early, late in pairs if early < end + 0.05 and late > begin]
        longest.append(max(during))
    shown = ", ".join(f"{1000 * each:.1f}" for each in longest)
    took = statistics.median(end - begin for begin, end in spans)
    print(f"longest in each move: {shown} ms; a move takes {1000 * took:.0f} ms")
    added = 1000 * (statistics.median(longest) - step)
    print(f"added by a move: {added:.1f} ms in the median (goal: 20)", flush=True)


async def restart(fleet: Replicas, streams: int) -> None:
    """Restarts all replicas while clients stream."""
    urls = [server.url for server in fleet.servers]
    limits = httpx.Limits(max_connections=2 * streams)
    failed: list[str] = []
    wrong = 0
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:

        async def one(number: int) -> None:
            nonlocal wrong
            name = f"s{number}"
            (await http.post(f"{urls[number % 3]}/v1/sessions", json={"id": name})).raise_for_status()
            body = {"input": [number, 1], "max_new_tokens": RESTART_TOKENS, "ignore_eos": True}
            output: list[int] = []
            try:
                through = urls[(number // 3) % 3]
                async for _, tokens in deltas(http, f"{through}/v1/sessions/{name}/turns", body):
                    output += tokens
            except (RuntimeError, httpx.HTTPError) as error:
                failed.append(f"{name}: {type(error).__name__} {error}")
            wrong += output != witness_output([number, 1], len(output))

        streaming = [asyncio.ensure_future(one(number)) for number in range(streams)]
        await asyncio.sleep(3)
        began = time.perf_counter()
        for number, server in enumerate(fleet.servers):
            server.process.terminate()
            await asyncio.to_thread(server.process.wait, 300)
            print(f"replica {number + 1} has ended after {time.perf_counter() - began:.1f} s", flush=True)
            await asyncio.to_thread(fleet.restart, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(300):
                await asyncio.gather(*streaming)
    print(f"{streams} streams: {len(failed)} ended with an error, {wrong} have wrong tokens (goal: 0)")
    for each in failed[:5]:
        print(each)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("gap", "restart"))
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=7600)
    parser.add_argument("--moves", type=int, default=8)
    parser.add_argument("--streams", type=int, default=200)
    given = parser.parse_args()
    if given.only != "restart":
        model = ("--model", given.model) if given.model else ()
        with replicas(database(), 2, *model, "--context-length", "8192") as fleet:
            asyncio.run(gap(fleet, given.tokens, given.moves))
    if given.only != "gap":
        options = ("--model", f"witness:{RESTART_STEP}", "--context-length", "8192", "--drain-seconds", "300")
        with replicas(database(), 3, *options) as fleet:
            asyncio.run(restart(fleet, given.streams))


if __name__ == "__main__":
    main()
