"""The ASGI application of a Ray replica: passes requests and WebSockets on to the server beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import quote

import aiohttp
from multidict import CIMultiDict
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from tenuto.base.errors import Disconnected
from tenuto.serve.shared.errors import Failure

_OF_CONNECTIONS = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection", "expect")
)
_NOT_SENT = _OF_CONNECTIONS | {"content-length"}
_NOT_RETURNED = _OF_CONNECTIONS | {"date", "server", "x-request-id"}  # Ray adds the last one
_OF_SOCKETS = frozenset(
    ("sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol")
)
_WITH_BODY = frozenset(("POST", "PUT", "PATCH", "DELETE"))
PIECE_BYTES = 2**16


class Gateway:
    """Passes everything on to the server at `url`. A client that leaves closes its connection there too."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._connect(scope, receive, send)
        else:
            await self._live(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Implements ASGI's lifespan."""
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        if self._session is not None:
            await self._session.close()
        await send({"type": "lifespan.shutdown.complete"})

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=0.4
                ),  # for less time than the server keeps it
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
                read_bufsize=PIECE_BYTES,
            )
        return self._session

    # -- HTTP

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope, _NOT_SENT)
        declared = dict(scope["headers"]).get(b"content-length")
        body: AsyncIterator[bytes] | bytes | None = None
        if scope["method"] in _WITH_BODY or declared is not None:
            body = _body(receive) if declared != b"0" else b""
            if declared is not None:
                headers["content-length"] = declared.decode()
        begun = False
        try:
            async with self._client.request(
                scope["method"], self._place(scope), headers=headers, data=body, allow_redirects=False
            ) as answer:
                begun = True
                await send({"type": "http.response.start", "status": answer.status, "headers": _returned(answer)})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except aiohttp.ClientConnectionError:
            if begun:
                raise  # the answer has begun: all we can do is break the connection
            refusal = Failure.of(
                Disconnected("the server of this replica has not answered; the request may have been carried out")
            )
            await JSONResponse(refusal.body, refusal.status, refusal.headers)(scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _place(self, scope: Scope) -> URL:
        raw = scope.get("raw_path") or quote(scope["path"]).encode()
        path = raw.decode("latin-1").removeprefix(quote(scope.get("root_path", "")))
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        return URL(f"{self._url}{path}{query}", encoded=True)

    # -- WebSockets

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        headers, protocols = _headers(scope, _OF_CONNECTIONS | _OF_SOCKETS), scope.get("subprotocols", [])
        try:
            socket = await self._client.ws_connect(
                self._place(scope), headers=headers, protocols=protocols, max_msg_size=0, autoclose=False
            )
        except aiohttp.ClientError:  # refused, as by a server without such a route
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        async with socket:
            await send({"type": "websocket.accept", "subprotocol": socket.protocol, "headers": []})
            there = asyncio.ensure_future(_pass_on(receive, socket))
            try:
                await _pass_back(socket, send)
            finally:
                there.cancel()
                with suppress(asyncio.CancelledError):
                    await there


def _headers(scope: Scope, without: frozenset[str]) -> CIMultiDict[str]:
    named = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    return CIMultiDict((name, value) for name, value in named if name.lower() not in without)


def _returned(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in answer.raw_headers if name.decode("latin-1").lower() not in _NOT_RETURNED]


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """Yields a request's body. Raises `ConnectionResetError` if its client leaves before the end."""
    more = True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client has left")
        more = message.get("more_body", False)
        if message.get("body"):
            yield message["body"]


async def _pass_on(receive: Receive, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Passes a client's messages on, until it leaves."""
    while (message := await receive())["type"] != "websocket.disconnect":
        if message.get("text") is not None:
            await socket.send_str(message["text"])
        else:
            await socket.send_bytes(message["bytes"])
    await socket.close(code=message.get("code") or 1000)


async def _pass_back(socket: aiohttp.ClientWebSocketResponse, send: Send) -> None:
    """Passes the server's messages back, until it closes."""
    while True:
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            await send({"type": "websocket.send", "text": message.data})
        elif message.type is aiohttp.WSMsgType.BINARY:
            await send({"type": "websocket.send", "bytes": message.data})
        else:
            break
    code, reason = (message.data, message.extra) if message.type is aiohttp.WSMsgType.CLOSE else (1006, "")
    if message.type is not aiohttp.WSMsgType.CLOSED and message.type is not aiohttp.WSMsgType.CLOSING:
        await send({"type": "websocket.close", "code": code if code and code != 1006 else 1011, "reason": reason or ""})
