"""Engines on servers: both faces over HTTP, with the operations that only a server has."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Unpack

from tenuto.base.options import RemoteOptions
from tenuto.base.turns import Input, TurnResult
from tenuto.client.aio import AsyncClient, AsyncSession, AsyncTurnStream
from tenuto.client.core import TurnReader
from tenuto.client.http import HttpTransport
from tenuto.client.sync import Client, Session, TurnStream
from tenuto.client.transport import Deliver


def connect(url: str, api_key: str | None = None) -> RemoteEngine:
    """The sessions of the server at `url`, as those of a `tenuto.Engine`. Nothing is asked of the server before the
    first operation; each may raise `Unreachable`, `Disconnected` or `Unauthorized` besides its own errors."""
    return RemoteEngine(url, api_key)


def connect_async(url: str, api_key: str | None = None) -> AsyncRemoteEngine:
    """See `connect`. There is nothing to await yet: `async with tenuto.connect_async(url) as engine`."""
    return AsyncRemoteEngine(url, api_key)


class RemoteTurnStream(TurnStream):
    """As `TurnStream`, of a turn on a server."""

    @property
    def turn_id(self) -> str | None:
        """What the server calls the turn; `RemoteSession.follow` finds it by that."""
        return self._reader.running.turn_id


class RemoteSession(Session):
    """As `Session`, on a server. `RemoteOptions` says what a broken connection does to its turns."""

    stream_type: ClassVar[type[TurnStream]] = RemoteTurnStream
    _engine: RemoteEngine

    def follow(self, turn_id: str) -> RemoteTurnStream:
        """The stream of a turn that runs or ended lately, from its beginning. Dropping it leaves the turn running, if
        that has other readers or is to continue without. Raises `NotFound`."""
        return RemoteTurnStream(self._engine, partial(_follow, self._engine.transport, self.id, turn_id))

    if TYPE_CHECKING:  # as those of `Session`, with the options that a server takes

        def turn(self, input: Input = (), **options: Unpack[RemoteOptions]) -> RemoteTurnStream: ...  # noqa: A002 - as there
        def chat(self, text: str, **options: Unpack[RemoteOptions]) -> RemoteTurnStream: ...
        def append(self, input: Input, **options: Unpack[RemoteOptions]) -> TurnResult: ...  # noqa: A002 - as there
        def regenerate(self, **options: Unpack[RemoteOptions]) -> RemoteTurnStream: ...


class RemoteEngine(Client[RemoteSession]):
    """A server's engine. Made by `tenuto.connect`; close it, or use it as a context manager. Forks and trims, too,
    close with it if they have no name."""

    session_type = RemoteSession

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.transport = HttpTransport(url, api_key)
        super().__init__(self.transport)

    if TYPE_CHECKING:

        def generate(self, input: Input, **options: Unpack[RemoteOptions]) -> RemoteTurnStream: ...  # noqa: A002 - as there


class AsyncRemoteTurnStream(AsyncTurnStream):
    """As `RemoteTurnStream`, to be awaited."""

    @property
    def turn_id(self) -> str | None:
        """See `RemoteTurnStream.turn_id`; `None` until the server has accepted the turn."""
        return self._reader.running.turn_id


class AsyncRemoteSession(AsyncSession):
    """As `RemoteSession`, to be awaited."""

    stream_type: ClassVar[type[AsyncTurnStream]] = AsyncRemoteTurnStream
    _engine: AsyncRemoteEngine

    def follow(self, turn_id: str) -> AsyncRemoteTurnStream:
        """See `RemoteSession.follow`."""
        return AsyncRemoteTurnStream(self._engine, partial(_follow, self._engine.transport, self.id, turn_id))

    if TYPE_CHECKING:

        def turn(self, input: Input = (), **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream: ...  # noqa: A002 - as there
        def chat(self, text: str, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream: ...
        async def append(self, input: Input, **options: Unpack[RemoteOptions]) -> TurnResult: ...  # noqa: A002 - as there
        def regenerate(self, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream: ...


class AsyncRemoteEngine(AsyncClient[AsyncRemoteSession]):
    """As `RemoteEngine`, to be awaited. Made by `tenuto.connect_async`."""

    session_type = AsyncRemoteSession

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.transport = HttpTransport(url, api_key)
        super().__init__(self.transport)

    async def context_length(self) -> int:
        """The most tokens a session's history may have."""
        return await asyncio.wrap_future(self._core.context_length())

    if TYPE_CHECKING:

        def generate(self, input: Input, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream: ...  # noqa: A002 - as there


def _follow(transport: HttpTransport, session: str, turn_id: str, deliver: Deliver) -> TurnReader:
    return TurnReader(transport.follow(session, turn_id, deliver))
