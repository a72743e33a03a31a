"""WebSockets: every message asks for what a route does, and the application answers it as a request to that route. So
keys, limits, errors and the log are the same as for requests over HTTP."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.types import Message, Scope

from tenuto.base.errors import Disconnected, Forbidden, InvalidRequest, TenutoError
from tenuto.serve.shared.bodies import LARGE, Structure, in_parser, parsed
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import OPENAI_FORM, Failure, new_request_id
from tenuto.serve.shared.invalid import refusal_of
from tenuto.serve.shared.schemas import Object
from tenuto.serve.shared.settings import ServeSettings, Tenant

MAX_WAITING = 256
"""Maximum number of messages of a client that are not answered yet; together they may be as long as one body."""
TOO_MANY = 1008
"""WebSocket's code for messages that violate a policy (RFC 6455, section 7.4.1)."""
PIECE_BYTES = 2**16
REQUEST_ID = b"x-request-id"
NO_HEADERS: Mapping[str, str] = {}

Fields = dict[str, msgspec.Raw]
"""The fields of a message, each as JSON."""
Read = Fields | TenutoError
"""A message, or why it cannot be read."""


async def opened(socket: WebSocket, check: Callable[[Edge, Tenant], Awaitable[object]]) -> tuple[Edge, Tenant] | None:
    """Accepts a client. `check` may raise the reason not to; the client then gets it as an HTTP answer, and the result
    is `None`."""
    edge: Edge = socket.app.state.edge
    try:
        _check_origin(socket, edge.settings)
        tenant = edge.tenant(socket.headers)
        await check(edge, tenant)
    except TenutoError as error:
        failure = Failure.of(error)
        body = OPENAI_FORM.body(failure, new_request_id())
        await socket.send_denial_response(JSONResponse(body, failure.status, failure.headers))
        return None
    await socket.accept()
    return edge, tenant


def _check_origin(socket: WebSocket, settings: ServeSettings) -> None:
    """Raises `Forbidden` for pages of other origins: browsers let any page open a WebSocket."""
    origin = socket.headers.get("origin")
    if origin is None or "*" in settings.allowed_origins or origin.lower() in settings.allowed_origins:
        return
    if urlsplit(origin).netloc.lower() != socket.headers.get("host", "").lower():
        raise Forbidden("pages of this origin may not use the server; see --allowed-origins")


class SocketEvent(NamedTuple):
    """A server-sent event of an answer. `number`: its id as text, if it has one. `data`: JSON."""

    name: str
    number: str
    data: bytes


OnEvent = Callable[[SocketEvent], Awaitable[None]]


