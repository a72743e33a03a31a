"""The HTTP client of `tenuto bench`. It shares its machine with the server that it measures, so it does little more for
a token than to note when it came."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Self, cast

import httptools
import httpx
import msgspec

from tenuto.base.errors import Disconnected, TenutoError, Unreachable
from tenuto.client.sse import EventParser
from tenuto.client.wire import error_from

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""How long an idle connection is kept: less than servers do, so that requests do not meet a closed one."""


class BenchHttp:
    """Requests to the server at `url`, any number at once, each on a connection that has no other. Belongs to one event
    loop; errors are `TenutoError`s. Proxies are not used."""

    def __init__(self, url: httpx.URL, api_key: str | None = None) -> None:
        self.url = url
        self._prefix = url.path.rstrip("/")
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._headers = {"host": url.netloc.decode("ascii"), "accept": "*/*"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._idle: list[_Connection] = []  # the last used last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """A server's answer, from JSON; `None` if it is something else. Raises the error that it is."""
        async with aclosing(self._answer(method, path, body)) as answer:
            content = b"".join([piece async for _, piece in answer])
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError:
            return None

    async def events(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[float, str, Any]]:
        """The events of a stream: when they came, their names and their data. Raises the error that one reports."""
        parser = EventParser()
        async with aclosing(self._answer("POST", path, body, headers)) as answer:
            async for when, piece in answer:
                for event in parser.feed(piece):
                    if event.data == "[DONE]":
                        continue
                    data = msgspec.json.decode(event.data)
                    if "error" in data:
                        raise error_from(500, event.data.encode())
                    yield when, event.name, data

    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[tuple[float, bytes], None]:
        """The body of an answer in pieces, and when each came (`time.perf_counter`)."""
        connection = await self._connection()
        try:
            connection.write(self._request(method, path, body, headers or {}))
            pieces = connection.pieces()
            if await connection.status() >= 400:
                raise error_from(await connection.status(), b"".join([piece async for _, piece in pieces]))
            async for timed in pieces:
                yield timed
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str]) -> bytes:
        content = b"" if body is None else msgspec.json.encode(body)
        own = {"content-length": str(len(content))} if body is None else _described(content)
        lines = [f"{method} {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, **own, **headers}.items()]
        return "\r\n".join([*lines, "\r\n"]).encode("ascii") + content

    async def _connection(self) -> _Connection:
        """One that is open. Raises `Unreachable`."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and time.perf_counter() - connection.used < IDLE_SECONDS:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(_Connection, self.url.host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"there is no connection to the server: {str(error) or type(error).__name__}") from error
        return connection


def _described(content: bytes) -> dict[str, str]:
    return {"content-type": "application/json", "content-length": str(len(content))}


class _Connection(asyncio.Protocol):
    """A connection, and the answer to its last request.

    Invariant: `_waiter` is set while somebody waits for news: of the status, of a piece, or of the end.
    """

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.used = 0.0  # when its last data came
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[tuple[float, bytes]] = deque()  # not yet taken
        self._status = 0
        self._ends_with_connection = True  # the answer does, for its headers do not say how long it is
        self._keeps = True  # open after the answer
        self._complete = True
        self._error: TenutoError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Whether it is open, and has nothing under way."""
        return self._complete and self._keeps and self._error is None

    def write(self, request: bytes) -> None:
        """Begin a request; the one before has been answered."""
        self._status, self._complete, self._ends_with_connection = 0, False, True
        self._pieces.clear()  # what nobody took of the last answer
        self._transport.write(request)

    async def status(self) -> int:
        """The status of the answer. Raises `Disconnected`."""
        while not self._status:
            await self._news()
        return self._status

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """The pieces of its body, and when they came. Raises `Disconnected` if it breaks off."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self._complete:
                return
            await self._news()

    def close(self) -> None:
        self._transport.close()

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break(self, reason: str) -> None:
        self._error = self._error or Disconnected(f"the connection to the server broke: {reason}")
        self._wake()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.used = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"its answer is not HTTP: {error}")
            self._transport.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._status and self._ends_with_connection:
            self._complete = True
        self._break(str(exc) if exc is not None else "it was closed")

    # -- called by the parser

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append((self.used, body))

    def on_message_complete(self) -> None:
        self._complete, self._keeps = True, self._parser.should_keep_alive()
