"""Routes of llama.cpp's server that its clients use beside OpenAI's."""

from __future__ import annotations

from fastapi import APIRouter

from tenuto.base.errors import InvalidRequest
from tenuto.base.wire.messages import Detokenize
from tenuto.serve.openai import response_routes, routes
from tenuto.serve.openai.tokens import MessagesBody, tokens_of_messages
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, tags=["llama.cpp"], responses=REFUSALS)

router.post("/chat/completions", response_model=None, responses=routes.STREAMED)(routes.chat)
router.post("/responses", response_model=None, responses=response_routes.STREAMED)(response_routes.create)


@router.post("/apply-template")
async def apply_template(edge: EdgeOf, tenant: Caller, body: MessagesBody) -> dict[str, str]:
    """Returns the prompt that messages become, as text, without the token that begins every text."""
    edge.adapter(body.model)
    if not body.messages:
        raise InvalidRequest("there are no messages; allowed: at least one", param="messages")
    tokens = await tokens_of_messages(edge, tenant, body)
    if edge.model.adds_bos and tokens[:1].tolist() == [edge.model.bos_id]:
        tokens = tokens[1:]
    return {"prompt": await edge.link.call(Detokenize(tenant=tenant.name, tokens=tokens.tolist()))}


@router.post("/chat/completions/input_tokens")
@router.post("/v1/chat/completions/input_tokens")
async def count_tokens(edge: EdgeOf, tenant: Caller, body: MessagesBody) -> dict[str, int]:
    """Returns the number of tokens of the prompt that messages become."""
    edge.adapter(body.model)
    if not body.messages:
        raise InvalidRequest("there are no messages; allowed: at least one", param="messages")
    return {"input_tokens": len(await tokens_of_messages(edge, tenant, body))}
