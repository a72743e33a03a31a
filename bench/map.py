"""The cost of the map: `python -m bench.map [--sessions N] [--pairs N]`.

A server of the witness gets 120,000 pages and 10,000 idle sessions, which hold 90,000 of them. In Chromium, if it is
installed, the page is opened, and while a few sessions take turns, its frames are counted and the time to its first
paint is taken. Then 32 turns run without end. The tokens of the server, and the CPU time of its engine, are counted in
pairs of windows, one with a viewer and one without. The viewer is a plain reader, since a browser would take the
server's cores. On a machine that does other work these ratios mean little; so the time that looks take in the engine's
thread is also measured without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

import httpx

from bench.engine_step import make
from bench.idle import fill
from bench.server import Processes, server
from tenuto.engine.engine import Engine
from tenuto.serve.map_feed import INTERVAL

SESSIONS = 10_000
TOKENS = 280
"""The input of each session: nine pages."""
MEMORY = 512 * 120_000
"""In bytes: the witness's pages have 512."""
RUNNING = 32
WINDOW = 4.0
PAIRS = 8
FRAMES_SECONDS = 10
CHANGES_A_SECOND = 20
LOOKS = 30
ROUNDS = 7
STEPS = 40
"""Between two looks."""
SOURCES = Path(__file__).parents[1] / "src" / "tenuto"
PARTS = ("serve/static", "serve/map.py", "serve/map_feed.py", "serve/map_state.py", "serve/pages.py", "serve/trace.py",
    "engine/watch.py", "engine/trace.py", "base/map_views.py")  # fmt: skip
COUNT_FRAMES = """seconds => new Promise(done => {
    const times = [];
    const frame = now => {
        times.push(now);
        if (now - times[0] < seconds * 1000) requestAnimationFrame(frame); else done(times);
    };
    requestAnimationFrame(frame);
})"""
PAINTS = "() => performance.getEntriesByType('paint').map(entry => [entry.name, entry.startTime])"


@contextmanager
def changes(url: str) -> Iterator[None]:
    """Lets idle sessions take short turns now and then, inside the context."""
    ended = threading.Event()

    def go() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            ids = [each["id"] for each in http.get("/v1/sessions", params={"limit": 1000}).json()["data"]]
            number = 0
            while not ended.wait(1 / CHANGES_A_SECOND):
                number += 1
                body = {"input": [number % 1000] * 40, "max_new_tokens": 8, "stream": False}
                http.post(f"/v1/sessions/{ids[number % len(ids)]}/turns", json=body)

    changing = threading.Thread(target=go)
    changing.start()
    try:
        yield
    finally:
        ended.set()
        changing.join()


def in_the_browser(url: str, sessions: int) -> None:
    """Measures the page's first paint and its frames."""
    from tests.pages.browser import CHROMIUM, browser  # noqa: PLC0415 - need not be installed

    if CHROMIUM is None:
        print("no Chromium: the page is not measured")
        return
    with browser() as chromium, changes(url):
        paints = []
        for _ in range(3):
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"{url}/map")
            page.locator("canvas.grid").wait_for()
            paints.append(dict(page.evaluate(PAINTS))["first-contentful-paint"])
            page.close()
        print(f"first paint        {min(paints):.0f} to {max(paints):.0f} ms")
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        began = time.monotonic()
        page.goto(f"{url}/map")
        wanted = f"open sessions\n{sessions:,}"
        while wanted not in page.locator(".figures").inner_text():
            time.sleep(0.02)
        print(f"all sessions       {time.monotonic() - began:.2f} s")
        time.sleep(3)
        times = page.evaluate(COUNT_FRAMES, FRAMES_SECONDS)
        gaps = sorted(after - before for before, after in pairwise(times))
        rate = 1000 * (len(times) - 1) / (times[-1] - times[0])
        late = gaps[int(0.99 * len(gaps))]
        print(f"frames             {rate:.1f} a second; 99 of 100 within {late:.0f} ms, the longest {gaps[-1]:.0f} ms")


class Tokens:
    """The number of events with tokens that the readers of endless turns have got."""

    def __init__(self) -> None:
        self.count = 0


async def endless(url: str, ended: asyncio.Event, tokens: Tokens) -> None:
    """Runs turns of 3,000 tokens, one after the other, until the end."""

    async def one(http: httpx.AsyncClient, number: int) -> None:
        while not ended.is_set():
            session = (await http.post("/v1/sessions", json={})).json()["id"]
            body = {"input": [number] * 8, "max_new_tokens": 3000, "ignore_eos": True}
            async with http.stream("POST", f"/v1/sessions/{session}/turns", json=body) as answer:
                async for piece in answer.aiter_raw():
                    tokens.count += piece.count(b"event: delta")
                    if ended.is_set():
                        return
            await http.delete(f"/v1/sessions/{session}")

    limits = httpx.Limits(max_connections=RUNNING + 4)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await asyncio.gather(*(one(http, number) for number in range(RUNNING)))


