"""The HTTP client of `tenuto bench`. It may share a machine with the server it measures, so it only records arrival
times while an answer comes, and parses the answer once it is complete."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import httptools
import httpx
import msgspec

from tenuto.base.errors import Disconnected, Unreachable
from tenuto.client.sse import EventParser
from tenuto.client.wire import error_from

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""Time for which an idle connection is kept; shorter than on servers, so that no request meets a closed one."""


class TimedEvent(NamedTuple):
    """An event of a stream: its arrival time (`time.perf_counter`), its name and its data, decoded from JSON."""

    when: float
    name: str
    data: Any


class BenchHttp:
    """Sends any number of concurrent requests to the server at `url`, without a proxy. Belongs to one event loop;
    errors are `TenutoError`s."""

    def __init__(self, url: httpx.URL, api_key: str | None = None) -> None:
        self.url = url
        self._base = url.raw_path.rstrip(b"/")
        self._headers = {"host": url.netloc.decode(), "accept": "*/*", "content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._idle: deque[_Connection] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        await asyncio.sleep(0)  # the loop closes them in its next iteration

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns a server's answer, decoded from JSON; `None` if it is not JSON. Raises the error that the server
        reports."""
        content = b"".join(part for _, part in await self._request(method, path, body, {}))
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError:
            return None

    async def events(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> list[TimedEvent]:
        """Returns the events of a stream after its end. Raises the error that an event reports."""
        parser, events = EventParser(), list[TimedEvent]()
        for when, part in await self._request("POST", path, body, headers or {}):
            for event in parser.feed(part):
                if event.data == "[DONE]":
                    continue
                data = msgspec.json.decode(event.data)
                if "error" in data:
                    raise error_from(500, event.data.encode())
                events.append(TimedEvent(when, event.name, data))
        return events

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str]
    ) -> list[tuple[float, bytes]]:
        """Sends a request. Returns the parts of the answer with their arrival times."""
        content = msgspec.json.encode(body) if body is not None else b""
        told = self._headers | {"content-length": str(len(content))} | dict(headers)
        head = b"%b %b%b HTTP/1.1\r\n" % (method.encode(), self._base, path.encode())
        head += "".join(f"{name}: {value}\r\n" for name, value in told.items()).encode()
        connection = self._unused() or await self._connect()
        try:
            parts = await connection.request(head + b"\r\n" + content)
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        if connection.status >= 400:
            raise error_from(connection.status, b"".join(part for _, part in parts))
        return parts

    def _unused(self) -> _Connection | None:
        """Returns an idle connection that is probably still open on the server, and closes older ones."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and time.perf_counter() - connection.ended < IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        port = self.url.port or (80 if self._tls is None else 443)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, self.url.host, port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"there is no connection to the server: {str(error) or type(error).__name__}") from error
        return connection


class _Connection(asyncio.Protocol):
    """A connection to a server, for one request at a time. aiohttp, which does more, needs twice the time per piece of
    an answer and three times per request.

    `status`, `usable` (another request may follow) and `ended` (`time.perf_counter`) describe the last answer."""

    def __init__(self) -> None:
        self.status = 0
        self.usable = False
        self.ended = 0.0
        self._expect()
        self._answer: asyncio.Future[None] | None = None

    def _expect(self) -> None:
        """Prepares for a new answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[tuple[float, bytes]] = []
        self._now = 0.0  # arrival time of the data being parsed
        self._sized = False  # whether a header determines the end of the body
        self._until_closed = False  # whether the body ends with the connection

    async def request(self, content: bytes) -> list[tuple[float, bytes]]:
        """Sends a request. Returns the parts of the answer's body, once it is complete, with their arrival times."""
        self.usable = False
        self._expect()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(content)
        await self._answer
        return self._parts

    def close(self) -> None:
        """Closes the connection."""
        self.usable = False
        self._transport.close()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # streams have this type
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if exc is None and self._until_closed:
            self._end()
        else:
            self._fail(exc)

    # -- called by the parser

    def on_header(self, name: bytes, _: bytes) -> None:
        self._sized |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status, self._until_closed = self._parser.get_status_code(), not self._sized

    def on_body(self, body: bytes) -> None:
        self._parts.append((self._now, body))

    def on_message_complete(self) -> None:
        self.usable = self._parser.should_keep_alive()
        self._end()

    def _end(self) -> None:
        self.ended = time.perf_counter()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _fail(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            reason = str(error) or type(error).__name__ if error is not None else "it was closed"
            self._answer.set_exception(Disconnected(f"the connection to the server broke: {reason}"))
