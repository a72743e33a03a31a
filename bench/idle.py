"""The cost of an idle server: `python -m bench.idle [SESSIONS]`.

Measures the time from the start of the process to the first token, with kernels compiled before, and the CPU time of
both processes until then. Then `SESSIONS` sessions take a turn each, and the CPU time of both processes is measured
while all sessions rest.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import httpx

from bench.server import Processes, resident, server

SESSIONS = 1000
SETTLE_SECONDS = 3.0
SECONDS = 20.0
AT_ONCE = 32


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process so far, at the kernel's resolution of about a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def fill(url: str, sessions: int, tokens: int = 8) -> None:
    """Opens sessions and runs a turn with so many input tokens on each."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(http: httpx.AsyncClient, number: int) -> None:
        async with places:
            session = (await http.post("/v1/sessions", json={})).json()["id"]
            body = {"input": [number % 1000] * tokens, "max_new_tokens": 1, "stream": False}
            (await http.post(f"/v1/sessions/{session}/turns", json=body)).raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await asyncio.gather(*(one(http, number) for number in range(sessions)))


def first_token(url: str) -> None:
    """Runs a turn that generates one token."""
    session = httpx.post(f"{url}/v1/sessions", json={}).json()["id"]
    body = {"input": [1, 2, 3], "max_new_tokens": 1, "stream": False}
    httpx.post(f"{url}/v1/sessions/{session}/turns", json=body, timeout=60).raise_for_status()


def idle_cost(processes: Processes) -> None:
    """Measures both processes while no request comes."""
    time.sleep(SETTLE_SECONDS)
    pids = {"edge": processes.edge, "engine": processes.engine}
    before, began = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(SECONDS)
    passed = time.monotonic() - began
    for name, pid in pids.items():
        share = (cpu_seconds(pid) - before[name]) / passed
        print(f"  {name:6}  {100 * share:.2f} % of a core, {resident(pid):.0f} MB")


def main() -> None:
    """Prints the figures."""
    sessions = int(sys.argv[1]) if len(sys.argv) > 1 else SESSIONS
    began = time.monotonic()
    with server("smollm2", 2048) as processes:
        ready = time.monotonic() - began
        first_token(processes.url)
        print(f"start to first token: {time.monotonic() - began:.2f} s, of which {ready:.2f} s until it listens")
        for name, pid in (("edge", processes.edge), ("engine", processes.engine)):
            print(f"  {name:6}  {cpu_seconds(pid):.2f} s of CPU time, {resident(pid):.0f} MB")
        print("idle without sessions")
        idle_cost(processes)
        asyncio.run(fill(processes.url, sessions))
        print(f"idle with {sessions} sessions")
        idle_cost(processes)


if __name__ == "__main__":
    main()
