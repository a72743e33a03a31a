"""A real server process for tests."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from tests.eventually import eventually

START_SECONDS = 120
END_SECONDS = 60


def free_port() -> int:
    """Returns a port that is free, and that the system gives to no client meanwhile: it takes theirs from 32,768 on."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """`tenuto serve` on a free port of this machine. `lines`: its output on both streams."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, enter: Sequence[str] = ()) -> None:
        """`enter`: a command that runs the server's, such as one that enters a network namespace."""
        command = [sys.executable, "-c", "from tenuto.cli import main; main()", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            [*enter, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # so that `kill_all` also reaches the engine process
        )
        self.lines: list[str] = []
        self.url = ""
        key = (env or {}).get("TENUTO_ADMIN_API_KEY")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listening.wait(START_SECONDS) or not self.url:
            self.kill_all()
            raise RuntimeError("the server did not start:\n" + "".join(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)
                if found := re.match(r"listening +(http://\S+)", line):
                    self.url = found[1]
                    self._listening.set()
        self._listening.set()

    @property
    def engine_pid(self) -> int:
        return int(httpx.get(f"{self.url}/v1/engine", headers=self.headers, timeout=60).json()["pid"])

    def client(self, **options: Any) -> httpx.Client:
        """Returns an HTTP client whose URLs are paths."""
        return httpx.Client(base_url=self.url, **{"timeout": 60, "headers": self.headers, **options})

    def line_with(self, mark: str) -> str:
        """Returns the first line of the output that contains `mark`, once there is one."""
        eventually(lambda: any(mark in line for line in self.lines))
        return next(line for line in self.lines if mark in line)

    def audit(self) -> None:
        """Checks that every unit of memory is accounted for."""
        answer = httpx.get(f"{self.url}/audit", headers=self.headers, timeout=60)
        assert answer.status_code == 200, answer.text

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_SECONDS)

    def kill_all(self) -> None:
        """Kills all remaining processes of the server."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)


@contextmanager
def serving(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Runs a server inside the context."""
    server = Server(*arguments, env=env)
    try:
        yield server
    finally:
        server.kill_all()
