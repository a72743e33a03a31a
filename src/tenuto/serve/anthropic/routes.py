"""Anthropic-compatible routes. An answer is the turn of an ephemeral session."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tenuto.base.errors import ContextExceeded, TenutoError
from tenuto.base.turns import last_role
from tenuto.base.wire.messages import StartTurn, Tokenize
from tenuto.serve.anthropic.answers import MessageWriter
from tenuto.serve.anthropic.schemas import Conversation, MessagesBody
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.context import context_error
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.sse import EventStream, while_connected

router = APIRouter(route_class=JsonRoute, prefix="/v1/messages", tags=["anthropic"])

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or its events",
        "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}},
    }
}


@router.post("", response_model=None, responses=REFUSALS | STREAMED)
async def messages(edge: EdgeOf, tenant: Caller, body: MessagesBody, request: Request) -> Response:
    """Answer messages."""
    edge.check_model(body.model)
    given, streams = body.rendered(edge.model.habits), False
    habits = edge.model.habits.after(last_role(given))
    start = StartTurn(
        kind="turn",
        tenant=tenant.name,
        input=tuple(given),
        params=body.params(habits),
        tools=body.tool_use.told,
        limits=tenant.limits,
    )
    try:
        turn = await while_connected(request, edge.start(tenant, start))
    except ContextExceeded as error:
        raise context_error(error, edge.model.context_length, "messages", "anthropic") from None
    except TenutoError as error:
        error.param = body.param(error.param)
        raise
    try:
        reader = body.tool_use.reading(habits, start.params.grammar).reader(turn.id)
        writer = MessageWriter(edge, turn, reader, request.state.request_id)
        if body.stream:
            streams = True
            return EventStream([turn], writer, lambda: edge.turns.abandon(turn))
        whole = await while_connected(request, writer.whole())
        return Response(msgspec.json.encode(whole), media_type="application/json")
    finally:
        if not streams:
            edge.turns.abandon(turn)


@router.post("/count_tokens", responses=REFUSALS)
async def count_tokens(edge: EdgeOf, tenant: Caller, body: Conversation) -> dict[str, int]:
    """How many tokens messages come to."""
    edge.check_model(body.model)
    given = Tokenize(tenant=tenant.name, input=body.rendered(edge.model.habits), tools=body.tool_use.told)
    return {"input_tokens": len(array("i", await edge.link.call(given)))}
