"""The cost of a session's next turn with its state on the device, in host memory, on disk, or gone: `python -m
bench.tiers [MODEL [DIRECTORY]]`.

For each length, a session's state is moved to the tier in question, and a turn of a few tokens is timed up to its first
output token. Speeds are compared with copying the same bytes in memory, and with reading them from an uncached file.
Finally, a session is restored beside other streams: the figures are the usual and the longest gap between their tokens,
and the time to the restored session's first token.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from tenuto.base.config import EngineOptions, WorkerSettings, engine_config
from tenuto.base.options import TurnParams
from tenuto.engine.engine import Engine
from tenuto.memory.tiers.unit_files import SUFFIX
from tenuto.runtime.models import Model, build_engine, load_model

LENGTHS = (2048, 4096, 8000)
STREAMS = 3
NEW_TOKENS = 16
MEMORY = 1 << 30
ROUNDS = 3
CHUNK = 1 << 20


def make(model: Model, **options: object) -> Engine:
    """Returns an engine with room for one long session and a turn."""
    given: EngineOptions = {"context_length": 8192, "prefix_cache": False, **options}  # type: ignore[typeddict-item]
    return build_engine(model, engine_config(given, model.max_context), MEMORY)


def tell(engine: Engine, name: str, length: int, draw: random.Random) -> None:
    """Opens a session and appends `length` tokens."""
    engine.sessions.open(name)
    engine.turns.submit(name, [draw.randrange(1000, 20000) for _ in range(length)], TurnParams(max_new_tokens=0))
    while not engine.idle:
        engine.step()


def next_turn(engine: Engine, name: str, draw: random.Random) -> float:
    """Returns the seconds from a turn's submission to its first token. Restores the session's length afterwards."""
    length = len(engine.registry.get(name).history)
    tokens = [draw.randrange(1000, 20000) for _ in range(NEW_TOKENS)]
    began = time.perf_counter()
    turn = engine.turns.submit(name, tokens, TurnParams(max_new_tokens=1, ignore_eos=True))
    until(engine, lambda: bool(turn.output))
    seconds = time.perf_counter() - began
    until(engine, lambda: engine.idle)
    engine.sessions.rewind(name, position=length)
    return seconds


def until(engine: Engine, condition: Callable[[], bool]) -> None:
    """Runs steps until `condition` is true; waits for copies when there is nothing to compute."""
    copied = threading.Event()
    engine.idle_memory.tiers.moves.wake = copied.set
    while not condition():
        copied.clear()
        if not engine.step().worked and len(engine.batch):
            copied.wait(0.01)


def gaps(engine: Engine, name: str, draw: random.Random, before: Callable[[], None]) -> tuple[float, float, float]:
    """Returns seconds: the usual gap between two tokens of streams, the longest one while a session is restored beside
    them, and the time to that session's first token."""
    before()
    length = len(engine.registry.get(name).history)
    streams = []
    for number in range(STREAMS):
        engine.sessions.open(f"stream {number}")
        tokens = [draw.randrange(1000, 20000) for _ in range(64)]
        streams.append(
            engine.turns.submit(f"stream {number}", tokens, TurnParams(max_new_tokens=4000, ignore_eos=True))
        )
    until(engine, lambda: all(len(turn.output) > 2 for turn in streams))
    usual = [_seconds_of_a_step(engine) for _ in range(20)]
    turn = engine.turns.submit(name, [draw.randrange(1000, 20000)], TurnParams(max_new_tokens=1, ignore_eos=True))
    beside: list[float] = []
    while not turn.output:
        beside.append(_seconds_of_a_step(engine))
    for number in range(STREAMS):
        engine.sessions.close(f"stream {number}")
    until(engine, lambda: engine.idle)
    engine.sessions.rewind(name, position=length)
    return median(usual), max(beside), sum(beside)


def _seconds_of_a_step(engine: Engine) -> float:
    """Returns the seconds of a step that gives every stream a token."""
    began = time.perf_counter()
    while not engine.step().progressed:
        pass
    return time.perf_counter() - began


def timed(engine: Engine, name: str, draw: random.Random, before: Callable[[], None], count: int = ROUNDS) -> float:
    """Returns the median seconds of `next_turn` over `count` rounds; `before` moves the state to its tier."""
    rounds = []
    for _ in range(count):
        before()
        rounds.append(next_turn(engine, name, draw))
    return median(rounds)


def flush(engine: Engine) -> None:
    """Drops the session's state; only its tokens are left."""
    engine.sessions.drop("s")


def uncache(directory: Path) -> None:
    """Removes the files from the system's cache."""
    for path in directory.glob(f"*{SUFFIX}"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold_read(directory: Path) -> float:
    """Returns the bytes per second of reading the largest file, uncached."""
    uncache(directory)
    path = max(directory.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_size)
    room = bytearray(CHUNK)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(room):
            pass
    return path.stat().st_size / (time.perf_counter() - began)


def memcpy(size: int) -> float:
    """Returns the bytes per second of copying `size` bytes in memory."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return size / median(seconds)


def main() -> None:
    """Prints the table."""
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    model, other = (load_model(WorkerSettings(model=name, page_size=16)) for _ in range(2))
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as directory:
        host, disk = make(model, host_tier=8 << 30), make(other, disk_tier=directory)
        print(f"{model.name}, {model.compute}; a turn of {NEW_TOKENS} tokens, seconds to its first output token")
        columns = f"{'tokens':>7} {'device':>8} {'host':>8} {'disk':>8} {'recomputed':>11}"
        print(f"{columns}   restored, GB/s (memcpy, cold read)")
        draw = random.Random(1)
        for length in LENGTHS:
            report(host, disk, length, draw, Path(directory))
        host.end()
        disk.end()
    model.executor.close()
    other.executor.close()


def report(host: Engine, disk: Engine, length: int, draw: random.Random, directory: Path) -> None:
    """Prints a row of the table."""
    for engine in (host, disk):
        tell(engine, "s", length, draw)

    def leave(engine: Engine) -> None:
        engine.pressure.drop(engine.registry.get("s"), "pressure")
        engine.idle_memory.finish()  # files are written in the background
        uncache(directory)

    next_turn(host, "s", draw)
    on_device = timed(host, "s", draw, lambda: None)
    computed = timed(host, "s", draw, lambda: flush(host), 1)
    size = sum(pool.leased * host.memory.spec.groups[g].bytes_per_unit for g, pool in enumerate(host.memory.pools))
    in_host = timed(host, "s", draw, lambda: leave(host))
    on_disk = timed(disk, "s", draw, lambda: leave(disk))
    leave(disk)
    plain = cold_read(directory)
    rates = size / max(1e-9, in_host - on_device), size / max(1e-9, on_disk - on_device)
    print(
        f"{length:>7} {on_device:>8.3f} {in_host:>8.3f} {on_disk:>8.3f} {computed:>11.3f}   "
        f"host {rates[0] / 1e9:.1f} ({memcpy(size) / 1e9:.1f}), disk {rates[1] / 1e9:.1f} ({plain / 1e9:.1f})"
    )
    if length == max(LENGTHS):
        print(f"{STREAMS} streams beside a turn on {length} tokens, ms: between their tokens, at most, until its first")
        for place, engine in (("device", host), ("host", host), ("disk", disk)):
            before = partial(leave, engine) if place != "device" else lambda: None
            usual, longest, first = (1000 * seconds for seconds in gaps(engine, "s", draw, before))
            print(f"  {place:<6} {usual:>8.1f} {longest:>8.1f} {first:>8.1f}")
    for engine in (host, disk):
        engine.sessions.close("s")


if __name__ == "__main__":
    main()
