"""Bounds on HTTP connections before a request is complete: their number, and the size, number and time of headers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from tenuto.base.errors import HeadersTooLarge, InvalidRequest, RequestTimeout, ServerFull, TenutoError
from tenuto.serve.shared.client import EXTENSION, Client, answer_unframed
from tenuto.serve.shared.errors import ErrorForm, Failure, new_request_id
from tenuto.serve.unread import ARRIVING_SECONDS, WRITE_BUFFER_BYTES, WatchedConnection

log = structlog.get_logger("tenuto.http")

MAX_HEADER_BYTES = 2**16
"""Maximum bytes in a request's line and headers, after a chunked body, or between two of its chunks."""
MAX_HEADERS = 256
SLICE_BYTES = 2**14
"""Bytes parsed before the limits are checked."""
REST_SECONDS = 5.0
"""Time for which a client may go on sending the body of a request that was already answered."""
PROBE_SECONDS = (0.05, 0.2, 1.0, 5.0)
"""Times between probes of a client that has closed its half of the connection; the last is repeated."""
NEW_SECONDS = 5.0
"""Time that a new connection has to begin a request although the server is ending. A busy client may need seconds."""
LINGER_SECONDS = 1.0
"""Time a refused connection is still read, or one that does not answer pings is still written to: closing it at once
might lose the answer."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`connections`: maximum number open at once. `header_seconds`: maximum time from the opening of a connection, or
    the start of its next request, until the request's headers are complete."""

    connections: int
    header_seconds: float


class BoundedSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSockets, with a small buffer. A client that does not read does not answer pings either, and is
    disconnected, although it has not read what was sent before."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def keepalive_timeout(self) -> None:
        """Closes the connection. uvicorn alone would first wait, for any time, until the client has read everything."""
        super().keepalive_timeout()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)


