"""The transport of a session over its WebSocket, and the turns that it starts."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from tenuto.base.errors import Disconnected, EngineStopped
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Delta
from tenuto.base.views import Compacted
from tenuto.base.wire.messages import AbortTurn, Draft, Rewind, StartTurn
from tenuto.base.wire.request import Request
from tenuto.client.connection import Connection
from tenuto.client.feed import Feed, Source
from tenuto.client.http import HttpTransport, source_of
from tenuto.client.socket import SessionSocket
from tenuto.client.sse import ServerEvent
from tenuto.client.transport import Deliver, Options, RunningTurn
from tenuto.client.wire import SERVER_OPTIONS, answer_from, exchange_of

T = TypeVar("T")

_TYPES: dict[type, str] = {Draft: "draft", AbortTurn: "abort", Rewind: "rewind"}
"""The types of the messages that requests become."""


class SocketTransport:
    """Sends the turns, drafts, aborts and rewinds of `session` over its WebSocket, and everything else over `http`.
    Closing it closes only the WebSocket."""

    options = SERVER_OPTIONS

    def __init__(self, http: HttpTransport, session: str) -> None:
        self._http = http
        self._session = session
        self._socket = SessionSocket(http.connection, session)

    def open(self) -> Future[None]:
        """Connects. The future gets the server's error or `Unreachable`."""
        return self._http.connection.call(self._socket.open())

    def end(self) -> Future[None]:
        """Disconnects; see `SessionSocket.close`. Raises `EngineStopped` if the client was closed."""
        return self._http.connection.call(self._socket.close())

    def call(self, request: Request[T]) -> Future[T]:
        if (kind := _TYPES.get(type(request))) is None or not self._concerns(request):
            return self._http.call(request)
        return self._http.connection.call(self._ask(kind, request))

    async def _ask(self, kind: str, request: Request[T]) -> T:
        return answer_from(request, await self._socket.ask(kind, exchange_of(request).body))

    def _concerns(self, request: Any) -> bool:
        return bool(request.session == self._session)

    def start(self, request: StartTurn, options: Options, use: ToolUse | None, deliver: Deliver) -> RunningTurn:
        if not self._concerns(request):
            return self._http.start(request, options, use, deliver)
        return SocketTurn(self._http.connection, self._socket, source_of(request, options, use), deliver)

    def compact(self, session: str, first: int, last: int | None, options: Options) -> Future[Compacted]:
        return self._http.compact(session, first, last, options)

    def request_stop(self) -> None:
        with suppress(EngineStopped):
            self.end()

    def close(self) -> None:
        with suppress(EngineStopped, CancelledError):  # the second: the client is closed meanwhile
            self.end().result()


class SocketTurn(Feed):
    """A turn over a session's WebSocket. If that breaks, and the turn continues without it, it is read over HTTP."""

    def __init__(self, connection: Connection, socket: SessionSocket, source: Source, deliver: Deliver) -> None:
        self._socket = socket
        self._tried = False  # whether it was started over the WebSocket
        self._left = False  # whether its reader is gone
        if source.action != "append":  # as the server has it: a repetition over HTTP must have the same body
            source = replace(source, body={**(source.body or {}), "stream": True})
        super().__init__(connection, source, deliver)

    def disconnect(self) -> None:
        """Ends the turn, unless it continues without a reader. The WebSocket stays."""
        if self._source.continues or self._source.action == "append":  # nobody can abort an append, which has no id yet
            super().disconnect()
        elif not (self._left or self.ended.done()):
            self._left = True
            self.abort(None)

    async def _abort(self, body: dict[str, Any]) -> Any:
        try:
            return await self._socket.ask("abort", body)
        except Disconnected:
            if not self._source.continues:
                raise
        return await super()._abort(body)

    async def _append(self) -> Any:
        return await self._socket.ask("append", self._source.body, self._source.headers)

    async def _read(self) -> Delta:
        if self._tried:
            return await super()._read()
        self._tried, last = True, list[Delta]()

        def take(event: ServerEvent) -> None:
            if (ended := self._read_event(event)) is not None:
                last.append(ended)

        kind = "turn" if self._source.action == "turns" else self._source.action
        await self._socket.ask(kind, self._source.body, self._starting, take)
        return last[0] if last else await self._look_up()