class Refused(Exception):
    """The application has refused a request on a socket."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Service(ABC):
    """The answers to one client's messages, given one after the other. Only a message for which `overtakes` is true is
    answered at once."""

    def __init__(self, socket: WebSocket, edge: Edge) -> None:
        self.socket, self.edge = socket, edge
        self._waiting: asyncio.Queue[tuple[Read, int] | None] = asyncio.Queue()  # with their bytes; `None`: no more
        self._unanswered = 0  # messages that wait or are being answered
        self._bytes = 0  # of those that wait
        self._begun: deque[asyncio.Event] = deque()  # one for each message that keeps its place, as in `begun`
        self._overtaking: set[asyncio.Task[None]] = set()
        self._gone = asyncio.Event()

    @abstractmethod
    async def answer(self, fields: Fields) -> None:
        """Answers a message. Raises the error to answer with."""

    @abstractmethod
    def refusal(self, failure: Failure, fields: Fields) -> dict[str, Any]:
        """Returns the message that refuses the one with these fields; empty for one that cannot be read."""

    def overtakes(self, fields: Fields) -> bool:  # noqa: ARG002 - for those that have such messages
        """Whether a message is answered at once, beside earlier ones."""
        return False

    async def serve(self) -> None:
        """Answers messages until the client has left, and none is being answered."""
        reading, answering = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._answer_all())
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._gone.set()
            self._waiting.put_nowait(None)
            reading.cancel()
            try:
                await asyncio.gather(answering, *self._overtaking)
            finally:
                self._count(-self._bytes)

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message, unless the client has left."""
        await self.send_json(msgspec.json.encode(message))

    async def send_json(self, message: bytes) -> None:
        """Sends a message that is JSON already."""
        with suppress(WebSocketDisconnect, RuntimeError):  # the second: a close frame was sent or received
            await self.socket.send_text(message.decode())

    async def _read(self) -> None:
        """Takes messages until the client leaves, or sends too many ahead."""
        while (message := await self.socket.receive())["type"] != "websocket.disconnect":
            data = message.get("bytes") or (message.get("text") or "").encode()
            self._unanswered += 1
            size = len(data)
            most = min(self.edge.settings.max_body_bytes, self.edge.settings.max_bodies_bytes - self.edge.body_bytes)
            if self._unanswered > MAX_WAITING or self._bytes + size > most:
                await self.socket.close(TOO_MANY, "too many messages wait for earlier answers")
                return
            try:
                read: Read = _fields_of(data)
            except TenutoError as error:
                read = error
            if isinstance(read, dict) and self.overtakes(read):
                task = asyncio.ensure_future(self._answer(read))
                self._overtaking.add(task)
                task.add_done_callback(self._overtaking.discard)
            else:
                self._count(size)
                self._begun.append(asyncio.Event())
                self._waiting.put_nowait((read, size))

    def _count(self, size: int) -> None:
        self._bytes += size
        self.edge.body_bytes += size

    async def _answer_all(self) -> None:
        while (waiting := await self._waiting.get()) is not None and not self._gone.is_set():
            read, size = waiting
            self._count(-size)
            try:
                await self._answer(read)
            finally:
                self._begun.popleft().set()

    async def _answer(self, read: Read) -> None:
        try:
            if isinstance(read, TenutoError):
                raise read
            await self.answer(read)
        except (TenutoError, Refused) as error:
            failure = error.failure if isinstance(error, Refused) else Failure.of(error)
            await self.send(self.refusal(failure, read if isinstance(read, dict) else {}))
        finally:
            self._unanswered -= 1

    @property
    def pressed(self) -> bool:
        """Whether messages wait."""
        return not self._waiting.empty()

    async def begun(self) -> None:
        """Waits until the answer to the first of the messages that keep their places has begun, if there is one."""
        if self._begun:
            await self._begun[0].wait()

    def _note_begun(self) -> None:
        if self._begun:
            self._begun[0].set()

    def asked(self, method: str, path: str, body: bytes = b"", on_event: OnEvent | None = None) -> Asked:
        """Returns a request to the application, to be carried out by its `run`. `on_event`: gets the events of a
        stream. The client's departure is a disconnect for it."""
        return Asked(self.socket, self._gone, method, path, body, self._note_begun, on_event)

    async def ask(self, method: str, path: str, value: Any = None, on_event: OnEvent | None = None) -> Any:
        """Carries out a request with a JSON body and returns the JSON of its answer; `None` for a stream. Raises
        `Refused`."""
        body = b"" if value is None else msgspec.json.encode(value)
        asked = self.asked(method, path, body, on_event)
        await asked.run()
        if asked.refused and not asked.body:
            raise Refused(Failure(asked.status, Disconnected.code, "the client has left"))
        if asked.refused:
            raise Refused(Failure.in_body(asked.status, msgspec.json.decode(asked.body)))
        return msgspec.json.decode(asked.body) if asked.body else None


