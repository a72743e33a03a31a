"""Networks that can be cut, for replicas of a fleet: each replica is in a network namespace of Linux, with one link to
the other replicas and the clients, and one to the database."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from psycopg import conninfo

Link = Literal["network", "database"]
PORT = 5432
PIECE_BYTES = 2**16


@dataclass(frozen=True)
class Place:
    """Where a replica runs. `address`: its own; `database`: the database's URL there; `enter`: the command that runs
    another one there."""

    address: str
    database: str
    enter: tuple[str, ...] = ()


class Networks:
    """The networks of `count` replicas. A cut link loses what is sent, and breaks no connection, as if a cable were
    drawn out."""

    def __init__(self, count: int, database: str) -> None:
        self._options = conninfo.conninfo_to_dict(database)
        self._name = f"tt{secrets.token_hex(3)}"
        self._net = f"10.{100 + secrets.randbelow(150)}"
        self._count = count
        self.places: list[Place] = []
        self._near = [f"{self._net}.{number + 1}.1" for number in range(count)]
        self._passing = Passing(self._near, str(Path(str(self._options["host"])) / f".s.PGSQL.{PORT}"))

    def make(self) -> None:
        """Makes the namespaces and links, and passes on connections to the database's socket."""
        _ip("link", "add", self._name, "type", "bridge")
        _ip("addr", "add", f"{self._net}.0.254/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        _ip("route", "add", "blackhole", f"{self._net}.0.0/16")  # what is for a cut link leaves on no other
        for number in range(self._count):
            space, near, own = self._space(number), self._near[number], f"{self._net}.0.{number + 1}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            for link, inside, address in (("network", "n0", own), ("database", "d0", f"{self._net}.{number + 1}.2")):
                outside = self._outside(number, link)
                _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", inside)
                _ip("-n", space, "link", "set", inside, "up")
                _ip("link", "set", outside, "up")
            _ip("link", "set", self._outside(number, "network"), "master", self._name)
            _ip("addr", "add", f"{near}/24", "dev", self._outside(number, "database"))
            url = f"postgresql://{self._options['user']}@{near}:{PORT}/{self._options['dbname']}"
            self.places.append(Place(own, url, ("ip", "netns", "exec", space)))
        self._passing.start()

    def _space(self, number: int) -> str:
        return f"{self._name}-{number}"

    def _outside(self, number: int, link: str) -> str:
        return f"{self._name}{link[0]}{number}"

    def cut(self, number: int, *links: Link) -> None:
        """Cuts links of a replica."""
        for link in links:
            _ip("link", "set", self._outside(number, link), "down")

    def mend(self, number: int, *links: Link) -> None:
        """Joins links that were cut."""
        for link in links:
            _ip("link", "set", self._outside(number, link), "up")

    def close(self) -> None:
        """Removes all of it."""
        links = [self._outside(number, link) for number in range(self._count) for link in ("network", "database")]
        for made in (
            *(("netns", "del", self._space(number)) for number in range(self._count)),
            *(("link", "del", link) for link in (*links, self._name)),  # connections may keep a namespace for a while
            ("route", "del", "blackhole", f"{self._net}.0.0/16"),
        ):
            subprocess.run(("ip", *made), check=False, stderr=subprocess.DEVNULL)
        self._passing.stop()


class Passing:
    """Passes on connections to `addresses` to a socket of this machine, in a separate thread."""

    def __init__(self, addresses: list[str], socket: str) -> None:
        self._addresses = addresses
        self._socket = socket
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        servers = [await asyncio.start_server(self._pass_on, address, PORT) for address in self._addresses]
        self._ready.set()
        await self._end.wait()
        for server in servers:
            server.close()
        passing = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_unix_connection(self._socket)
        try:
            await asyncio.gather(_copy(reader, behind_writer), _copy(behind_reader, writer))
        finally:
            for each in (writer, behind_writer):
                each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)


def possible() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0:
        return False
    name = f"tenuto-{secrets.token_hex(3)}"
    try:
        made = subprocess.run(("ip", "netns", "add", name), check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        _ip("netns", "del", name)
    return made


@contextmanager
def networks(count: int, database: str) -> Iterator[Networks]:
    """Makes networks, and removes them in the end. `database`: its URL, with a socket."""
    made = Networks(count, database)
    try:
        made.make()
        yield made
    finally:
        made.close()
