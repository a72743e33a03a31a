"""Breaks the connections of clients that do not read. Otherwise their turns would hold rows, and their answers fill
memory. Closes idle connections, unless a request has just arrived there."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = structlog.get_logger("tenuto.http")

CHECKS = 4
"""Number of checks of a connection within the time its client has."""
SEND_BUFFER_BYTES = 2**16
"""The requested size of the system's send buffer; Linux doubles it. The default is megabytes, and a turn whose client
does not read would hold its row until the buffer is full."""
WRITE_BUFFER_BYTES = 2**14
"""Bytes in our own buffer before the writer has to wait."""
ARRIVING_SECONDS = 0.02
"""Time after which a connection is looked at again on which a request was arriving."""


class WatchedConnection(HttpToolsProtocol):
    """A client's connection. `resumed`: number of times its full buffers have emptied."""

    resumed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's is
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def resume_writing(self) -> None:
        self.resumed += 1
        super().resume_writing()

    @property
    def arriving(self) -> bool:
        """Whether bytes of the client have arrived that were not read yet. Closing the connection would then reset it,
        and the client would not know whether its request was carried out."""
        return _unread_bytes(self.transport) > 0

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that was idle for too long, unless a request has arrived: timers of a busy event loop run
        before it reads."""
        if not self.transport.is_closing() and self.arriving:
            self.timeout_keep_alive_task = self.loop.call_later(ARRIVING_SECONDS, self.timeout_keep_alive_handler)
        else:
            self.end()
            super().timeout_keep_alive_handler()

    def end(self) -> None:
        """Lets the client know at once that an idle connection ends. Closing it takes the event loop until it has done
        other work, and a request that is sent meanwhile would be lost."""
        if not self.transport.is_closing():
            with suppress(OSError), socket.socket(fileno=os.dup(_descriptor(self.transport))) as same:
                same.shutdown(socket.SHUT_WR)


class UnreadConnections:
    """Breaks connections whose buffers were full, or which were closing, for some time without progress. Clients'
    systems may announce reads only in pieces of 64 KiB or more. For the writer and the turn, this is a disconnect like
    any other.

    Invariant: nothing is written to the connections in `_waiting` until they have `resumed`, so the unread part of
    their answers only shrinks.
    """

    def __init__(self, connections: Collection[Any], seconds: float) -> None:
        """`connections`: the server's live set of connections. `seconds`: maximum time that a client may read
        nothing."""
        self._connections = connections
        self._seconds = seconds
        self._waiting: dict[WatchedConnection, tuple[int, int, int]] = {}  # resumed, bytes left, idle checks

    async def watch(self) -> None:
        """Checks until cancelled."""
        while True:
            await asyncio.sleep(self._seconds / CHECKS)
            try:
                self.check()
            except Exception:  # a bug of ours; checks must go on, or turns would keep their rows
                log.exception("connections could not be checked")

    def check(self) -> None:
        """Breaks the connections without progress in `CHECKS` checks in a row."""
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
        """Breaks the connections whose buffers are full. Called at the end of a shutdown."""
        for connection in list(self._connections):
            if _may_be_unread(connection):
                log.info("client has not read its answer", bytes_left=bytes_left(connection.transport))
                connection.transport.abort()


def _may_be_unread(connection: asyncio.Protocol) -> bool:
    """Whether nothing is written until the client reads. WebSockets have timeouts of their own."""
    if not isinstance(connection, WatchedConnection):
        return False
    return connection.flow.write_paused or connection.transport.is_closing()


def _descriptor(transport: asyncio.Transport) -> int:
    descriptor: int = transport.get_extra_info("socket").fileno()
    return descriptor


def _unread_bytes(transport: asyncio.Transport) -> int:
    """Returns the number of bytes in the system's receive buffer."""
    try:
        return int.from_bytes(fcntl.ioctl(_descriptor(transport), termios.FIONREAD, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # the connection has just been lost
        return 0


def bytes_left(transport: asyncio.WriteTransport) -> int:
    """Returns the number of bytes written that have not arrived: those in our buffer and, on systems that report it,
    such as Linux, in the system's. Elsewhere progress shows later, when our own buffer shrinks."""
    left = transport.get_write_buffer_size()
    descriptor = transport.get_extra_info("socket").fileno()
    try:
        queued = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # another system, or the connection has just been lost
        return left
    return left + int.from_bytes(queued, sys.byteorder)
