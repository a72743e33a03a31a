"""A session over one WebSocket: each message asks for what a route of the session does, and gets its answer."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, WebSocket

from tenuto.base.errors import InvalidRequest
from tenuto.base.wire.messages import GetSession
from tenuto.serve.native.schemas import SessionId
from tenuto.serve.native.turns import router as turns
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import OPENAI_FORM, Failure, is_request_id
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sockets import Asked, Fields, Service, SocketEvent, json_of, opened, text_in, type_of

router = APIRouter(prefix=turns.prefix)

STREAMED = ("turn", "regenerate")
TYPES = {
    "turn": ("POST", "/turns"),
    "regenerate": ("POST", "/regenerate"),
    "append": ("POST", "/append"),
    "draft": ("PUT", "/draft"),
    "abort": ("POST", "/abort"),
    "rewind": ("POST", "/rewind"),
    "fork": ("POST", "/fork"),
    "expect": ("POST", "/expect"),
    "show": ("GET", ""),
}
"""The types of messages: method, and the end of the path of a route."""
HEADERS = {"request_id": "x-request-id", "if_match": "if-match", "idempotency_key": "idempotency-key"}
"""Fields of messages that are headers of requests."""


@router.websocket("/socket")
async def converse(socket: WebSocket, session_id: SessionId) -> None:
    """Takes messages about one session, which must be open, until the client leaves."""

    async def check(edge: Edge, tenant: Tenant) -> None:
        if not await edge.is_elsewhere((tenant.name, session_id)):
            await edge.link.call(GetSession(tenant=tenant.name, session=session_id))

    if (found := await opened(socket, check)) is not None:
        edge, _ = found
        await SessionSocket(socket, edge, session_id).serve()


class SessionSocket(Service):
    """One client's socket. Messages are answered in order. Only an `abort` overtakes: it ends the turn in progress."""

    def __init__(self, socket: WebSocket, edge: Edge, session_id: str) -> None:
        super().__init__(socket, edge)
        self._path = f"/v1/sessions/{session_id}"

    def overtakes(self, fields: Fields) -> bool:
        return text_in(fields, "type") == "abort"

    async def answer(self, fields: Fields) -> None:
        kind = type_of(fields, TYPES)
        method, action = TYPES[kind]
        headers = {header: _header_in(fields, name) for name, header in HEADERS.items() if name in fields}
        body = {name: value for name, value in fields.items() if name != "type" and name not in HEADERS}
        if kind in STREAMED:
            body.setdefault("stream", msgspec.Raw(b"true"))
        given = b"" if method == "GET" else json_of(body)
        asked = self.asked(method, f"{self._path}{action}", given, lambda event: self._pass_on(asked, event))
        if kind == "abort":
            await self.begun()
        await asked.run(headers)
        if asked.body:
            name = "error" if asked.refused else "answer"
            await self._say(asked, f'"event":"{name}","status":{asked.status}', asked.body)

    async def _pass_on(self, asked: Asked, event: SocketEvent) -> None:
        number = f',"id":{event.number}' if event.number else ""
        await self._say(asked, f'"event":"{event.name}"{number}', event.data)

    async def _say(self, asked: Asked, about: str, data: bytes) -> None:
        request_id = msgspec.json.encode(asked.request_id).decode()
        await self.send_json(b'{%b,"request_id":%b,"data":%b}' % (about.encode(), request_id.encode(), data))

    def refusal(self, failure: Failure, fields: Fields) -> dict[str, Any]:
        data = OPENAI_FORM.body(failure, "")
        return {"event": "error", "status": failure.status, "request_id": text_in(fields, "request_id"), "data": data}


def _header_in(fields: Fields, name: str) -> str:
    """Returns the given field of this name, which becomes a header. Raises `InvalidRequest`."""
    given = text_in(fields, name)
    if name == "request_id" and not is_request_id(given):
        raise InvalidRequest(
            "request_id cannot be repeated in answers; allowed: text of 1 to 128 visible ASCII characters", param=name
        )
    if not given:
        raise InvalidRequest(f"{name} is empty or not text; allowed: text", param=name)
    return given
