"""The API process's cost per streamed token: `python -m bench.edge`.

The server runs in this process, its engine (the witness) in a second one, and the clients in a third. The figure is the
CPU time of this process only. The witness takes `STEP_SECONDS` per step, so that each token is a separate event, as
with a real model; at full speed, a slow reader would get several tokens in one event."""

from __future__ import annotations

import asyncio
import cProfile
import json
import pstats
import sys
import time

import httpx
import uvloop

from tenuto.base.config import WorkerSettings
from tenuto.base.logs import configure_logs
from tenuto.serve.engine_process import EngineProcess
from tenuto.serve.run import serve
from tenuto.serve.shared.settings import ServeSettings

STREAMS = 16
STEP_SECONDS = 0.004
INTERFACES = {
    "native": ("/v1/sessions/{session}/turns", {"input": [1], "max_new_tokens": 0, "ignore_eos": True}),
    "openai chat": (
        "/v1/chat/completions",
        {
            "model": "witness",
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            "temperature": 0,
            "max_tokens": 0,
            "ignore_eos": True,
        },
    ),
    "sglang": (
        "/generate",
        {
            "input_ids": [1],
            "stream": True,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0, "ignore_eos": True},
        },
    ),
}
"""Path and body of a stream; `body_of` fills in its number of tokens."""


def body_of(interface: str, tokens: int) -> tuple[str, dict[str, object]]:
    """Returns path and body of a request for a stream of `tokens`."""
    path, body = INTERFACES[interface]
    body = json.loads(json.dumps(body))
    place = body.get("sampling_params", body)
    place["max_tokens" if "max_tokens" in place else "max_new_tokens"] = tokens
    return path, body


async def clients(url: str, interface: str, tokens: int) -> None:
    """Reads `STREAMS` streams to their ends and prints their number of events."""
    path, body = body_of(interface, tokens)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def one() -> int:
            session = (await http.post("/v1/sessions", json={})).json()["id"]
            events = 0
            async with http.stream("POST", path.format(session=session), json=body) as response:
                async for chunk in response.aiter_raw():
                    events += chunk.count(b"data: ")
            return events

        print(sum(await asyncio.gather(*(one() for _ in range(STREAMS)))))


async def measure(url: str, interface: str, tokens: int) -> tuple[float, int]:
    """Returns this process's CPU seconds, and the events, for `STREAMS` streams of `tokens`."""
    before = time.process_time()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.edge", url, interface, str(tokens), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    return time.process_time() - before, int(output)


async def run(engine: EngineProcess) -> None:
    """Measures every interface, then profiles the native one."""
    configure_logs("warning")
    settings = ServeSettings(port=0)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(serve(engine, settings, lambda _, url: ready.set_result(url)))
    url = await ready
    print(f"{STREAMS} streams on the witness, {STEP_SECONDS * 1000:g} ms a step; target: 100 us a token")
    print(f"{'interface':<14}{'us a token':>12}{'events a token':>16}")
    for interface in INTERFACES:
        await measure(url, interface, 50)  # a warm-up
        few, many = await measure(url, interface, 200), await measure(url, interface, 1200)
        tokens = STREAMS * 1000
        print(f"{interface:<14}{1e6 * (many[0] - few[0]) / tokens:>12.1f}{(many[1] - few[1]) / tokens:>16.2f}")
    profile = cProfile.Profile()
    profile.enable()
    await measure(url, "native", 1000)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    serving.cancel()


def main() -> None:
    """Prints the figures and the profile."""
    worker = WorkerSettings(model=f"witness:{STEP_SECONDS}")
    with EngineProcess(worker) as engine, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(engine))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(clients(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    else:
        main()
