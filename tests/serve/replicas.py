"""Real servers that are replicas of one fleet."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.serve.server import Server, free_port

LEASE = 1.5
"""In seconds, like the default: enough on a machine that has time."""


class Replicas:
    """Servers with the same options on one database. `url`: of the database. `lease`: in seconds; a busy machine may
    let a replica wait for longer than a short one."""

    def __init__(self, url: str, count: int, *arguments: str, lease: float = LEASE) -> None:
        self.url = url
        self.lease = lease
        self._arguments = arguments
        self._ports = [free_port() for _ in range(count)]
        with ThreadPoolExecutor(count) as starting:
            started = [starting.submit(self._start, port) for port in self._ports]
        self.servers = [each.result() for each in started if each.exception() is None]
        for each in started:
            if (error := each.exception()) is not None:
                self.kill_all()
                raise error

    def _start(self, port: int) -> Server:
        place = ("--port", str(port), "--fleet", self.url, "--advertise", f"http://127.0.0.1:{port}")
        return Server(*place, "--fleet-lease", str(self.lease), *self._arguments)

    def restart(self, number: int) -> None:
        """Starts a replica again at its address, after its end."""
        self.servers[number] = self._start(self._ports[number])

    def signal(self, number: int, sent: signal.Signals) -> None:
        """Sends a signal to all processes of a replica."""
        os.killpg(self.servers[number].process.pid, sent)

    def kill_all(self) -> None:
        for server in self.servers:
            server.kill_all()


@contextmanager
def replicas(url: str, count: int, *arguments: str, lease: float = LEASE) -> Iterator[Replicas]:
    """Runs a fleet inside the context."""
    fleet = Replicas(url, count, *arguments, lease=lease)
    try:
        yield fleet
    finally:
        fleet.kill_all()
