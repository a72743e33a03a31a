"""OpenAI's Responses over a WebSocket: every `response.create` is answered as a request to the route of the same path,
one after the other. Its events are the messages of the socket."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, WebSocket

from tenuto.serve.openai.kept_responses import KeptResponses
from tenuto.serve.openai.response_routes import KEEPS
from tenuto.serve.openai.response_routes import router as responses
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import OPENAI_FORM, Failure
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sockets import Fields, Service, SocketEvent, json_of, opened, type_of

router = APIRouter(prefix=responses.prefix)

TYPES = {"response.create": responses.prefix}
TRUE = msgspec.Raw(b"true")


@router.websocket("")
async def converse(socket: WebSocket) -> None:
    """Answers every `response.create` that the client sends, until it leaves."""
    if (found := await opened(socket, _anyone)) is not None:
        await ResponseSocket(socket, *found).serve()


async def _anyone(_: Edge, __: Tenant) -> None:
    """Every client may have a socket."""


class ResponseSocket(Service):
    """One client's socket. The latest response with `store: false` can be continued until the next one has been
    written, or the client leaves."""

    def __init__(self, socket: WebSocket, edge: Edge, tenant: Tenant) -> None:
        super().__init__(socket, edge)
        self._tenant = tenant
        self._unstored = ""  # the name of the latest response with `store: false`

    async def answer(self, fields: Fields) -> None:
        path = TYPES[type_of(fields, TYPES)]
        stores = bytes(fields.get("store", b"")) != b"false"
        asked = {name: value for name, value in fields.items() if name != "type"}
        name = ""

        async def pass_on(event: SocketEvent) -> None:
            nonlocal name
            if not name:
                name = msgspec.json.decode(event.data)["response"]["id"]
            await self.send_json(event.data)

        request = self.asked("POST", path, json_of({**asked, "stream": TRUE}), pass_on)
        await request.run(state={KEEPS: True})
        if request.refused:
            await self.send({"type": "error", "status": request.status, **msgspec.json.decode(request.body)})
        if name and not stores:
            self._forget()
            self._unstored = name

    def refusal(self, failure: Failure, fields: Fields) -> dict[str, Any]:  # noqa: ARG002 - has no ids of requests
        return {"type": "error", "status": failure.status, **OPENAI_FORM.body(failure, "")}

    async def serve(self) -> None:
        try:
            await super().serve()
        finally:
            self._forget()

    def _forget(self) -> None:
        """Closes the session of the response that was kept for the next request."""
        if self._unstored:
            self.edge.part(KeptResponses, tenant=self._tenant.name).forget(self._unstored)
            self.edge.spawn(self.edge.turns.close_if_open((self._tenant.name, self._unstored)))
            self._unstored = ""
