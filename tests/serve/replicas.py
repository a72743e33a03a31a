"""Real servers that are replicas of one fleet."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx

from tests.serve.networks import Networks, Place
from tests.serve.server import Server, free_port

KEY = "a-key-of-20-characters"
"""The API key of replicas with networks of their own: others could reach them."""
LEASE = 1.5
"""In seconds, like the default: enough on a machine that has time."""


class Replicas:
    """Servers with the same options on one database. `url`: of the database. `lease`: in seconds; a busy machine may
    let a replica wait for longer than a short one. `networks`: those the replicas are in, if they have their own.
    `rebalance`: whether they spread load. `own`: returns more options of a replica."""

    def __init__(
        self,
        url: str,
        count: int,
        *arguments: str,
        lease: float = LEASE,
        networks: Networks | None = None,
        rebalance: bool = False,
        own: Callable[[int], Sequence[str]] = lambda _: (),
    ) -> None:
        self.url = url
        self.lease = lease
        self.networks = networks
        self._arguments = *arguments, "--fleet-rebalance" if rebalance else "--no-fleet-rebalance"
        self._own = own
        self._places = networks.places if networks is not None else [Place("127.0.0.1", url)] * count
        self._ports = [free_port() for _ in range(count)]
        with ThreadPoolExecutor(count) as starting:
            started = [starting.submit(self._start, number) for number in range(count)]
        self.servers = [each.result() for each in started if each.exception() is None]
        for each in started:
            if (error := each.exception()) is not None:
                self.kill_all()
                raise error

    def _start(self, number: int) -> Server:
        place, port = self._places[number], self._ports[number]
        return Server(
            *("--host", place.address, "--port", str(port), "--advertise", f"http://{place.address}:{port}"),
            *("--fleet", place.database, "--fleet-lease", str(self.lease), *self._arguments),
            *self._own(number),
            env={"TENUTO_ADMIN_API_KEY": KEY} if self.networks is not None else None,
            enter=place.enter,
        )

    def client(self, timeout: httpx.Timeout | float) -> httpx.AsyncClient:
        """Returns a client for all replicas."""
        return httpx.AsyncClient(headers=self.servers[0].headers, timeout=timeout)

    def restart(self, number: int) -> None:
        """Starts a replica again at its address, after its end."""
        self.servers[number] = self._start(number)

    def signal(self, number: int, sent: signal.Signals) -> None:
        """Sends a signal to all processes of a replica."""
        os.killpg(self.servers[number].process.pid, sent)

    def kill_all(self) -> None:
        for server in self.servers:
            server.kill_all()


@contextmanager
def replicas(
    url: str,
    count: int,
    *arguments: str,
    lease: float = LEASE,
    networks: Networks | None = None,
    rebalance: bool = False,
    own: Callable[[int], Sequence[str]] = lambda _: (),
) -> Iterator[Replicas]:
    """Runs a fleet inside the context."""
    fleet = Replicas(url, count, *arguments, lease=lease, networks=networks, rebalance=rebalance, own=own)
    try:
        yield fleet
    finally:
        fleet.kill_all()
