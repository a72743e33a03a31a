"""Routes that answer as Ollama does. A request is one turn of an ephemeral session."""

from __future__ import annotations

from array import array
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tenuto.base.turns import TurnInput, last_role
from tenuto.base.wire.messages import Tokenize
from tenuto.serve.ollama.answers import OllamaAnswer, now
from tenuto.serve.ollama.errors import REFUSALS
from tenuto.serve.ollama.models import adapter_of
from tenuto.serve.ollama.schemas import Asked, ChatBody, GenerateBody
from tenuto.serve.shared.bodies import JsonRoute, of_many
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.filling import fill_prompt, stopping
from tenuto.serve.shared.placing import placed
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import LINES, respond, streamed, while_connected

router = APIRouter(route_class=JsonRoute, prefix="/api", tags=["ollama"], responses=REFUSALS)

STREAMED = streamed("The answer, or its parts as lines of JSON, of which the last has its counts and times", LINES)


@router.post("/chat", response_model=None, responses=STREAMED)
async def chat(edge: EdgeOf, tenant: Caller, body: ChatBody, request: Request) -> Response:
    """Answers messages. Without messages, says that the model is loaded."""
    _check(edge, body)
    if not body.messages:
        return _loaded(body, {"message": {"role": "assistant", "content": ""}})
    with body.naming(edge.model.context_length):
        many, usual = body.messages, edge.model.habits
        messages = await of_many(len(many), lambda: placed([one.rendered() for one in many], usual))
        habits, variables = usual.with_variables(body.variables().parsed()).after(last_role(messages)), body.variables()
        start = body.start(tenant, messages, habits, adapter=adapter_of(edge, body.model), variables=variables)
        reading = body.tool_use.reading(habits, start.params.grammar)
        turn = await while_connected(request, edge.start(tenant, start))
    answer = OllamaAnswer(edge, turn, body.model, reading.reader(turn.id), chat=True)
    return await respond(request, answer, stream=body.stream is not False)


@router.post("/generate", response_model=None, responses=STREAMED)
async def generate(edge: EdgeOf, tenant: Caller, body: GenerateBody, request: Request) -> Response:
    """Answers a text or, with `raw`, continues it. Without a text, says that the model is loaded."""
    _check(edge, body)
    if not body.prompt and not body.context:
        return _loaded(body, {"response": ""})
    with body.naming(edge.model.context_length):
        habits = edge.model.habits.with_variables(body.variables().parsed())
        given = await _prompt(edge, tenant, body)
        more = {"adapter": adapter_of(edge, body.model), "variables": body.variables()}
        start = body.start(tenant, given, habits, markup=bool(body.raw), echo=not body.raw, **more)
        if body.suffix:
            start = stopping(edge, start)
        use = body.tool_use
        reading = use.reading(habits, start.params.grammar) if use is not None else None
        turn = await while_connected(request, edge.start(tenant, start))
    reader = reading.reader(turn.id) if reading is not None else None
    answer = OllamaAnswer(edge, turn, body.model, reader, chat=False, context=not body.raw)
    return await respond(request, answer, stream=body.stream is not False)


async def _prompt(edge: Edge, tenant: Tenant, body: GenerateBody) -> TurnInput:
    """Returns the prompt: text, messages or, after a `context`, tokens."""
    if body.suffix:
        return await fill_prompt(edge, tenant, body.prompt or "", body.suffix)
    if body.raw:
        return body.prompt or ""
    messages = placed(body.messages(), edge.model.habits)
    if not body.context:
        return messages
    asked = Tokenize(tenant=tenant.name, input=messages, variables=body.variables())
    tokens = array("i", await edge.link.call(asked)).tolist()
    begun = edge.model.adds_bos and tokens[:1] == [edge.model.bos_id]
    return [*body.context, *(tokens[1:] if begun else tokens)]


def _check(edge: Edge, body: Asked) -> None:
    edge.require_engine()
    adapter_of(edge, body.model)
    body.check(edge.model.habits, edge.model.context_length)


def _loaded(body: Asked, empty: dict[str, Any]) -> Response:
    return JSONResponse({"model": body.model, "created_at": now(), **empty, "done": True, "done_reason": "load"})