def engine_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def running(url: str) -> Iterator[Tokens]:
    """Runs turns without end inside the context, in a thread."""
    ended, tokens = asyncio.Event(), Tokens()
    thread = threading.Thread(target=lambda: asyncio.run(endless(url, ended, tokens)))
    thread.start()
    try:
        time.sleep(2)
        yield tokens
    finally:
        ended.set()
        thread.join()


@contextmanager
def viewer(url: str) -> Iterator[None]:
    """Reads the feed inside the context, in a thread."""
    ended = threading.Event()

    def read() -> None:
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            http.stream("GET", "/map/feed", headers={"accept": "text/event-stream"}) as answer,
        ):
            for _ in answer.iter_raw():
                if ended.is_set():
                    return

    reading = threading.Thread(target=read)
    reading.start()
    try:
        time.sleep(FILLED_SECONDS)
        yield
    finally:
        ended.set()
        reading.join()


FILLED_SECONDS = 5.0
"""Time for the first events to arrive before a window begins."""


def window(tokens: Tokens, engine: int) -> tuple[float, float]:
    """Returns the tokens a second in a window, and the CPU seconds of the engine for each token."""
    count, cpu, began = tokens.count, engine_seconds(engine), time.monotonic()
    time.sleep(WINDOW)
    made, spent, passed = tokens.count - count, engine_seconds(engine) - cpu, time.monotonic() - began
    return made / passed, spent / made


def throughput(processes: Processes, pairs: int) -> None:
    """Compares windows with and without a viewer, in pairs that follow each other."""
    rates: list[float] = []
    costs: list[float] = []
    alone: list[tuple[float, float]] = []
    with running(processes.url) as tokens:
        for number in range(pairs):
            found: dict[bool, tuple[float, float]] = {}
            for watched in (number % 2 == 0, number % 2 == 1):
                with viewer(processes.url) if watched else nullcontext():
                    found[watched] = window(tokens, processes.engine)
            rates.append(found[True][0] / found[False][0])
            costs.append(found[True][1] / found[False][1])
            alone.append(found[False])
    print(f"unwatched          {statistics.median(rate for rate, _ in alone):.0f} tokens a second")
    for name, ratios in (("tokens a second", rates), ("engine's CPU time", costs)):
        ratios.sort()
        told = f"median of {pairs} pairs, {ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"watched            {statistics.median(ratios):.3f} times the {name} ({told})")


def stretches(engine: Engine, *, watched: bool) -> tuple[float, float]:
    """Returns the thread's seconds for `STEPS` steps, and for the look after them, each the median of `LOOKS`."""
    steps, looks = list[float](), list[float]()
    for _ in range(LOOKS):
        began = time.thread_time()
        for _ in range(STEPS):
            engine.step()
        between = time.thread_time()
        if watched:
            engine.look()
        steps.append(between - began)
        looks.append(time.thread_time() - between)
    return statistics.median(steps), statistics.median(looks)


def of_the_thread(sessions: int) -> None:
    """Measures the share of the engine's thread that looks take, with 32 running turns beside idle sessions. The
    thread's own time is counted, and stretches with and without looks take turns."""
    engine = make(RUNNING, parked=sessions).engine
    ratios, looks = [], []
    for _ in range(ROUNDS):
        alone, _ = stretches(engine, watched=False)
        engine.look(fresh=True)
        while engine.look().more:
            pass
        watched, look = stretches(engine, watched=True)
        engine.look(end=True)
        ratios.append(watched / alone)
        looks.append(look)
    look = statistics.median(looks)
    print(f"a look             {1000 * look:.2f} ms of the engine's thread, {100 * look / INTERVAL:.2f}% of its time")
    print(f"steps beside looks {statistics.median(ratios):.3f} times as long ({min(ratios):.3f} to {max(ratios):.3f})")


def wheel_part() -> int:
    """Returns the size that the pages have in a wheel, in bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for part in PARTS:
            path = SOURCES / part
            for file in [path] if path.is_file() else sorted(path.rglob("*")):
                if file.is_file():
                    wheel.write(file, file.relative_to(SOURCES.parent))
    return len(packed.getvalue())


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.map", description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--model", default="witness")
    arguments = parser.parse_args()
    print(f"in the wheel       {wheel_part() / 1024:.0f} KiB")
    of_the_thread(arguments.sessions)
    memory = ("--memory", str(MEMORY)) if arguments.model == "witness" else ()
    with server(arguments.model, 8192, *memory) as processes:
        asyncio.run(fill(processes.url, arguments.sessions, TOKENS))
        in_the_browser(processes.url, arguments.sessions)
        throughput(processes, arguments.pairs)


if __name__ == "__main__":
    main()
