"""Anthropic-compatible routes. Every request is one turn of an ephemeral session."""

from __future__ import annotations

from array import array

from fastapi import APIRouter, Request, Response

from tenuto.base.turns import last_role
from tenuto.base.wire.messages import Tokenize
from tenuto.serve.anthropic.answers import MessageAnswer
from tenuto.serve.anthropic.schemas import Conversation, MessagesBody
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.respond import respond, streamed
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.sse import while_connected

router = APIRouter(route_class=JsonRoute, prefix="/v1/messages", tags=["anthropic"])


@router.post("", response_model=None, responses=REFUSALS | streamed("The answer, or its events"))
async def messages(edge: EdgeOf, tenant: Caller, body: MessagesBody, request: Request) -> Response:
    """Answers messages."""
    edge.check_model(body.model)
    with body.naming(edge.model.context_length):
        given = body.rendered(edge.model.habits)
        habits = edge.model.habits.after(last_role(given))
        start = body.start(tenant, given, habits)
        reading = body.tool_use.reading(habits, start.params.grammar)
        turn = await while_connected(request, edge.start(tenant, start))
    answer = MessageAnswer(edge, turn, reading.reader(turn.id), request.state.request_id)
    return await respond(request, answer, stream=body.stream)


@router.post("/count_tokens", responses=REFUSALS)
async def count_tokens(edge: EdgeOf, tenant: Caller, body: Conversation) -> dict[str, int]:
    """Returns the number of tokens of the messages as a prompt."""
    edge.check_model(body.model)
    given = Tokenize(tenant=tenant.name, input=body.rendered(edge.model.habits), tools=body.tool_use.told)
    return {"input_tokens": len(array("i", await edge.link.call(given)))}
