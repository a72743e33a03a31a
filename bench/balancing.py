"""Throughput once replicas have spread their load: `python -m bench.balancing [--pairs N] [--streams N] [--seconds N]`.

Two replicas of the witness share a PostgreSQL server that does not flush its files. A step takes `--step` seconds for
all of its rows, of which a replica has half as many as there are streams. In each pair of windows the same number of
streams runs twice: with half of them opened at either replica, and with all of them opened at one. The second window
begins when `GET /fleet` shows that rebalancing has made the turns even. Windows come in the order 2:2, 4:0, 4:0, 2:2,
so what the machine does meanwhile counts for both alike. The figure is tokens a second that reach the clients, and its
ratio the median of the pairs, with an interval for the median in brackets. Beside it is what the second placement gave
until the turns were even, and how long that took.

Clients stay connected to the replica at which they began, which passes on what the other one streams. Clients, replicas
and PostgreSQL share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import httpx

from bench.moving import deltas
from bench.spread import Spread
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.test_killed_streams import witness_output

CONTEXT = 65536
SETTLED = 3
"""How many looks at the fleet in a row must find its turns even."""
NAMES = count()


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens a second until the turns were even, which took `waited` seconds, and from then on."""

    before: float
    waited: float
    rate: float


class Streams:
    """Clients that stream turns without end."""

    def __init__(self, http: httpx.AsyncClient, urls: Sequence[str]) -> None:
        """`urls`: the replica of each client."""
        self._http = http
        self._urls = urls
        self._names = [f"s{next(NAMES)}" for _ in urls]
        self.outputs: list[list[int]] = [[] for _ in urls]

    @property
    def tokens(self) -> int:
        """The number of tokens that have come."""
        return sum(map(len, self.outputs))

    async def _one(self, number: int) -> None:
        name, url = self._names[number], self._urls[number]
        (await self._http.post(f"{url}/v1/sessions", json={"id": name})).raise_for_status()
        body = {"input": [number, 5], "max_new_tokens": CONTEXT - 100, "ignore_eos": True}
        async for _, tokens in deltas(self._http, f"{url}/v1/sessions/{name}/turns", body):
            self.outputs[number] += tokens

    async def run(self, fleet: Replicas, seconds: float) -> Window:
        """Starts all streams, waits until they are even, and counts for so many seconds. Raises `RuntimeError` if a
        stream fails or has wrong tokens."""
        streaming = [asyncio.ensure_future(self._one(number)) for number in range(len(self._urls))]
        try:
            began = time.perf_counter()
            await self._wait_until_even(fleet, streaming)
            waited, before = time.perf_counter() - began, self.tokens
            await asyncio.sleep(seconds)
            rate = (self.tokens - before) / (time.perf_counter() - began - waited)
        finally:
            for name in self._names:
                await self._http.post(f"{self._urls[0]}/v1/sessions/{name}/abort", json={"keep": "none"})
                await self._http.delete(f"{self._urls[0]}/v1/sessions/{name}")
            for each in streaming:
                each.cancel()
                with suppress(asyncio.CancelledError, RuntimeError):  # it was aborted
                    await each
        for number, output in enumerate(self.outputs):
            if output != witness_output([number, 5], len(output)):
                raise RuntimeError(f"stream {number} has wrong tokens")
        return Window(before / waited, waited, rate)

    async def _wait_until_even(self, fleet: Replicas, streaming: Sequence[asyncio.Future[None]]) -> None:
        even = 0
        while even < SETTLED:
            await asyncio.sleep(fleet.lease / 4)
            view = (await self._http.get(f"{fleet.servers[0].url}/fleet")).raise_for_status().json()
            turns = [each["running"] + each["waiting"] for each in view["replicas"] if each["live"]]
            moving = any(each["moves"]["under_way"] for each in view["replicas"])
            even = even + 1 if turns == [len(self._urls) // 2] * 2 and not moving else 0
            for each in streaming:
                if each.done():
                    await each
                    raise RuntimeError("a stream has ended")


async def compare(fleet: Replicas, streams: int, seconds: float, pairs: int) -> None:
    """Prints the figures."""
    one, two = (server.url for server in fleet.servers)
    half = streams // 2
    evenly, at_one = f"{half}:{half}", f"{streams}:0"
    placements = {evenly: [one, two] * half, at_one: [one] * streams}
    found: dict[str, list[Window]] = {name: [] for name in placements}
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        for pair in range(pairs):
            for name in (evenly, at_one) if pair % 2 == 0 else (at_one, evenly):
                window = await Streams(http, placements[name]).run(fleet, seconds)
                found[name].append(window)
                print(f"{name}: {window.rate:.1f} tokens/s", flush=True)
    hand, moved = (found[name] for name in placements)
    ratios = [after.rate / by_hand.rate for by_hand, after in zip(hand, moved, strict=True)]
    figures = {
        f"placed {evenly}, tokens/s": (".1f", [each.rate for each in hand]),
        f"opened {at_one}, until rebalanced, tokens/s": (".1f", [each.before for each in moved]),
        "seconds until then": (".1f", [each.waited for each in moved]),
        f"opened {at_one}, once rebalanced, tokens/s": (".1f", [each.rate for each in moved]),
        f"once rebalanced, beside {evenly} (goal: 0.98)": (".3f", ratios),
    }
    for name, (form, values) in figures.items():
        print(f"{name:<45}{Spread.of_median(values).shown(form)}")


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--step", type=float, default=0.02)
    given = parser.parse_args()
    rows = ("--max-running", str(given.streams // 2), "--context-length", str(CONTEXT))
    with replicas(database(), 2, "--model", f"witness:{given.step}", *rows, rebalance=True) as fleet:
        asyncio.run(compare(fleet, given.streams, given.seconds, given.pairs))


if __name__ == "__main__":
    main()
