"""Engines on servers: both clients over HTTP, with the operations that only a server offers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self, Unpack

from tenuto.base.options import RemoteOptions
from tenuto.base.turns import Input, TurnResult
from tenuto.client.aio import AsyncClient, AsyncSession, AsyncTurnStream
from tenuto.client.core import EngineCore, SessionCore, TurnReader
from tenuto.client.http import HttpTransport
from tenuto.client.socket_transport import SocketTransport
from tenuto.client.sync import Client, Session, TurnStream
from tenuto.client.transport import Deliver


def connect(url: str, api_key: str | None = None) -> RemoteEngine:
    """Returns a client of the server at `url`, used like a `tenuto.Engine`. Sends no request before the first
    operation. Every operation may raise `Unreachable`, `Disconnected` or `Unauthorized`, besides its own errors."""
    return RemoteEngine(url, api_key)


def connect_async(url: str, api_key: str | None = None) -> AsyncRemoteEngine:
    """See `connect`. Do not await it: `async with tenuto.connect_async(url) as engine`."""
    return AsyncRemoteEngine(url, api_key)


class RemoteTurnStream(TurnStream):
    """A `TurnStream` of a turn on a server."""

    @property
    def turn_id(self) -> str | None:
        """The turn's id on the server, for `RemoteSession.follow`."""
        return self._reader.running.turn_id


class RemoteSession(Session):
    """A `Session` on a server. `RemoteOptions` decide what happens to a turn when its connection breaks."""

    stream_type: ClassVar[type[TurnStream]] = RemoteTurnStream
    _engine: RemoteEngine

    def follow(self, turn_id: str) -> RemoteTurnStream:
        """Streams a running or recently ended turn from its beginning. When the stream is dropped, the turn continues
        if it has other readers or was started to continue without any. Raises `NotFound`."""
        return RemoteTurnStream(self._engine, partial(_follow, self._engine.transport, self.id, turn_id))

    @contextmanager
    def socket(self) -> Iterator[Self]:
        """Opens a WebSocket, and yields this session over it; the end of the block closes only the WebSocket. Its
        turns, drafts and rewinds follow one another on that connection: one that comes while another is in progress
        waits, and is not refused. Aborts overtake. Everything else is requested as before. An open turn is rolled back
        when the block ends, unless it was started to continue without readers; such a turn is then read over HTTP.
        Raises `NotFound` or `Unreachable`. When the WebSocket has ended, its operations raise `Disconnected`."""
        transport = SocketTransport(self._engine.transport, self.id)
        try:
            transport.open().result()
            yield type(self)(self._engine, SessionCore(EngineCore(transport), self.id))
        finally:
            transport.close()

    if TYPE_CHECKING:  # the methods of `Session`, with a server's options

        def turn(self, input: Input = (), **options: Unpack[RemoteOptions]) -> RemoteTurnStream: ...  # noqa: A002 - as there
        def chat(self, text: str, **options: Unpack[RemoteOptions]) -> RemoteTurnStream: ...
        def append(self, input: Input, **options: Unpack[RemoteOptions]) -> TurnResult: ...  # noqa: A002 - as there
        def regenerate(self, **options: Unpack[RemoteOptions]) -> RemoteTurnStream: ...


class RemoteEngine(Client[RemoteSession]):
    """An engine on a server, created by `tenuto.connect`. Close it, or use it as a context manager; that also closes
    sessions, forks and trims that were opened without an id."""

    session_type = RemoteSession

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.transport = HttpTransport(url, api_key)
        super().__init__(self.transport)

    if TYPE_CHECKING:

        def generate(self, input: Input, **options: Unpack[RemoteOptions]) -> RemoteTurnStream: ...  # noqa: A002 - as there


class AsyncRemoteTurnStream(AsyncTurnStream):
    """The asynchronous `RemoteTurnStream`."""

    @property
    def turn_id(self) -> str | None:
        """See `RemoteTurnStream.turn_id`; `None` until the server has accepted the turn."""
        return self._reader.running.turn_id


class AsyncRemoteSession(AsyncSession):
    """The asynchronous `RemoteSession`."""

    stream_type: ClassVar[type[AsyncTurnStream]] = AsyncRemoteTurnStream
    _engine: AsyncRemoteEngine

    def follow(self, turn_id: str) -> AsyncRemoteTurnStream:
        """See `RemoteSession.follow`."""
        return AsyncRemoteTurnStream(self._engine, partial(_follow, self._engine.transport, self.id, turn_id))

    @asynccontextmanager
    async def socket(self) -> AsyncIterator[Self]:
        """See `RemoteSession.socket`."""
        transport = SocketTransport(self._engine.transport, self.id)
        try:
            await asyncio.wrap_future(transport.open())
            yield type(self)(self._engine, SessionCore(EngineCore(transport), self.id))
        finally:
            await asyncio.to_thread(transport.close)

    if TYPE_CHECKING:

        def turn(self, input: Input = (), **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream: ...  # noqa: A002 - as there
        def chat(self, text: str, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream: ...
        async def append(self, input: Input, **options: Unpack[RemoteOptions]) -> TurnResult: ...  # noqa: A002 - as there
        def regenerate(self, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream: ...


class AsyncRemoteEngine(AsyncClient[AsyncRemoteSession]):
    """The asynchronous `RemoteEngine`, created by `tenuto.connect_async`."""

    session_type = AsyncRemoteSession

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.transport = HttpTransport(url, api_key)
        super().__init__(self.transport)

    async def context_length(self) -> int:
        """Returns the maximum number of tokens of a session's history."""
        return await asyncio.wrap_future(self._core.context_length())

    if TYPE_CHECKING:

        def generate(self, input: Input, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream: ...  # noqa: A002 - as there


def _follow(transport: HttpTransport, session: str, turn_id: str, deliver: Deliver) -> TurnReader:
    return TurnReader(transport.follow(session, turn_id, deliver))
