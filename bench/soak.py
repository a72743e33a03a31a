"""Whether a server's memory grows: `python -m bench.soak [TURNS]`.

Sessions are opened, take a few turns and are closed, `WORKERS` at once; some streams are killed in their midst. Memory
is that of both processes, and must be flat after the first rows. In the end every unit has to be accounted for.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from random import Random

import httpx

from bench.server import Processes, resident, server

TURNS = 20_000
KILLED = 0.15
"""The share of turns whose stream is killed."""
WORKERS = 16
TURNS_OF_A_SESSION = 10
ROWS = 10
"""Rows of the table."""
MAX_SECONDS = 1800


@dataclass(slots=True)
class Counts:
    """What has been done so far."""

    wanted: int
    turns: int = 0
    killed: int = 0


async def turn(http: httpx.AsyncClient, session: str, rng: Random, counts: Counts) -> None:
    """A turn that ends, or one whose stream is killed after its first event."""
    counts.turns += 1
    killed = rng.random() < KILLED
    body = {
        "input": [rng.randrange(1000) for _ in range(rng.randint(1, 32))],
        "max_new_tokens": 2000 if killed else 4,
        "ignore_eos": True,
        "if_busy": "queue",  # behind the one before, if that was killed and has not ended
    }
    async with http.stream("POST", f"/v1/sessions/{session}/turns", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for _ in response.aiter_raw():
            if killed:
                counts.killed += 1
                return


async def work(http: httpx.AsyncClient, number: int, counts: Counts) -> None:
    """Sessions, one after the other, until enough has been done."""
    rng = Random(number)
    while counts.turns < counts.wanted:
        session = (await http.post("/v1/sessions", json={})).json()["id"]
        for _ in range(TURNS_OF_A_SESSION):
            if counts.turns < counts.wanted:
                await turn(http, session, rng, counts)
        await http.delete(f"/v1/sessions/{session}")


async def run(running: Processes, wanted: int) -> None:
    """Print a row for every part of the turns, and what the audit says."""
    counts, began = Counts(wanted), time.perf_counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=running.url, timeout=60, limits=limits) as http:
        async with asyncio.timeout(MAX_SECONDS):
            workers = [asyncio.ensure_future(work(http, number, counts)) for number in range(WORKERS)]
            for row in range(ROWS + 1):
                while counts.turns < wanted * row // ROWS and not all(worker.done() for worker in workers):
                    await asyncio.sleep(0.05)
                edge, engine = resident(running.edge), resident(running.engine)
                seconds = time.perf_counter() - began
                print(f"{counts.turns:>8}{counts.killed:>8}{seconds:>9.0f}{edge:>10.1f}{engine:>12.1f}", flush=True)
            await asyncio.gather(*workers)
        audit = await http.get("/audit")
    print(f"audit: {audit.status_code} {audit.text[:200]}")


def main(turns: str = str(TURNS)) -> None:
    """Print the table."""
    print(f"{'turns':>8}{'killed':>8}{'seconds':>9}{'edge, MB':>10}{'engine, MB':>12}")
    with server("witness", 8192) as running:
        asyncio.run(run(running, int(turns)))


if __name__ == "__main__":
    main(*sys.argv[1:2])
