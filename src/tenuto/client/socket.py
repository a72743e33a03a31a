"""The WebSocket of a session on a server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from tenuto.base.errors import Disconnected
from tenuto.client.connection import Connection
from tenuto.client.sse import ServerEvent
from tenuto.client.wire import encode, error_from, session_path

OnEvent = Callable[[ServerEvent], None]

ENDS = ("committed", "aborted", "error", "answer")
"""The events that end the answer to a message."""
MAX_ABORTS = 8
"""Maximum number of unanswered aborts: half of the messages that a server lets wait."""
NO_HEADERS: Mapping[str, str] = {}


class _Told(msgspec.Struct):
    """A message from the server. `id`: that of an event of a stream. `status`: that of an answer."""

    event: str
    data: msgspec.Raw
    request_id: str = ""
    id: int | None = None
    status: int = 500


class _Asked(NamedTuple):
    """An unanswered message. `answer` gets the data of the last event; then `place` is released."""

    answer: asyncio.Future[bytes]
    on_event: OnEvent | None
    place: asyncio.Semaphore


class SessionSocket:
    """The WebSocket of one session. A message is sent once the one before it has been answered; only an abort
    overtakes. Its coroutines run in the connection's thread.

    Invariant: each entry of `_asked` holds its place, also after its caller has left.
    """

    def __init__(self, connection: Connection, session: str) -> None:
        self._ended: str | None = None  # why it can send no message; set once
        self._connection = connection
        self._path = f"{session_path(session)}/socket"
        self._prefix, self._numbers = secrets.token_hex(8), count(1)  # of the ids of messages
        self._in_order, self._overtaking = asyncio.Semaphore(1), asyncio.Semaphore(MAX_ABORTS)
        self._asked: dict[str, _Asked] = {}
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connects. Raises the server's error or `Unreachable`."""
        socket = await self._connection.socket(self._path)
        self._running = asyncio.create_task(self._run(socket))

    async def close(self) -> None:
        """Disconnects. The server rolls back the turn in progress, unless it may continue without a reader."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def ask(
        self, kind: str, body: Any, headers: Mapping[str, str] = NO_HEADERS, on_event: OnEvent | None = None
    ) -> Any:
        """Sends a message of this type in its turn, and returns the data of the last event that answers it. `on_event`
        gets all events. Raises the server's error or `Disconnected`."""
        name = f"{self._prefix}-{next(self._numbers)}"
        fields = {field.replace("-", "_"): value for field, value in headers.items()}
        message = encode({**body, **fields, "type": kind, "request_id": name})
        place = self._overtaking if kind == "abort" else self._in_order
        await place.acquire()
        if self._ended is not None:
            place.release()
            raise Disconnected(self._ended)
        asked = _Asked(asyncio.get_running_loop().create_future(), on_event, place)
        self._asked[name] = asked
        self._unsent.put_nowait(message)
        return msgspec.json.decode(await asked.answer)

    async def _run(self, socket: ClientConnection) -> None:
        """Passes messages on until the connection ends."""
        sending, reason = asyncio.create_task(self._send(socket)), "it was closed"
        try:
            async for message in socket:
                self._take(msgspec.json.decode(message, type=_Told))
            reason = "the server closed it"
        except (ConnectionClosed, msgspec.DecodeError) as error:
            reason = str(error)
        finally:
            sending.cancel()
            self._end(f"the session's WebSocket has ended: {reason}")
            await socket.close()

    async def _send(self, socket: ClientConnection) -> None:
        with suppress(ConnectionClosed):  # `_run` meets it, too
            while True:
                await socket.send(await self._unsent.get(), text=True)

    def _take(self, told: _Told) -> None:
        """Passes an event on to the caller, unless it has left."""
        name = told.request_id or self._current()
        if (asked := self._asked.get(name)) is None:
            return
        if not asked.answer.done():
            try:
                self._pass_on(told, asked)
            except Exception as error:  # noqa: BLE001 - the caller must get it
                asked.answer.set_exception(error)
        if told.event in ENDS:
            del self._asked[name]
            asked.place.release()
            if not asked.answer.done():
                asked.answer.set_result(bytes(told.data))

    def _current(self) -> str:
        """Returns the id of the message that a server means which could not read the id."""
        return next((name for name, asked in self._asked.items() if asked.place is self._in_order), "")

    def _pass_on(self, told: _Told, asked: _Asked) -> None:
        if told.event == "error":
            raise error_from(told.status, bytes(told.data))
        if asked.on_event is not None:
            number = str(told.id) if told.id is not None else ""
            asked.on_event(ServerEvent(told.event, bytes(told.data).decode(), number))

    def _end(self, reason: str) -> None:
        self._ended = reason
        for asked in self._asked.values():
            asked.place.release()
            if not asked.answer.done():
                asked.answer.set_exception(Disconnected(reason))
        self._asked.clear()
