"""The start of a server with a large journal: `python -m bench.journals [--sessions N] [--journal FILE]`.

Writes a journal of `N` sessions (100,000): two to six turns each, every hundredth with a history of 16,000 tokens,
every twentieth a fork. `FILE`: where to keep it for another run. Then starts servers of the witness, with the journal
and without one, and prints the seconds until each listens, and the CPU time and memory of its engine. No start can take
less time than SQLite takes to read the rows, which is measured beside it. Last, opens and closes as many sessions, and
prints the size of the journal's file before and after its space is given back.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import median

from bench.idle import cpu_seconds
from bench.server import resident, server
from tenuto.base.config import WorkerSettings, engine_config
from tenuto.base.options import Policy
from tenuto.base.wire.document import Conversation
from tenuto.engine.engine import Engine
from tenuto.runtime.models import build_engine, load_model
from tenuto.session.journal import Journal

SESSIONS = 100_000
TENANTS = 50
LONG_EVERY, LONG_TURNS, LONG_TOKENS = 100, 80, 200
FORK_EVERY = 20
CONTEXT = 32_768
TOGETHER = 2000
"""Changes written in one transaction."""
TIMES = 3


def journaled(path: Path, sessions: int) -> tuple[Engine, Journal]:
    """Returns an engine of the witness with room for so many sessions, and a journal for their changes."""
    model = load_model(WorkerSettings(model="witness"))
    engine = build_engine(model, engine_config({"max_sessions": sessions, "context_length": CONTEXT}), None)
    return engine, Journal(path, model.fingerprint)


def write(path: Path, sessions: int) -> None:
    """Writes the journal as an engine would."""
    (engine, journal), rng = journaled(path, sessions), Random(7)
    conversation = Conversation(system=False, dialogue=True, role="assistant")
    last: dict[str, str] = {}  # the last session of each tenant
    for number in range(sessions):
        name, tenant = f"{rng.getrandbits(96):024x}", f"tenant {number % TENANTS}"
        if number % FORK_EVERY == FORK_EVERY - 1 and tenant in last:
            engine.sessions.fork(last[tenant], child=name, tenant=tenant)
        else:
            policy = Policy(ttl=1e6, tenant=tenant, metadata=(("number", str(number)),))
            engine.sessions.open(name, policy, "You are a helpful assistant.")
        last[tenant] = name
        long = number % LONG_EVERY == 0
        for _ in range(LONG_TURNS if long else rng.randint(2, 6)):
            half = [rng.randrange(900) for _ in range(LONG_TOKENS // 2 if long else rng.randint(8, 30))]
            engine.sessions.adopt(name, half, half, conversation, tenant=tenant)
        if len(engine.outcomes.changes) > TOGETHER:
            journal.write(engine.outcomes.take_changes())
    journal.write(engine.outcomes.take_changes())
    journal.close()
    engine.end()


def closed(path: Path, sessions: int) -> None:
    """Opens sessions, runs a turn on each, closes them, and prints how the file shrinks."""
    engine, journal = journaled(path, sessions)
    fresh = path.stat().st_size
    for number in range(sessions):
        engine.sessions.open(str(number))
        engine.sessions.adopt(str(number), [1] * 50, [2] * 50)
        if len(engine.outcomes.changes) > TOGETHER:
            journal.write(engine.outcomes.take_changes())
    while sessions:
        sessions -= 1
        engine.sessions.close(str(sessions))
        if len(engine.outcomes.changes) > TOGETHER or not sessions:
            journal.write(engine.outcomes.take_changes())
    full, began = path.stat().st_size, time.monotonic()
    while journal.tidy(whole=True):
        pass
    seconds, least = time.monotonic() - began, path.stat().st_size
    print(f"opened and closed as many: {full:,} bytes, after {seconds:.1f} s {least:,}; a new journal has {fresh:,}")
    journal.close()
    engine.end()


def scan(path: Path) -> float:
    """Returns the seconds in which SQLite reads all rows, without a row for Python."""
    began = time.monotonic()
    with closing(sqlite3.connect(path)) as db:
        db.execute("SELECT sum(length(policy) + length(system) + checksum) FROM sessions").fetchone()
        db.execute("SELECT sum(length(tokens) + history.checksum) FROM history JOIN pieces ON id = piece").fetchone()
        db.execute("SELECT sum(length(conversation) + checksum) FROM records").fetchone()
    return time.monotonic() - began


def start(sessions: int, *arguments: str) -> tuple[float, float, float]:
    """Returns the seconds until a server listens, and its engine's CPU seconds and memory in MB by then."""
    began = time.monotonic()
    with server("witness", CONTEXT, "--max-sessions", str(sessions), *arguments) as processes:
        return time.monotonic() - began, cpu_seconds(processes.engine), resident(processes.engine)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.journals")
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--journal", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.journal or Path(folder, "journal")
        if not path.exists():
            began = time.monotonic()
            write(path, arguments.sessions)
            print(f"written in {time.monotonic() - began:.0f} s")
        print(f"{arguments.sessions:,} sessions, {path.stat().st_size / 1e6:.0f} MB; medians of {TIMES}")
        print(f"  SQLite reads its rows in          {median(scan(path) for _ in range(TIMES)):6.2f} s")
        for name, flags in (("without a journal", ()), ("with the journal", ("--journal", str(path)))):
            found = zip(*(start(arguments.sessions, *flags) for _ in range(TIMES)), strict=True)
            seconds, cpu, memory = map(median, found)
            print(f"  a server {name:<17} listens after {seconds:6.2f} s, {cpu:.2f} s of CPU time, {memory:.0f} MB")
        closed(Path(folder, "closed"), arguments.sessions)


if __name__ == "__main__":
    main()
