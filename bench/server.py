"""A server as a process of its own, for benchmarks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass(frozen=True, slots=True)
class Processes:
    """Where the server listens, and the process ids of its edge and its engine."""

    url: str
    edge: int
    engine: int


@contextmanager
def server(model: str, context: int, *arguments: str, key: str = "") -> Iterator[Processes]:
    """A server while the block runs. `key`: an admin's, if it has keys."""
    command = [sys.executable, "-c", "from tenuto.cli import main; main()", "serve", "--port", "0"]
    command += ["--model", model, "--context-length", str(context), "--log-level", "error", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own command
    try:
        assert process.stdout is not None
        url = next(found[1] for line in process.stdout if (found := re.match(r"listening +(http://\S+)", line)))
        shown = httpx.get(f"{url}/v1/engine", headers=bearer(key), timeout=60).json()
        yield Processes(url, process.pid, int(shown["pid"]))
    finally:
        process.terminate()
        process.wait()


def bearer(key: str) -> dict[str, str]:
    """Headers of a request."""
    return {"authorization": f"Bearer {key}"} if key else {}


def resident(pid: int) -> float:
    """MB of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1000 if found else float("nan")
