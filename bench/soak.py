"""A server's memory over many turns: `python -m bench.soak [TURNS]`.

`WORKERS` clients open sessions, take a few turns and close them; some streams are killed midway. The memory of both
processes must be flat after the first rows. At the end, the audit must account for every unit.
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
"""Fraction of turns whose stream is killed."""
WORKERS = 16
TURNS_OF_A_SESSION = 10
ROWS = 10
"""Rows of the table."""
MAX_SECONDS = 1800


@dataclass(slots=True)
class Counts:
    """Turns and killed streams so far."""

    wanted: int
    turns: int = 0
    killed: int = 0


async def turn(http: httpx.AsyncClient, session: str, rng: Random, counts: Counts) -> None:
    """Runs a turn to its end, or kills its stream after the first event."""
    counts.turns += 1
    killed = rng.random() < KILLED
    body = {
        "input": [rng.randrange(1000) for _ in range(rng.randint(1, 32))],
        "max_new_tokens": 2000 if killed else 4,
        "ignore_eos": True,
        "if_busy": "queue",  # a killed turn before it may not have ended yet
    }
    async with http.stream("POST", f"/v1/sessions/{session}/turns", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for _ in response.aiter_raw():
            if killed:
                counts.killed += 1
                return


async def work(http: httpx.AsyncClient, number: int, counts: Counts) -> None:
    """Runs sessions, one after the other, until the wanted number of turns is reached."""
    rng = Random(number)
    while counts.turns < counts.wanted:
        session = (await http.post("/v1/sessions", json={})).json()["id"]
        for _ in range(TURNS_OF_A_SESSION):
            if counts.turns < counts.wanted:
                await turn(http, session, rng, counts)
        await http.delete(f"/v1/sessions/{session}")


async def run(running: Processes, wanted: int) -> None:
    """Prints `ROWS` rows at equal numbers of turns, then the audit."""
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
    """Prints the table."""
    print(f"{'turns':>8}{'killed':>8}{'seconds':>9}{'edge, MB':>10}{'engine, MB':>12}")
    with server("witness", 8192) as running:
        asyncio.run(run(running, int(turns)))


if __name__ == "__main__":
    main(*sys.argv[1:2])
