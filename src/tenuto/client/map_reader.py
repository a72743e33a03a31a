"""Follows the map of a server, and acts on its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from typing import Literal

import msgspec

from tenuto.base.errors import Disconnected, Forbidden, TenutoError, Unauthorized
from tenuto.base.map_feed import Change, Picture, ShownSession
from tenuto.client.connection import Connection
from tenuto.client.sse import EventParser, ServerEvent
from tenuto.client.wire import error_from, valid_answer

Event = Picture | Change | TenutoError
Action = Literal["abort", "park", "close"]

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 5.0

_picture = msgspec.json.Decoder(Picture)
_change = msgspec.json.Decoder(Change)


class MapReader:
    """The feed of the map of a server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._events = _follow(connection)
        self._reading: asyncio.Task[Event] | None = None

    def next(self) -> Future[Event]:
        """Returns the next event: all of the map, changes, or the error that has broken the feed. After an error it
        connects again, and the next event is a `Picture`. The future raises the error of the first attempt, and later
        `Unauthorized` and `Forbidden`. Ask for one event at a time."""
        return self._connection.call(self._next())

    def act(self, action: Action, session: ShownSession) -> Future[None]:
        """Aborts the session's open turn, parks the session, or closes it. The future raises the server's error."""
        body = {"action": action, "session": session.id, "tenant": session.tenant}
        return self._connection.call(self._connection.ask("POST", "/map/action", body))

    def close(self) -> None:
        """Ends the feed, before its connection is closed. A future of `next` that is not done is cancelled."""
        self._connection.call(self._end()).result()

    async def _next(self) -> Event:
        self._reading = asyncio.current_task()
        return await anext(self._events)

    async def _end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._events.aclose()


async def _follow(connection: Connection) -> AsyncGenerator[Event]:
    pause, begun = FIRST_PAUSE, False
    while True:
        try:
            async with aclosing(_of_one_request(connection)) as events:
                async for event in events:
                    yield event
                    pause, begun = FIRST_PAUSE, True
            raise Disconnected("the server has ended the feed of the map")
        except TenutoError as error:
            if not begun or isinstance(error, Unauthorized | Forbidden):
                raise
            yield error
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _of_one_request(connection: Connection) -> AsyncGenerator[Event]:
    parser = EventParser()
    async with connection.stream("GET", "/map/feed", headers={"accept": "text/event-stream"}) as response:
        async for piece in response.aiter_bytes():
            for event in parser.feed(piece):
                yield _read(event)


def _read(event: ServerEvent) -> Event:
    """Raises the error that the event has."""
    if event.name == "error":
        raise error_from(503, b'{"error":%b}' % event.data.encode())
    with valid_answer():
        return _picture.decode(event.data) if event.name == "map" else _change.decode(event.data)
