"""Streams on servers that offer only plain ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import uvloop

from tenuto.base.config import WorkerSettings
from tenuto.serve.app import build_app
from tenuto.serve.engine_process import EngineProcess
from tenuto.serve.metrics import Metrics
from tenuto.serve.process import ProcessLink
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.settings import ServeSettings

TURN: dict[str, Any] = {"input": [5, 6, 7], "max_new_tokens": 8}


def in_process(work: Callable[[httpx.AsyncClient], Awaitable[Any]], settings: ServeSettings | None = None) -> Any:
    """Runs `work` on an application without our protocol beneath it."""

    async def run() -> Any:
        link = await ProcessLink.open(EngineProcess(WorkerSettings(model="witness")))
        try:
            app = build_app(Edge(link, link.model, settings or ServeSettings()), Metrics())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as http:
                return await work(http)
        finally:
            await link.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def told(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names and data of a stream's events, with deltas joined and without the fields that vary between
    turns and servers."""
    events: list[tuple[str, dict[str, Any]]] = []
    for part in stream.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.split("\n"))
        data = json.loads(lines["data"])
        for name in ("id", "turn_id", "delivered", "usage", "context_left", "queued_seconds"):
            data.pop(name, None)
        if events and events[-1][0] == lines["event"] == "delta":
            for name in ("text", "tokens"):
                events[-1][1][name] += data[name]
        else:
            events.append((lines["event"], data))
    return events


def test_another_server_streams_the_same(http: httpx.Client) -> None:
    async def stream(other: httpx.AsyncClient) -> str:
        await other.post("/v1/sessions", json={"id": "streamed"})
        return (await other.post("/v1/sessions/streamed/turns", json=TURN)).text

    http.post("/v1/sessions", json={"id": "streamed"})
    ours = told(http.post("/v1/sessions/streamed/turns", json=TURN).text)
    assert [name for name, _ in ours] == ["started", "delta", "committed"]
    assert told(in_process(stream)) == ours


def test_requests_for_many_turns_that_fit_start_beside_one_that_does_not() -> None:
    async def ask_all(http: httpx.AsyncClient) -> list[int]:
        params = {"max_new_tokens": 8000, "ignore_eos": True}
        asked = {"input_ids": [[5, 6, n] for n in range(100)], "sampling_params": params}
        asking = [asyncio.ensure_future(http.post("/generate", json=asked)) for _ in range(4)]
        await asyncio.wait(asking, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        await http.post("/abort_request", json={"abort_all": True})
        return sorted([(await each).status_code for each in asking])

    assert in_process(ask_all, ServeSettings(max_turns=399)) == [200, 200, 200, 429]