class BoundedProtocol(WatchedConnection):
    """uvicorn's httptools protocol, with the bounds of this module.

    Invariant: `_timer` runs while the connection is not a WebSocket, no answer is in progress, and the client has yet
    to send the rest of its headers, or of a body that was answered early. The application itself times a body that it
    waits for.

    `closing`: `shutdown` was called, since the server is ending.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        refused: Callable[[int], None],
        form_of: Callable[[str], ErrorForm],
        /,
        **uvicorn: Any,
    ) -> None:
        """`refused` is called with the status of every refusal made here. `form_of` returns the error form of a
        path."""
        super().__init__(**uvicorn)
        self.url = b""  # until a request begins
        self._limits = limits
        self._refused = refused
        self._form_of = form_of
        self._timer: asyncio.TimerHandle | None = None
        self._excess: TenutoError | None = None  # why the parser was stopped
        self._opened = 0.0  # the loop's time when the client connected
        self._ended = False  # refused; further data is ignored
        self.closing = False
        self._begun = False  # part of a request has arrived
        self._in_body = False  # the request's headers are complete
        self._around = 0  # bytes since the request began, or since its last byte of body
        self._client: Client | None = None  # client of the last request
        self._half_closed = False  # the client sends no more, and may still read
        self._probing: asyncio.TimerHandle | None = None  # set while the connection is half closed

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's is
        super().connection_made(transport)
        self._opened = self.loop.time()
        if len(self.connections) > self._limits.connections:
            self._refuse(ServerFull(f"{self._limits.connections} connections are open, the most allowed"))
            transport.close()
        else:
            self._await_headers()

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn's closes every connection
        """Handles the end of the client's data: it has gone, or has closed only its half of the connection and waits
        for its answer. Writing shows which, for a client that has gone resets the connection. Returns True to keep it
        open."""
        if self._ended or not self._answering or self.cycle.more_body or self.pipeline or self._client is None:
            return False
        self._half_closed = self._client.probe()
        if self._half_closed:
            self._probe_later(0)
        return self._half_closed

    def _probe_later(self, number: int) -> None:
        delay = PROBE_SECONDS[min(number, len(PROBE_SECONDS) - 1)]
        self._probing = self.loop.call_later(delay, self._probe, number + 1)

    def _probe(self, number: int) -> None:
        if self._client is not None and self._answering and not self.transport.is_closing():
            self._client.probe()
            self._probe_later(number)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)
        if self._client is not None:
            self._client.lost()

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), SLICE_BYTES):
            if self._ended or self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            if not self._in_body and not self._answering:
                self._await_headers()
            self._begun = True
            part = data[at : at + SLICE_BYTES]
            self._around += len(part)
            super().data_received(part)
            if self._around > MAX_HEADER_BYTES:
                self._refuse(HeadersTooLarge(f"the headers have more than {MAX_HEADER_BYTES} bytes, the most allowed"))

    # -- called by the parser

    def on_message_begin(self) -> None:
        self._await_headers()
        self._begun, self._around = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._excess = HeadersTooLarge(f"there are more than {MAX_HEADERS} headers, the most allowed")
            raise self._excess  # stops the parser

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_body, self._around = True, 0
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:  # the connection becomes a WebSocket
            return
        if self.closing:
            self.cycle.keep_alive = False
        self._client = Client(self.cycle)
        self.cycle.scope["extensions"] = {EXTENSION: self._client}  # type: ignore[dict-item] # see `Client`
        if self.cycle.scope["http_version"] == "1.0":
            answer_unframed(self.cycle, self._client)

    def on_body(self, body: bytes) -> None:
        self._around = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._begun, self._in_body, self._around = False, False, 0
        super().on_message_complete()
        if not self._answering:
            self._await_headers()

    def handle_websocket_upgrade(self) -> None:
        """Leaves the connection to its WebSocket, which may be silent for any time."""
        self._stop_timer()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Refuses the request after the parser was stopped or failed."""
        self._refuse(self._excess if self._excess is not None else InvalidRequest(msg))

    # -- time

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed:
            self.transport.close()
        if self._in_body and not self._answering and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._close_after(REST_SECONDS)

    def _await_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.header_seconds, self._headers_are_late)

    def _headers_are_late(self) -> None:
        self._timer = None
        if self.flow.read_paused or self._answering:  # perhaps we have not read them yet
            self._await_headers()
        elif self._begun:
            self._refuse(RequestTimeout(f"the headers were incomplete after {self._limits.header_seconds:g} seconds"))
        elif self.arriving:
            self._await_headers()
        else:
            self.transport.close()

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the end

    def shutdown(self) -> None:
        """Closes the connection once it is idle. A request that is arriving, or that a client which has just connected
        is about to send, is answered first."""
        if self.transport.is_closing():
            return
        self.closing = True
        cycle: RequestResponseCycle | None = self.cycle
        new = cycle is None and self.loop.time() < self._opened + NEW_SECONDS
        if not self._answering and not self._ended and (new or self._begun or self.arriving):
            self.loop.call_later(ARRIVING_SECONDS, self.shutdown)
        else:
            if not self._answering:
                self.end()
            super().shutdown()

    def _refuse(self, error: TenutoError) -> None:
        """Answers with an error, unless another answer is in progress, and closes the connection."""
        if self._ended or self.transport.is_closing():
            return
        self._ended = True
        if self._answering:
            if not self._in_body or self.pipeline or self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # ends the application's wait for the body
            self.cycle.message_event.set()
        failure, request_id = Failure.of(error), new_request_id()
        form = self._form_of(self.url.partition(b"?")[0].decode("latin-1"))  # the part that has arrived
        body = msgspec.json.encode(form.body(failure, request_id))
        ids = dict.fromkeys(form.id_headers, request_id)
        headers = {**failure.headers, **ids, "content-type": "application/json", "connection": "close"}
        lines = [f"{name}: {value}\r\n" for name, value in {**headers, "content-length": len(body)}.items()]
        self.transport.write(STATUS_LINE[failure.status] + "".join(lines).encode() + b"\r\n" + body)
        self.transport.write_eof()
        self._close_after(LINGER_SECONDS)
        log.info("refused", status=failure.status, reason=failure.code, request_id=request_id)
        self._refused(failure.status)
