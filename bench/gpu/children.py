"""Commands that run beside a benchmark, for a limited time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def run(
    commands: Mapping[Path, Sequence[str]], seconds: float, environments: Mapping[Path, Mapping[str, str]] | None = None
) -> dict[Path, int | None]:
    """Runs commands at the same time, each with a file for its output, and perhaps variables of its own. Returns their
    exit statuses. One that has not ended after `seconds` has None, and is killed with all processes that it started."""
    end, running = time.perf_counter() + seconds, dict[Path, subprocess.Popen[bytes]]()
    try:
        for log, command in commands.items():
            more = (environments or {}).get(log, {})
            with log.open("w") as file:
                running[log] = subprocess.Popen(  # noqa: S603 - our own command
                    command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **more}, start_new_session=True
                )
        return {log: _status(process, end) for log, process in running.items()}
    finally:
        for process in running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _status(process: subprocess.Popen[bytes], end: float) -> int | None:
    try:
        return process.wait(max(end - time.perf_counter(), 0))
    except subprocess.TimeoutExpired:
        return None
