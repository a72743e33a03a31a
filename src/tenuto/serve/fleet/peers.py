"""Requests to other replicas: HTTP/1.1 over connections that are kept."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast
from urllib.parse import urlsplit

import httptools

Headers = Sequence[tuple[bytes, bytes]]

CONNECT_SECONDS = 1.0
IDLE_SECONDS = 0.4
"""How long an idle connection is used again: for less time than the other side keeps it, which is a second or more."""
MAX_IDLE = 256
"""The most idle connections to a replica."""
READ_AHEAD_BYTES = 2**18
"""Bytes of an answer after which no more are read until some are used."""
LOST_SECONDS = 5
"""How long the network may lose everything before a connection breaks. A replica that lives, but is cut off from this
one, would otherwise be waited for."""


class NotSent(Exception):
    """A replica cannot be reached, so it has not received a request."""


class Broken(Exception):
    """The connection broke before the answer was complete. The request may have been carried out."""


class Reply(asyncio.Protocol):
    """A connection, and the answer to its last request."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.usable = True  # for another request, once the answer is complete
        self.used = 0.0  # when its last answer was complete
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._begun = self._complete = self._headless = False
        self.heard = 0  # how often something has come
        self._error: Exception | None = None
        self._changed: asyncio.Future[None] | None = None

    def ask(self, request: Sequence[bytes | memoryview], *, bodiless: bool) -> None:
        """Sends a request, in pieces. `bodiless`: its answer has no body."""
        self._parser = httptools.HttpResponseParser(self)
        self.headers, self._pieces, self._size = [], deque(), 0
        self._begun = self._complete = False
        self._headless = bodiless
        assert self._transport is not None
        self._transport.writelines(request)

    async def begun(self) -> None:
        """Waits for the answer's status and headers. Raises `Broken`."""
        while not self._begun:
            await self._wait()

    async def piece(self) -> bytes:
        """Waits for the next piece of the answer's body; empty at its end. Raises `Broken`."""
        while not self._pieces and not self._complete:
            await self._wait()
        if not self._pieces:
            return b""
        piece = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        if self._size > READ_AHEAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._size = 0
        return piece

    async def rest(self) -> None:
        """Reads the rest of the answer. Raises `Broken`."""
        while await self.piece():
            pass

    def fail(self, error: Exception) -> None:
        """Breaks the connection."""
        self._error = error
        self.close()
        self._tell()

    @property
    def over(self) -> bool:
        """Whether the whole answer has been used."""
        return self._complete and not self._pieces

    async def _wait(self) -> None:
        if self._error is not None:
            raise Broken(str(self._error)) from self._error
        self._changed = asyncio.get_running_loop().create_future()
        try:
            await self._changed
        finally:
            self._changed = None

    def _tell(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def close(self) -> None:
        """Closes the connection, from which nothing more is read."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not an instance of it

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._complete:
            self.close()  # nothing was asked
            return
        self.heard += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(error)
        self._tell()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._error = self._error or error or ConnectionResetError("the connection was closed")
        self._tell()

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []
            return
        self._begun = True
        if self._headless:
            self._complete, self.usable = True, False

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._size += len(body)
        if self._size > READ_AHEAD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if not self._begun:  # an interim answer
            return
        self._complete = True
        self.usable = self.usable and self._parser.should_keep_alive()
        self.used = asyncio.get_running_loop().time()


Watch = Callable[[Reply, str], Coroutine[None, None, None]]
"""Fails an answer of the replica at an address once that replica no longer lives."""


class Peers:
    """The connections to other replicas, by their URLs."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self._idle: dict[str, list[Reply]] = {}  # the one used last is last

    @asynccontextmanager
    async def ask(self, url: str, *request: bytes | memoryview, bodiless: bool = False) -> AsyncIterator[Reply]:
        """Sends a request, given in pieces, and yields the answer, which may not have begun. Its connection is kept if
        the whole answer is used, and otherwise closed, so that the other replica sees a client that leaves. Raises
        `NotSent`."""
        reply = self._kept(url) or await _connected(url)
        watching = asyncio.ensure_future(self._watch(reply, url)) if self._watch is not None else None
        try:
            reply.ask(request, bodiless=bodiless)
            yield reply
        finally:
            if watching is not None:
                watching.cancel()
            idle = self._idle.setdefault(url, [])
            if reply.over and reply.usable and len(idle) < MAX_IDLE:
                idle.append(reply)
            else:
                reply.close()

    def _kept(self, url: str) -> Reply | None:
        idle, since = self._idle.get(url, []), asyncio.get_running_loop().time() - IDLE_SECONDS
        while idle:
            reply = idle.pop()
            if reply.usable and reply.used > since:
                return reply
            reply.close()
        return None

    def close(self) -> None:
        """Closes the idle connections."""
        for idle in self._idle.values():
            for reply in idle:
                reply.close()
        self._idle.clear()


async def _connected(url: str) -> Reply:
    place = urlsplit(url)
    connecting = asyncio.get_running_loop().create_connection(Reply, place.hostname or "", place.port or 80)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, reply = await connecting
    except (OSError, TimeoutError) as error:
        raise NotSent(str(error) or "no answer") from error
    with suppress(OSError):
        _set_up(transport.get_extra_info("socket"))
    return reply


def _set_up(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # what was sent and not received, and, while nothing is sent, one probe a second
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_SECONDS)
