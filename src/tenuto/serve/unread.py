"""Breaks the connections of clients that do not read: their turns hold rows, and their answers fill memory."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Collection
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = structlog.get_logger("tenuto.http")

CHECKS = 4
"""How often a connection is checked within its client's time."""
SEND_BUFFER_BYTES = 2**16
"""The requested size of the system's buffer for an answer; Linux doubles it. The default is megabytes, and a turn whose
client does not read would hold its row until they are full."""
WRITE_BUFFER_BYTES = 2**14
"""How much we buffer besides before the writer has to wait."""


class WatchedConnection(HttpToolsProtocol):
    """A client's connection. `resumed`: how often its full buffers have emptied."""

    resumed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's is
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def resume_writing(self) -> None:
        self.resumed += 1
        super().resume_writing()


class UnreadConnections:
    """Breaks a connection whose buffers have been full, or which was to be closed, for some time without progress.
    Clients' systems may announce reads only in pieces of 64 KiB or more. For the writer and the turn, this is a
    disconnect like any other.

    Invariant: nothing is written to the connections in `_waiting` until they have `resumed`, so the unread part of
    their answers only shrinks.
    """

    def __init__(self, connections: Collection[Any], seconds: float) -> None:
        """`connections`: a server's, as they come and go. `seconds`: how long a client may read nothing."""
        self._connections = connections
        self._seconds = seconds
        self._waiting: dict[WatchedConnection, tuple[int, int, int]] = {}  # resumed, bytes left, idle checks

    async def watch(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self._seconds / CHECKS)
            try:
                self.check()
            except Exception:  # our own mistake; without further checks, turns would hold their rows for nobody
                log.exception("connections could not be checked")

    def check(self) -> None:
        """Break the connections without progress in `CHECKS` checks in a row."""
        waiting: dict[WatchedConnection, tuple[int, int, int]] = {}
        for connection in list(self._connections):
            transport = connection.transport
            if not _may_be_unread(connection):
                continue
            resumed, left = connection.resumed, bytes_left(transport)
            before = self._waiting.get(connection)
            idle = before[2] + 1 if before is not None and before[:2] == (resumed, left) else 0
            if idle < CHECKS:
                waiting[connection] = resumed, left, idle
                continue
            log.info("client does not read", seconds=self._seconds, bytes_left=left)
            transport.abort()
        self._waiting = waiting

    def give_up(self) -> None:
        """The server shuts down: break the connections whose buffers are full."""
        for connection in list(self._connections):
            if _may_be_unread(connection):
                connection.transport.abort()


def _may_be_unread(connection: WatchedConnection) -> bool:
    """Whether nothing more is written until the client has read."""
    return connection.flow.write_paused or connection.transport.is_closing()


def bytes_left(transport: asyncio.WriteTransport) -> int:
    """Bytes that were written but have not arrived: in our buffer and, where the system reports it as Linux does, in
    the system's. Elsewhere progress shows later, when our own buffer shrinks."""
    left = transport.get_write_buffer_size()
    descriptor = transport.get_extra_info("socket").fileno()
    try:
        queued = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # another system, or the connection has just been lost
        return left
    return left + int.from_bytes(queued, sys.byteorder)
