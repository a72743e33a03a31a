"""The cost of the map: `python -m bench.map [--sessions N] [--blocks N] [--only PART]`.

A server of the witness gets 120,000 pages and 10,000 idle sessions, which hold 90,000 of them. In Chromium, if it is
installed, the page is opened, and while a few sessions take turns, its frames are counted and the time to its first
paint is taken (`--only page`). Then 32 turns run without end, and steps and CPU time are counted in short windows with
and without a viewer (`--only windows`). The viewer is a plain reader, since a browser would take the server's cores.
Each figure is the median of ratios within blocks of four windows, with an interval for the median in brackets. While
turns run, describing 10,000 sessions takes longer than windows last, and each look takes all of its two milliseconds.
With `--sessions 500` the map is complete, as it is for one who has looked for a while. The time that looks take in the
engine's thread is also measured without a server (`--only thread`).
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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from bench.engine_step import make
from bench.idle import fill
from bench.server import Processes, server
from bench.spread import Spread
from tenuto.engine.engine import Engine
from tenuto.serve.map_feed import INTERVAL

SESSIONS = 10_000
TOKENS = 280
"""The input of each session: nine pages."""
MEMORY = 512 * 120_000
"""In bytes: the witness's pages have 512."""
RUNNING = 32
OUTPUT = 7900
WINDOW = 1.5
BLOCKS = 24
FILLED_SECONDS = 5.0
"""The longest wait for the map to be complete before watched windows begin."""
FRAMES_SECONDS = 10
CHANGES_A_SECOND = 20
LOOKS = 30
ROUNDS = 7
STEPS = 40
"""Between two looks."""
SOURCES = Path(__file__).parents[1] / "src" / "tenuto"
PARTS = ("serve/static", "serve/map.py", "serve/map_feed.py", "serve/map_state.py", "serve/pages.py", "serve/trace.py",
    "engine/watch.py", "engine/trace.py", "base/map_views.py", "base/map_feed.py", "cli/top", "client/map_reader.py",
    "client/map_turns.py", "client/map_world.py")  # fmt: skip
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


async def endless(url: str, ended: asyncio.Event) -> None:
    """Runs turns, one after the other, until the end. Their output is not streamed, so reading it costs nothing."""

    async def one(http: httpx.AsyncClient, number: int) -> None:
        while True:
            session = (await http.post("/v1/sessions", json={})).json()["id"]
            body = {"input": [number] * 8, "max_new_tokens": OUTPUT, "ignore_eos": True, "stream": False}
            await http.post(f"/v1/sessions/{session}/turns", json=body)
            await http.delete(f"/v1/sessions/{session}")

    limits = httpx.Limits(max_connections=RUNNING + 4)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        turns = [asyncio.ensure_future(one(http, number)) for number in range(RUNNING)]
        await ended.wait()
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


@contextmanager
def running(url: str) -> Iterator[None]:
    """Runs turns without end inside the context, in a thread."""
    loop, ended = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(endless(url, ended)))
    thread.start()
    try:
        time.sleep(2)
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def process_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def viewer(url: str) -> Iterator[bool]:
    """Reads the feed inside the context, in a thread. Yields whether the map was complete when the context began, which
    waits for that at most `FILLED_SECONDS`."""
    ended, complete = threading.Event(), threading.Event()

    def read() -> None:
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            http.stream("GET", "/map/feed", headers={"accept": "text/event-stream"}) as answer,
        ):
            for piece in answer.iter_raw():
                if b'"more":false' in piece:
                    complete.set()
                if ended.is_set():
                    return

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield complete.wait(FILLED_SECONDS)
    finally:
        ended.set()
        reading.join()
        time.sleep(2 * INTERVAL)  # the edge ends its looks


@dataclass(frozen=True, slots=True)
class Window:
    """The server in a window: steps a second, and CPU seconds of the engine and of both processes a step."""

    rate: float
    engine: float
    server: float

    @staticmethod
    def of(http: httpx.Client, processes: Processes) -> Window:
        """Measures the next `WINDOW` seconds."""

        def read() -> tuple[float, float, float, float]:
            steps = http.get("/get_server_info").json()["internal_states"][0]["steps"]
            return steps, time.monotonic(), process_seconds(processes.engine), process_seconds(processes.edge)

        before = read()
        time.sleep(WINDOW)
        steps, seconds, engine, edge = (late - early for early, late in zip(before, read(), strict=True))
        return Window(steps / seconds, engine / steps, (engine + edge) / steps)


def throughput(processes: Processes, blocks: int) -> None:
    """Compares windows with and without a viewer. A block is a window without, two with, and one without; so what the
    machine does meanwhile counts for both alike, also if it grows or shrinks steadily."""
    ratios: dict[str, list[float]] = {
        "steps a second": [],
        "engine's CPU time a step": [],
        "server's CPU time a step": [],
    }
    alone: list[float] = []
    complete = 0
    with running(processes.url), httpx.Client(base_url=processes.url, timeout=60) as http:
        for _ in range(blocks):
            first = Window.of(http, processes)
            with viewer(processes.url) as filled:
                watched = Window.of(http, processes), Window.of(http, processes)
            unwatched = first, Window.of(http, processes)
            complete += filled
            alone += [each.rate for each in unwatched]
            for name, part in zip(ratios, ("rate", "engine", "server"), strict=True):
                with_viewer, without = (sum(getattr(each, part) for each in pair) for pair in (watched, unwatched))
                ratios[name].append(with_viewer / without)
    print(f"unwatched          {statistics.median(alone):.0f} steps a second with {RUNNING} turns")
    print(f"watched            {blocks} blocks; in {complete} of them the map was complete before the windows")
    for name, found in ratios.items():
        print(f"  {name:<25}{Spread.of_median(found).shown('.3f')} times that without a viewer")


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
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--only", choices=("thread", "page", "windows"))
    parser.add_argument("--model", default="witness")
    arguments = parser.parse_args()
    only = arguments.only
    print(f"in the wheel       {wheel_part() / 1024:.0f} KiB")
    if only in (None, "thread"):
        of_the_thread(arguments.sessions)
    if only == "thread":
        return
    memory = ("--memory", str(MEMORY)) if arguments.model == "witness" else ()
    with server(arguments.model, 8192, *memory) as processes:
        asyncio.run(fill(processes.url, arguments.sessions, TOKENS))
        if only in (None, "page"):
            in_the_browser(processes.url, arguments.sessions)
        if only in (None, "windows"):
            throughput(processes, arguments.blocks)


if __name__ == "__main__":
    main()
