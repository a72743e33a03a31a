"""A server in a separate process, for benchmarks."""

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
    """The server's URL and the process ids of its edge and its engine."""

    url: str
    edge: int
    engine: int


@contextmanager
def server(model: str, context: int, *arguments: str, key: str = "") -> Iterator[Processes]:
    """Runs a server during the block. `key`: an admin's key, if the server has keys."""
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
    """Returns a request's headers for `key`."""
    return {"authorization": f"Bearer {key}"} if key else {}


def resident(pid: int) -> float:
    """Returns the resident memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1000 if found else float("nan")
