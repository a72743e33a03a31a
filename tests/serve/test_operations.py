"""Metrics, audit and logs of a real server of the witness, as operators see them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from tenuto.base.config import WorkerSettings
from tenuto.base.errors import EngineStopped
from tenuto.base.views import Transition
from tenuto.base.wire.messages import GetStats
from tenuto.base.wire.replies import MAYBE_DONE
from tenuto.base.wire.request import Request, answer_of
from tenuto.serve.engine_process import EngineProcess
from tenuto.serve.metrics import Metrics
from tenuto.serve.process import ProcessLink
from tests.serve.server import Server, serving
from tests.serve.test_native import LONG, events, turn

STATES = ("free", "in_flight", "leased")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(http: httpx.Client) -> Samples:
    """Returns every sample of /metrics, by name and labels."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((f"tenuto_{name}", frozenset(labels.items())), 0.0)


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    path = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}"
    yield path
    http.delete(path)


def test_metrics_count_the_work_of_turns(http: httpx.Client, session: str) -> None:
    before = scraped(http)
    turn(http, session, input=[1] * 30, max_new_tokens=5)
    turn(http, session, input=[2] * 10, max_new_tokens=1)
    after = scraped(http)

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert more("turns_ended_total", reason="length", committed="true") == 2
    assert more("prompt_tokens_total") == 30 + 45
    assert more("cached_tokens_total") == 34
    assert more("generation_tokens_total") == 6
    assert more("time_to_first_token_seconds_count") == 2
    assert more("inter_token_latency_seconds_count") == 4
    assert more("e2e_turn_latency_seconds_count") == 2
    assert more("transitions_total", event="commit") == 2
    route = "/v1/sessions/{session_id}/turns"
    assert more("http_requests_total", method="POST", route=route, status="200") == 2
    assert value(after, "held_tokens", tenant="default") >= 46
    assert value(after, "build_info", model="witness", version=version("tenuto")) == 1
    assert value(after, "engine_up") == 1


def test_metrics_show_memory_that_adds_up(http: httpx.Client, session: str) -> None:
    turn(http, session, input=[1] * 100)
    samples, capacity = scraped(http), http.get("/v1/engine").json()["units"]
    for group, units in capacity.items():
        states = [value(samples, "memory_units", group=group, tier="device", state=s) for s in STATES]
        assert sum(states) == units
    audited = http.get("/audit").json()
    assert audited["clean"] is True
    assert sum(audited["pools"][0]["by_holder"].values()) == audited["pools"][0]["leased"]


def test_metrics_show_open_turns_and_how_turns_end(slow_http: httpx.Client, slow_witness: Server) -> None:
    session = f"/v1/sessions/{slow_http.post('/v1/sessions', json={}).json()['id']}"
    before = scraped(slow_http)
    with slow_http.stream("POST", f"{session}/turns", json=LONG) as response, slow_witness.client() as other:
        told = events(response)
        next(event for event in told if event[0] == "delta")
        during = scraped(other)
        other.post(f"{session}/abort", json={"keep": "delivered"})
        list(told)
    after = scraped(slow_http)
    assert (value(during, "turns_running"), value(after, "turns_running")) == (1, 0)
    ended = {"reason": "abort", "committed": "true"}
    assert value(after, "turns_ended_total", **ended) == value(before, "turns_ended_total", **ended) + 1
    assert value(after, "aborts_total") == value(before, "aborts_total") + 1
    slow_http.delete(session)


def test_sessions_that_yield_are_parked_as_configured_and_restored(tmp_path: Path) -> None:
    options = ("--host-tier", "4kB", "--disk-tier", str(tmp_path / "tier"), "--memory", "20000")
    with serving("--model", "witness", "--context-length", "512", *options) as server, server.client() as http:
        names = [f"s{number}" for number in range(12)]
        for number, name in enumerate(names):
            http.post("/v1/sessions", json={"id": name})
            turn(http, f"/v1/sessions/{name}", input=[number + 60] * 200)
        found = scraped(http)
        assert value(found, "parked_sessions") > 0
        assert value(found, "moved_units_total", tier="disk") > 0
        assert list((tmp_path / "tier").glob("*.units"))
        assert turn(http, f"/v1/sessions/{names[0]}", input=[1])["usage"]["cached_tokens"] > 190
        assert value(scraped(http), "restored_sessions_total") >= 1


def test_recomputed_tokens_are_counted_by_reason() -> None:
    with serving("--model", "witness", "--context-length", "512") as server, server.client() as http:
        http.post("/v1/sessions", json={"id": "dropped"})
        turn(http, "/v1/sessions/dropped", input=[1] * 50)
        assert http.get("/flush_cache").status_code == 200
        assert turn(http, "/v1/sessions/dropped", input=[1])["usage"]["cached_tokens"] == 0
        recomputed = [sample for sample in scraped(http).items() if sample[0][0] == "tenuto_recomputed_tokens_total"]
        assert [(dict(labels)["reason"], tokens) for (_, labels), tokens in recomputed] == [("flushed", 53)]


def test_odd_requests_make_no_new_series(http: httpx.Client) -> None:
    http.request("PROPFIND", "/v1/sessions")
    http.get("/nothing")
    http.get("/v1/sessions/none")
    scraped(http)
    before = {key for key in scraped(http) if key[0] == "tenuto_http_requests_total"}
    for n in range(20):
        http.get(f"/nothing/{n}")
        http.get(f"/v1/sessions/none-{n}")
        http.request(("PROPFIND", "PURGE", "MKCOL")[n % 3], "/v1/sessions")
    after = {key for key in scraped(http) if key[0] == "tenuto_http_requests_total"}
    assert after == before


