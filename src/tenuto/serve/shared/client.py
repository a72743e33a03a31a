"""An extension of ASGI that our protocol offers: cheaper ways to write parts of an answer and to notice disconnects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "tenuto.client"


class Client:
    """The connection on which a request came. `unframed`: the answer is not chunked and ends with the connection."""

    __slots__ = ("_cycle", "_events", "_flow", "_gone", "_transport", "unframed")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.unframed = False
        self._events = False  # the answer is a stream of events
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._gone: Callable[[], None] | None = None

    def write(self, part: bytes) -> bool:
        """Writes a part of the answer's body, which has begun and is not complete, as uvicorn would. Returns False,
        without writing, if the buffers are full. Ignored if the client has gone."""
        cycle = self._cycle
        framed = cycle.chunked_encoding  # unset before the body and for HEAD
        if cycle.disconnected or not (framed or self.unframed):
            return True
        if self._flow.write_paused:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if framed else part)
        return True

    def begin_events(self) -> None:
        """Declares that the answer has begun and is a stream of server-sent events."""
        self._events = True

    def probe(self) -> bool:
        """Writes bytes that a client ignores, since writing shows whether it is gone. Returns False if nothing can be
        written."""
        cycle = self._cycle
        if not cycle.response_started:
            if cycle.scope["http_version"] == "1.0":
                return False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self._events:
            self.write(b":\n\n")  # a comment
        return True

    async def drain(self) -> None:
        """Waits until the buffers have room, or the client has gone."""
        await self._flow.drain()

    def watch(self, gone: Callable[[], None] | None) -> bool:
        """Sets the function to call when the client disconnects; `None` removes it. Returns False if that is not
        possible, since the client has disconnected or part of its request is unread."""
        self._gone = gone
        self._flow.resume_reading()  # as uvicorn does when the application waits for a disconnect
        return not (self._cycle.disconnected or self._cycle.more_body or self._cycle.body)

    def cut(self) -> None:
        """Breaks the connection in the middle of an answer, so that the client sees that the rest is missing."""
        self._cycle.disconnected = True
        self._transport.abort()

    def lost(self) -> None:
        """Reports that the connection is lost."""
        if self._gone is not None:
            self._gone()


def answer_unframed(cycle: RequestResponseCycle, client: Client) -> None:
    """Lets an answer of unknown length end with the connection, for clients of HTTP/1.0, which has no chunks."""
    send = cycle.send

    async def send_unframed(message: Any) -> None:
        if message["type"] == "http.response.start":
            lengths = [value for name, value in message["headers"] if name.lower() == b"content-length"]
            bodiless = cycle.scope["method"] == "HEAD" or message["status"] in (204, 304)
            client.unframed = not lengths and not bodiless
            if client.unframed:
                cycle.chunked_encoding = False
        elif client.unframed:
            cycle.expected_content_length = len(message.get("body", b""))  # exactly this part
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign] # looked up when the request's task begins


def client_of(scope: Scope) -> Client | None:
    """Returns the client of a request, or `None` if the application runs on another server."""
    client: Client | None = scope.get("extensions", {}).get(EXTENSION)
    return client
