"""The time a small tenant waits beside a greedy one: `python -m bench.tenants [MODEL]`.

The small tenant repeatedly requests three tokens: first alone, then while the greedy one has `STREAMS` streams, many
more than there are rows. The figure is the time to the first token.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx

from bench.server import bearer, server

STREAMS = 200
REQUESTS = 15
STEP_SECONDS = 0.005
CONTEXT = {"witness": 65_536}
"""Context length, by the model's name; the default is `OTHER_CONTEXT`."""
OTHER_CONTEXT = 2048
KEYS = "".join(f"[[keys]]\ntenant = '{name}'\nkey = '{name}'\n" for name in ("small", "greedy"))


def client(url: str, tenant: str) -> httpx.AsyncClient:
    """Returns a tenant's client, with an unlimited number of connections."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, headers=bearer(tenant), timeout=600, limits=limits)


async def first_token(http: httpx.AsyncClient) -> float:
    """Requests three tokens and returns the seconds until the first."""
    body = {"input_ids": [1, 2, 3], "stream": True, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    began, first = time.perf_counter(), 0.0
    async with http.stream("POST", "/generate", json=body) as response:
        async for line in response.aiter_lines():
            assert response.status_code == 200, line
            first = first or time.perf_counter() - began
    return first


async def waits(http: httpx.AsyncClient) -> list[float]:
    """Returns the seconds until the first token of each of `REQUESTS` requests, sent one after the other."""
    await first_token(http)  # a warm-up
    return [await first_token(http) for _ in range(REQUESTS)]


async def stream(http: httpx.AsyncClient, number: int, stack: AsyncExitStack, tokens: int) -> None:
    """Starts a stream that lasts as long as `stack`."""
    session = (await http.post("/v1/sessions", json={})).json()["id"]
    body = {"input": [number + 1], "max_new_tokens": tokens, "ignore_eos": True}
    await stack.enter_async_context(http.stream("POST", f"/v1/sessions/{session}/turns", json=body))


async def run(url: str, context: int) -> tuple[list[float], list[float]]:
    """Returns the small tenant's waiting times in seconds: alone, and beside the greedy tenant."""
    async with client(url, "small") as small, client(url, "greedy") as greedy:
        alone = await waits(small)
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(stream(greedy, number, stack, context - 64) for number in range(STREAMS)))
            beside = await waits(small)
    return alone, beside


def main(model: str = f"witness:{STEP_SECONDS}") -> None:
    """Prints the table."""
    context = CONTEXT.get(model.partition(":")[0], OTHER_CONTEXT)
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        with server(model, context, "--keys", str(keys), key="small") as running:
            alone, beside = asyncio.run(run(running.url, context))
    print(f"{model}: a small tenant's first token, alone and beside {STREAMS} streams of another tenant")
    print(f"{'ms':<10}{'alone':>10}{'beside':>10}{'ratio':>8}")
    for label, of in (("median", median), ("longest", max)):
        print(
            f"{label:<10}{1000 * of(alone):>10.1f}{1000 * of(beside):>10.1f}{of(beside) / of(alone):>8.1f}", flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
