"""OpenAI's Responses over a WebSocket: every `response.create` is answered as a request to the route of the same path,
one after the other. Its events are the messages of the socket."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from starlette.types import Message, Scope

from tenuto.base.errors import Forbidden, InvalidRequest, TenutoError
from tenuto.serve.openai.kept_responses import KeptResponses
from tenuto.serve.openai.response_routes import KEEPS
from tenuto.serve.openai.response_routes import router as responses
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import OPENAI_FORM, Failure, new_request_id
from tenuto.serve.shared.settings import ServeSettings, Tenant

router = APIRouter(prefix=responses.prefix)

MAX_WAITING = 16
"""Maximum number of messages that wait for the answers to earlier ones; together they may be as long as one body."""
TOO_MANY = 1008
"""WebSocket's code for messages that violate a policy (RFC 6455)."""
PIECE_BYTES = 2**16
CREATE = b'"response.create"'
DATA = b"data: "


@router.websocket("")
async def converse(socket: WebSocket) -> None:
    """Answers every `response.create` that the client sends, until it leaves."""
    edge: Edge = socket.app.state.edge
    try:
        _check_origin(socket, edge.settings)
        tenant = edge.tenant(socket.headers)
    except TenutoError as error:
        failure = Failure.of(error)
        body = OPENAI_FORM.body(failure, new_request_id())
        await socket.send_denial_response(JSONResponse(body, failure.status, failure.headers))
        return
    await socket.accept()
    await ResponseSocket(socket, edge, tenant).serve()


def _check_origin(socket: WebSocket, settings: ServeSettings) -> None:
    """Raises `Forbidden` for pages of other origins: browsers let any page open a WebSocket."""
    origin = socket.headers.get("origin")
    if origin is None or "*" in settings.allowed_origins or origin.lower() in settings.allowed_origins:
        return
    if urlsplit(origin).netloc.lower() != socket.headers.get("host", "").lower():
        raise Forbidden("pages of this origin may not use the server; see --allowed-origins")


class ResponseSocket:
    """One client's socket. The latest response with `store: false` can be continued until the next one has been
    written, or the client leaves."""

    def __init__(self, socket: WebSocket, edge: Edge, tenant: Tenant) -> None:
        self._socket, self._edge, self._tenant = socket, edge, tenant
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()  # `None`: the client has left
        self._waiting_bytes = 0
        self._gone = asyncio.Event()
        self._unstored = ""  # the name of the latest response with `store: false`

    async def serve(self) -> None:
        """Answers messages until the client leaves."""
        reading, answering = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._answer_all())
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._gone.set()
            self._waiting.put_nowait(None)
            reading.cancel()
            try:
                await answering
            finally:
                self._forget()

    async def _read(self) -> None:
        """Takes messages until the client leaves, or sends too many ahead."""
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            data = message.get("bytes") or (message.get("text") or "").encode()
            self._waiting_bytes += len(data)
            if self._waiting.qsize() >= MAX_WAITING or self._waiting_bytes > self._edge.settings.max_body_bytes:
                await self._socket.close(TOO_MANY, "too many messages wait for earlier answers")
                return
            self._waiting.put_nowait(data)

    async def _answer_all(self) -> None:
        with suppress(WebSocketDisconnect):
            while (data := await self._waiting.get()) is not None and not self._gone.is_set():
                self._waiting_bytes -= len(data)
                try:
                    body, stores = _body_of(data)
                except InvalidRequest as error:
                    await self._refuse(Failure.of(error))
                    continue
                await self._answer(body, stores=stores)

    async def _answer(self, body: bytes, *, stores: bool) -> None:
        """Answers one request by the application itself, so that limits, errors and the log are those of any other."""
        exchange = _Exchange(self._socket, body, self._gone)
        await self._socket.app(_scope_of(self._socket.scope, len(body)), exchange.receive, exchange.send)
        if exchange.name and not stores:
            self._forget()
            self._unstored = exchange.name

    async def _refuse(self, failure: Failure) -> None:
        await self._socket.send_text(_error(failure.status, OPENAI_FORM.body(failure, "")))

    def _forget(self) -> None:
        """Closes the session of the response that was kept for the next request."""
        if self._unstored:
            self._edge.part(KeptResponses, tenant=self._tenant.name).forget(self._unstored)
            self._edge.spawn(self._edge.turns.close_if_open((self._tenant.name, self._unstored)))
            self._unstored = ""


class _Exchange:
    """One request and its answer, as ASGI's messages. `name`: that of the response, once it has begun."""

    def __init__(self, socket: WebSocket, body: bytes, gone: asyncio.Event) -> None:
        self.name = ""
        self._socket, self._body, self._gone = socket, body, gone
        self._sent = 0
        self._status = 0
        self._received = b""

    async def receive(self) -> Message:
        if self._sent < len(self._body):
            start, self._sent = self._sent, self._sent + PIECE_BYTES
            more = self._sent < len(self._body)
            return {"type": "http.request", "body": self._body[start : self._sent], "more_body": more}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        self._received += message.get("body", b"")
        if self._status == 200:
            *events, self._received = self._received.split(b"\n\n")
            for event in events:
                await self._pass_on(event)
        elif not message.get("more_body"):
            await self._socket.send_text(_error(self._status, msgspec.json.decode(self._received)))

    async def _pass_on(self, event: bytes) -> None:
        data = next((line[len(DATA) :] for line in event.split(b"\n") if line.startswith(DATA)), b"")
        if not data:
            return
        if not self.name:
            self.name = msgspec.json.decode(data)["response"]["id"]
        await self._socket.send_text(data.decode())


def _body_of(data: bytes) -> tuple[bytes, bool]:
    """Returns the body of the request that a message asks for, and whether its response is stored. Raises
    `InvalidRequest`."""
    try:
        event = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("a message is no JSON object; allowed: events of type response.create") from None
    if bytes(event.pop("type", msgspec.Raw(b"null"))) != CREATE:
        raise InvalidRequest("an event has another type; allowed: response.create", param="type")
    stores = bytes(event.get("store", b"")) != b"false"
    return msgspec.json.encode({**event, "stream": True}), stores


def _scope_of(scope: Scope, length: int) -> Scope:
    """Returns the scope of a request on a socket."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _OF_THE_SOCKET]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    kept = ("asgi", "http_version", "server", "client", "root_path", "path", "raw_path", "query_string")
    same = {key: scope[key] for key in kept}
    return {**same, "type": "http", "method": "POST", "scheme": "http", "headers": headers, "state": {KEEPS: True}}


_OF_THE_SOCKET = frozenset(
    (b"connection", b"upgrade", b"content-type", b"content-length", b"origin", b"x-request-id", b"idempotency-key")
)


def _error(status: int, body: dict[str, object]) -> str:
    return msgspec.json.encode({"type": "error", "status": status, **body}).decode()