def test_the_metrics_of_a_server_without_its_engine_report_it() -> None:
    async def scrape() -> str:
        link = await ProcessLink.open(EngineProcess(WorkerSettings(model="witness")))
        metrics = Metrics()
        assert b"tenuto_engine_up 1.0" in await metrics.text(link, "witness", 0)
        os.kill(link.pid, signal.SIGKILL)
        await asyncio.wait_for(link.ended(), 20)
        text = (await metrics.text(link, "witness", 0)).decode()
        await link.close()
        return text

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert "tenuto_engine_up 0.0" in runner.run(scrape())


def test_a_request_during_the_engines_death_gets_an_error() -> None:
    async def ask() -> list[str]:
        link = await ProcessLink.open(EngineProcess(WorkerSettings(model="witness")))
        os.kill(link.pid, signal.SIGKILL)
        told: list[str] = []

        async def once() -> None:
            try:
                await link.call(GetStats())
            except EngineStopped as error:
                told.append(str(error))

        async with asyncio.timeout(20), asyncio.TaskGroup() as asking:
            while link.stopped is None:  # including the time between the end of the connection and that of the process
                asking.create_task(once())
                await asyncio.sleep(0)
        await link.close()
        return told

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(ask())
    reason = "the engine process was killed by SIGKILL"
    assert told
    assert set(told) <= {reason, f"{reason}; {MAYBE_DONE}"}


class CountingLink:
    """An engine that returns figures, or is late with them."""

    stopped = None

    def __init__(self, *, late: bool) -> None:
        self.asked: list[str] = []
        self._late = late

    async def call(self, request: Request[Any]) -> Any:
        self.asked.append(type(request).__name__)
        if self._late:
            await asyncio.sleep(60)
        return msgspec.convert(FIGURES, answer_of(type(request)))


COUNTED = (
    *("recomputed", "replayed", "held_tokens", "prefix_lookups", "prefix_tokens", "accepted_tokens", "rejected_tokens"),
    *("tiers", "tier_moves", "tier_failures", "snapshots"),
)
FIGURES = {
    **dict.fromkeys(("parked", "restored", "saved", "unsaved", "saved_bytes"), 1),
    **dict.fromkeys(("sessions", "running", "queued", "steps", "holders", "leases"), 1),
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens", "computed_tokens"), 2),
    **{name: {"some": 3} for name in COUNTED},
    "transitions": {Transition("preempt"): 3},
    "shared": {},
    "pools": [{"name": "g", "capacity": 9, "free": 4, "in_flight": 0, "leased": 5, "by_holder": {"session": 5}}],
}


def shown(metrics: Metrics, link: CountingLink) -> str:
    return asyncio.run(metrics.text(link, "m", 0)).decode()  # type: ignore[arg-type]


def test_frequent_scrapes_do_not_recount_memory_each_time() -> None:
    metrics, link = Metrics(), CountingLink(late=False)
    texts = [shown(metrics, link) for _ in range(3)]
    assert link.asked == ["GetStats", "Audit", "GetStats", "GetStats"]
    assert all('tenuto_memory_leased_units{group="g",holder="session",tier="device"} 5.0' in text for text in texts)


def test_metrics_do_not_wait_for_a_late_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.serve.metrics.PATIENCE_SECONDS", 0.02)
    text = shown(Metrics(), CountingLink(late=True))
    assert "tenuto_engine_up 1.0" in text
    assert "tenuto_turns_running" not in text


# -- logs


def logged(server: Server, request_id: str) -> dict[str, Any]:
    """Returns the log line of a request."""
    found: dict[str, Any] = json.loads(server.line_with(request_id))
    return found


def test_a_request_has_an_id_in_its_answer_and_in_the_log(http: httpx.Client, witness: Server, session: str) -> None:
    answer = http.get(session)
    line = logged(witness, answer.headers["x-request-id"])
    assert (line["event"], line["method"], line["path"]) == ("request", "GET", session)
    assert (line["status"], line["tenant"]) == (200, "default")
    assert line["ms"] >= 0


def test_a_plain_request_id_from_the_client_is_kept(http: httpx.Client, witness: Server) -> None:
    for given in ("order-17/b", "x" * 128):
        assert http.get("/v1/sessions", headers={"x-request-id": given}).headers["x-request-id"] == given
        assert logged(witness, given)["request_id"] == given
    for wrong in (b"", b"two words", b"x" * 129, b"tab\tbed", b"\xff"):
        answer = http.get("/v1/sessions", headers=[(b"x-request-id", wrong)])
        assert len(answer.headers["x-request-id"]) == 16


def test_refusals_also_have_the_id(http: httpx.Client, witness: Server) -> None:
    for method, path, status in (("GET", "/none", 404), ("PUT", "/v1/sessions", 405), ("POST", "/v1/sessions", 415)):
        answer = http.request(method, path, content=b"{")
        assert answer.status_code == status
        assert logged(witness, answer.headers["x-request-id"])["status"] == status


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_generation_can_be_paused_and_resumed(witness: Server, mode: str) -> None:
    with witness.client() as http, ThreadPoolExecutor(1) as pool:
        assert http.post("/pause_generation", json={"mode": mode}).json()["status"] == "ok"
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        asked = pool.submit(httpx.post, f"{witness.url}/generate", json=body, timeout=60)
        time.sleep(0.3)
        assert not asked.done()
        assert http.get("/audit").status_code == 200
        http.post("/continue_generation").raise_for_status()
        assert asked.result().json()["meta_info"]["completion_tokens"] == 4
