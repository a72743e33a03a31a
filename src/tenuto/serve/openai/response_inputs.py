"""Routes that count the tokens of input for responses, and that replace long input by a summary."""

from __future__ import annotations

import secrets
import time
from array import array
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from tenuto.base.views import hidden_session_id
from tenuto.base.wire.messages import Tokenize
from tenuto.serve.openai.conversation_routes import ConversationsOf
from tenuto.serve.openai.conversations import Conversations, entry_of
from tenuto.serve.openai.kept_responses import KeptOf
from tenuto.serve.openai.response_answers import usage_of
from tenuto.serve.openai.response_compactions import compaction_item, summarized
from tenuto.serve.openai.response_schemas import CompactBody, InputBody, Item
from tenuto.serve.openai.response_sessions import start_response
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.sse import while_connected
from tenuto.serve.shared.volatile import without_volatile_lines

router = APIRouter(route_class=JsonRoute, prefix="/v1/responses", tags=["openai"], responses=REFUSALS)


@router.post("/input_tokens")
async def count(
    edge: EdgeOf, tenant: Caller, kept: KeptOf, body: InputBody, request: Request, conversations: ConversationsOf
) -> dict[str, Any]:
    """Returns the number of tokens that a response to this input would begin with. With `previous_response_id` a turn
    is started on a fork of that response's session, and rolled back."""
    edge.adapter(body.model)
    with body.naming(edge.model.context_length):
        earlier, habits, variables = await _earlier(conversations, body), edge.model.habits, body.variables()
        if body.previous_response_id is None:
            given, told = without_volatile_lines(edge, body.rendered(habits, earlier)), body.tool_use.definitions
            prompt = Tokenize(tenant=tenant.name, input=given, tools=told, variables=variables)
            tokens = len(array("i", await edge.link.call(prompt)))
        else:
            name, start = hidden_session_id(), body.start(tenant, (), habits, variables=variables)
            try:
                whole = partial(kept.before, body)
                starting = start_response(edge, tenant, body, start, name, earlier, stores=True, whole=whole)
                turn = await while_connected(request, starting)
            finally:
                edge.spawn(edge.turns.close_if_open((tenant.name, name)))
            assert turn.ticket is not None
            tokens = turn.ticket.prompt_tokens
    return {"object": "response.input_tokens", "input_tokens": tokens}


@router.post("/compact")
async def compact(
    edge: EdgeOf, tenant: Caller, body: CompactBody, request: Request, conversations: ConversationsOf
) -> dict[str, Any]:
    """Lets the model summarize a conversation. The result's items stand for the conversation in later requests: the
    input's user messages, and the summary. With `previous_response_id` only the new items are computed."""
    adapter = edge.adapter(body.model)
    with body.naming(edge.model.context_length):
        earlier = [*await _earlier(conversations, body), *body.items]
        asking = body.asking(body.max_output_tokens)
        summary, usage = await while_connected(request, summarized(edge, tenant, asking, earlier, adapter))
    users = [entry_of(item) for item in earlier if item.type == "message" and item.role == "user"]
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*users, compaction_item(summary)],
        "usage": usage_of(usage),
    }


async def _earlier(conversations: Conversations, body: InputBody) -> list[Item]:
    """Returns the items of the conversation that the input follows, if any. Raises `NotFound`."""
    name = body.conversation_id
    return await conversations.items(name) if name is not None else []