class Asked:
    """A request on a socket, and its answer, as ASGI's messages. `status`: that of the answer; 0 until it has begun.
    `body`: the answer, unless it is a stream."""

    def __init__(
        self,
        socket: WebSocket,
        gone: asyncio.Event,
        method: str,
        path: str,
        body: bytes,
        on_begin: Callable[[], None],
        on_event: OnEvent | None,
    ) -> None:
        self.status = 0
        self.body = b""
        self._socket, self._gone = socket, gone
        self._method, self._path, self._given = method, path, body
        self._on_begin, self._on_event = on_begin, on_event
        self._headers: dict[str, str] = {}
        self._sent = 0

    @property
    def request_id(self) -> str:
        """The request's id, once the answer has begun."""
        return self._headers.get(REQUEST_ID.decode(), "")

    @property
    def refused(self) -> bool:
        """Whether the answer is an error."""
        return self.status >= 400

    async def run(self, headers: Mapping[str, str] = NO_HEADERS, state: Mapping[str, Any] = NO_HEADERS) -> None:
        """Has the application answer. `headers`: added to those of the socket. `state`: that of the request."""
        await self._socket.app(self._scope(headers, state), self._receive, self._send)

    def _scope(self, headers: Mapping[str, str], state: Mapping[str, Any]) -> Scope:
        scope = self._socket.scope
        own = [(name, value) for name, value in scope["headers"] if name not in _OF_THE_SOCKET]
        own += [(name.encode(), value.encode("utf-8", "surrogatepass")) for name, value in headers.items()]
        own += [(b"content-type", b"application/json"), (b"content-length", str(len(self._given)).encode())]
        same = {key: scope[key] for key in ("asgi", "http_version", "server", "client", "root_path")}
        path = {"path": self._path, "raw_path": self._path.encode(), "query_string": b""}
        asked = {"type": "http", "method": self._method, "scheme": "http", "headers": own, "state": dict(state)}
        return {**same, **path, **asked}

    async def _receive(self) -> Message:
        if self._sent < len(self._given):
            start, self._sent = self._sent, self._sent + PIECE_BYTES
            more = self._sent < len(self._given)
            return {"type": "http.request", "body": self._given[start : self._sent], "more_body": more}
        if not self._given and not self._sent:
            self._sent = 1
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
            self._on_begin()
            return
        self.body += message.get("body", b"")
        if self._on_event is not None and self._headers.get("content-type", "").startswith("text/event-stream"):
            *events, self.body = self.body.split(b"\n\n")
            for event in events:
                if (read := _event_of(event)) is not None:
                    await self._on_event(read)


_OF_THE_SOCKET = frozenset(
    (b"connection", b"upgrade", b"content-type", b"content-length", b"origin", REQUEST_ID, b"idempotency-key")
)


def _event_of(event: bytes) -> SocketEvent | None:
    """Returns an event; `None` for a comment. The server's own events have one line of each kind."""
    parts = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
    if b"data" not in parts:
        return None
    return SocketEvent(parts.get(b"event", b"").decode(), parts.get(b"id", b"").decode(), parts[b"data"])


def _fields_of(data: bytes) -> Fields:
    """Returns the fields of a message. Raises `InvalidRequest` or `TooLarge`."""
    Structure().feed(data)
    try:
        return msgspec.json.decode(data, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("a message is not a JSON object; allowed: objects with a type") from None


M = TypeVar("M", bound=Object)


async def read_as(kind: type[M], fields: Fields) -> M:
    """Returns a message as an object of this kind, checked as the body of a request. Raises `InvalidRequest` or
    `Unsupported`."""
    raw = json_of(fields)

    def read() -> M:
        given = parsed(raw)
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise refusal_of(errors, given, "application/json") from None

    return read() if len(raw) < LARGE else await in_parser(read)


def type_of(fields: Fields, allowed: Mapping[str, Any]) -> str:
    """Returns the type of a message. Raises `InvalidRequest` unless it is one of those allowed."""
    given = text_in(fields, "type")
    if given not in allowed:
        raise InvalidRequest(f"a message has another type; allowed: {', '.join(allowed)}", param="type")
    return given


def text_in(fields: Fields, name: str) -> str:
    """Returns the field of this name if it is text; otherwise an empty text."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        given = msgspec.json.decode(fields.get(name, b'""'))
        return given if isinstance(given, str) else ""
    return ""


def json_of(fields: Fields) -> bytes:
    """Returns fields as a JSON object."""
    return msgspec.json.encode(fields)
