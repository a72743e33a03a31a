"""Answers to requests that start turns, whole or as server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tenuto.base.errors import TenutoError
from tenuto.base.turns import Delta
from tenuto.serve.shared.client import Client, client_of
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.live_turn import LiveTurn

T = TypeVar("T")

_json = msgspec.json.Encoder()

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
"""The types of streams: server-sent events, and lines of JSON."""
DONE = b"data: [DONE]\n\n"
"""The end of a stream in OpenAI's and SGLang's interfaces."""


def data(value: Any) -> bytes:
    """Returns an event with only JSON data."""
    return b"data: " + _json.encode(value) + b"\n\n"


def line(value: Any) -> bytes:
    """Returns a line of JSON."""
    return _json.encode(value) + b"\n"


def event(name: str, value: Any, number: int | None = None) -> bytes:
    """Returns an event with a name, JSON data and, if given, a number to resume from."""
    if number is None:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), _json.encode(value))
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name.encode(), number, _json.encode(value))


Chunk = bytes | Callable[[], Awaitable[bytes]]
"""A chunk of a stream, or a coroutine function that makes one with the engine's help."""


class Answer(ABC):
    """The answer to a request that started `turns`, in some API's form. Used once, for a stream or as a whole.
    `media_type`: that of a stream."""

    media_type: ClassVar[str] = EVENTS

    def __init__(self, edge: Edge, turns: Sequence[LiveTurn]) -> None:
        self.turns = turns
        self._edge = edge

    @abstractmethod
    async def whole(self) -> Any:
        """Returns the whole answer once the turns have ended. Raises the error that a turn ended with."""

    def leave(self) -> None:
        """Called once, when the answer is complete or the client has gone."""
        for turn in self.turns:
            self._edge.turns.abandon(turn)

    # -- the answer as server-sent events

    def opening(self) -> bytes:
        """Returns the events before any output."""
        return b""

    @abstractmethod
    def news(self, index: int, deltas: list[Delta]) -> Chunk:
        """Returns the events for the next `deltas` of a turn; may be empty. Raises the error that should end the
        stream."""

    def closing(self) -> Chunk:
        """Returns the events after the ends of all turns. Raises the error that should end the stream instead, as does
        the coroutine function."""
        return b""

    @abstractmethod
    def failed(self, error: TenutoError) -> bytes:
        """Returns the events that end the stream after an error."""


class EventStream(Response):
    """Sends the events of an answer as they come.

    Events that come when all earlier ones are sent, nearly always the case, are written right where they are delivered:
    waking the request's task would take longer than all the rest. The task sends the beginning, the end, and events
    that have to wait.
    """

    def __init__(self, answer: Answer, position: int = 0) -> None:
        """`position`: number of deltas of every turn that were read before."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers, answer.media_type)
        del self.headers["content-length"]
        self._answer = answer
        self._turns = answer.turns
        self._positions = [position] * len(answer.turns)
        self._client: Client | None = None
        self._waiting: asyncio.Future[None] | None = None  # set while the task waits for more deltas
        self._left: Chunk = b""  # a chunk for the task to send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._client = client_of(scope)
        try:
            with suppress(ClientDisconnect):
                await until_disconnected(scope, receive, self._send(send))
        finally:
            self._answer.leave()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._client is not None and self._answer.media_type == EVENTS:
            self._client.begin_events()
        with self._listening():
            try:
                await self._put(self._answer.opening(), send)
                await self._follow(send)
                last = await _made(self._answer.closing())
            except TenutoError as error:
                last = self._answer.failed(error)
        await self._put(last, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, send: Send) -> None:
        """Sends the turns' events up to their ends. Raises the error that a turn ends with."""
        while True:
            for index in range(len(self._turns)):
                if not self._read(index):
                    await self._put(self._news(index), send)
            if all(map(self._read, range(len(self._turns)))):
                for turn in self._turns:
                    if turn.error is not None:
                        raise turn.error
                if all(turn.ended for turn in self._turns):
                    return
                self._waiting = asyncio.get_running_loop().create_future()
                try:
                    await self._waiting
                finally:
                    self._waiting = None
                left, self._left = self._left, b""
                await self._put(left, send)

    async def _put(self, part: Chunk, send: Send) -> None:
        part = await _made(part)
        if not part:
            return
        if self._client is None:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            return
        while not self._client.write(part):
            await self._client.drain()

    # -- deliveries

    @contextmanager
    def _listening(self) -> Iterator[None]:
        heard = [(turn, partial(self._heard, index, turn)) for index, turn in enumerate(self._turns)]
        for turn, listener in heard:
            turn.listeners.append(listener)
            turn.readers += 1
        try:
            yield
        finally:
            for turn, listener in heard:
                turn.listeners.remove(listener)
                turn.readers -= 1

    def _heard(self, index: int, turn: LiveTurn) -> None:
        """Sends a turn's new events, or leaves them to the task."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        if self._client is not None and turn.result is None and turn.error is None:
            try:
                part = self._news(index)
            except Exception as error:  # noqa: BLE001 - ends this stream only, not the other deliveries
                waiting.set_exception(error)
                return
            if isinstance(part, bytes) and (not part or self._client.write(part)):
                return
            self._left = part
        waiting.set_result(None)

    def _read(self, index: int) -> bool:
        """Whether all deltas so far have been read."""
        return self._positions[index] == len(self._turns[index].deltas)

    def _news(self, index: int) -> Chunk:
        """Returns the events for a turn's new deltas."""
        deltas = self._turns[index].deltas
        new = deltas[self._positions[index] :]
        self._positions[index] = len(deltas)
        return self._answer.news(index, new)


async def _made(part: Chunk) -> bytes:
    return part if isinstance(part, bytes) else await part()


async def respond(request: Request, answer: Answer, *, stream: bool | None) -> Response:
    """Returns the response with an answer, streamed or whole."""
    if stream:
        return EventStream(answer)
    try:
        whole = await while_connected(request, answer.whole())
    finally:
        answer.leave()
    return Response(_json.encode(whole), media_type="application/json")


def streamed(description: str, kind: str = EVENTS) -> dict[int | str, dict[str, Any]]:
    """Returns the documentation of a route's answer, whole or as a stream of this kind."""
    content: dict[str, Any] = {media: {"schema": {}} for media in ("application/json", kind)}
    return {200: {"description": description, "content": content}}


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises `ClientDisconnect`."""
    return await until_disconnected(request.scope, request.receive, work)


async def until_disconnected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The same for the request with this scope."""
    client, task = client_of(scope), asyncio.current_task()
    assert task is not None
    gone = False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    if client is None or not client.watch(leave):
        return await _watching(receive, work)
    try:
        result = await work
    except asyncio.CancelledError:
        if gone and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        client.watch(None)
    if gone:  # although the work was completed
        task.uncancel()
        raise ClientDisconnect
    return result


async def _watching(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The implementation of `until_disconnected` with plain ASGI."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


async def _disconnected(receive: Receive) -> None:
    with suppress(TenutoError):  # a body that is too large, or never ends, counts as a disconnect
        while (await receive())["type"] != "http.disconnect":
            pass
