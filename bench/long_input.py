"""The effect of long input on other clients: `python -m bench.long_input [MODEL [CONTEXT]]`.

A server runs as a separate process. While 16 turns stream, a long chat message is sent. The figure is the longest gap
between two pieces of a stream, compared with that of a quiet period. Memory is that of the engine process. The witness
takes `STEP_SECONDS` per step, so that its streams are as even as a real model's.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Self
from urllib.parse import urlsplit

import httpx

from bench.server import resident, server

STREAMS = 16
STEP_SECONDS = 0.004
CONTEXT = {"witness": 8192, "smollm2": 2048}
"""Default context length, by the model's name."""
LONGEST_TOKEN = {"witness": 12, "smollm2": 81}
"""Maximum bytes per token. A text with fewer bytes per token of the context must be encoded to know if it fits."""
QUIET_SECONDS = 3.0
WORDS = "the quick brown fox jumps over the lazy dog and "


def chat(url: str, session: str, text: str) -> str:
    """Sends a message to `session` and returns the outcome."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
    body = {"input": [{"role": "user", "content": text}], "max_new_tokens": 1, "stream": False}
    connection.request(
        "POST", f"/v1/sessions/{session}/turns", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    return f"{answer.status} {said['error']['code'] if 'error' in said else said['reason']}"


class Streams:
    """Endless streams and the arrival times of their pieces."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))
        self._latest = [0.0] * STREAMS
        self._longest = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.ensure_future(self._follow(number)) for number in range(STREAMS)]
        while not all(self._latest):
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _follow(self, number: int) -> None:
        while True:
            session = (await self._client.post("/v1/sessions", json={})).json()["id"]
            body = {"input": [number + 1], "ignore_eos": True}
            async with self._client.stream("POST", f"/v1/sessions/{session}/turns", json=body) as response:
                self._latest[number] = time.perf_counter()
                async for _ in response.aiter_raw():
                    now = time.perf_counter()
                    self._longest = max(self._longest, now - self._latest[number])
                    self._latest[number] = now
            self._latest[number] = time.perf_counter()

    async def longest_gap(self, work: Callable[[], str]) -> tuple[float, str]:
        """Returns the longest gap between two pieces of a stream, in seconds, while `work` runs in a thread, and the
        result of `work`."""
        now = time.perf_counter()
        self._latest, self._longest = [max(now, latest) for latest in self._latest], 0.0
        said = await asyncio.to_thread(work)
        waited = time.perf_counter()
        await asyncio.sleep(0.5)  # let delayed pieces arrive
        return max(self._longest, *(waited - latest for latest in self._latest)), said


def nothing() -> str:
    """Waits while the streams run alone."""
    time.sleep(QUIET_SECONDS)
    return ""


def text_of(size: int) -> str:
    """Returns words of `size` bytes in all."""
    return (WORDS * (size // len(WORDS) + 1))[:size]


def fitting(url: str, context: int) -> str:
    """Returns a text that fills most of the context."""
    probe = httpx.post(
        f"{url}/generate", json={"text": WORDS * 8, "sampling_params": {"max_new_tokens": 0}}, timeout=60
    )
    each = probe.json()["meta_info"]["prompt_tokens"] / 8
    return WORDS * int((context - 64) / each)


async def run(model: str, context: int) -> None:
    """Measures every case and prints its row."""
    name = model.partition(":")[0]
    context = context or CONTEXT.get(name, 2048)
    with server(model, context) as running:
        url, pid = running.url, running.engine
        cases = [("fits, and is accepted", fitting(url, context))]
        cases += [(f"{size} MB, refused", text_of(size * 2**20)) for size in (8, 16, 31)]
        cases += [("might fit, refused when encoded", "\u0416!x" * (context * LONGEST_TOKEN.get(name, 12) // 4 - 99))]
        print(f"{model}, context {context}: {STREAMS} streams; engine {resident(pid):.0f} MB at first")
        print(f"{'message':<38}{'longest gap, ms':>16}{'answered after, s':>19}{'engine, MB':>12}   answer")
        async with Streams(url) as streams:
            gap, _ = await streams.longest_gap(nothing)
            print(f"{'none':<38}{1000 * gap:>16.0f}{'':>19}{resident(pid):>12.0f}")
            for label, text in cases:
                session = httpx.post(f"{url}/v1/sessions", json={}).json()["id"]
                began = time.perf_counter()
                gap, said = await streams.longest_gap(partial(chat, url, session, text))
                took = time.perf_counter() - began - 0.5
                await asyncio.sleep(1.0)
                print(f"{label:<38}{1000 * gap:>16.0f}{took:>19.2f}{resident(pid):>12.0f}   {said}", flush=True)


def main(model: str = f"witness:{STEP_SECONDS}", context: str = "0") -> None:
    """Prints the table. `context` is the context length; 0 stands for the one in `CONTEXT`."""
    asyncio.run(run(model, int(context)))


if __name__ == "__main__":
    main(*sys.argv[1:3])
