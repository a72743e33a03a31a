"""Server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tenuto.base.errors import TenutoError

T = TypeVar("T")

_json = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"
"""The end of a stream in OpenAI's and SGLang's interfaces."""


def data(value: Any) -> bytes:
    """An event with only JSON data."""
    return b"data: " + _json.encode(value) + b"\n\n"


def event(name: str, value: Any, number: int | None = None) -> bytes:
    """An event with a name, JSON data and, if given, a number to resume from."""
    head = f"event: {name}\ndata: " if number is None else f"event: {name}\nid: {number}\ndata: "
    return head.encode() + _json.encode(value) + b"\n\n"


class EventStream(Response):
    """Sends events as they come. `on_close` is called once, when all are sent or the client has gone."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], on_close: Callable[[], None], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI interface
        try:
            with suppress(ClientDisconnect):
                await _until_disconnected(receive, self._send(send))
        finally:
            await self._events.aclose()  # type: ignore[attr-defined] # an async generator: its readers are counted
            self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. If the client disconnects first, `work` is cancelled and `ClientDisconnect` raised."""
    return await _until_disconnected(request.receive, work)


async def _disconnected(receive: Receive) -> None:
    with suppress(TenutoError):  # a body that is too large, or never ends, counts as a disconnect
        while (await receive())["type"] != "http.disconnect":
            pass


async def _until_disconnected(receive: Receive, work: Awaitable[T]) -> T:
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
