"""Completions as llama.cpp's server has them. Each is one turn of an ephemeral session."""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter, Request, Response

from tenuto.serve.llama_cpp.answers import Completions
from tenuto.serve.llama_cpp.schemas import NEVER, Completing, CompletionBody, InfillBody
from tenuto.serve.shared.bodies import JsonRoute, of_many
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.filling import fill_prompt, stopping
from tenuto.serve.shared.prompt_forms import biases, resolved
from tenuto.serve.shared.samples import start_all
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import respond, streamed, while_connected

C = TypeVar("C", bound=Completing)

router = APIRouter(route_class=JsonRoute, tags=["llama.cpp"], responses=REFUSALS)

STREAMED = streamed("The completion, or its chunks; a list of completions for several prompts")


@router.post("/completion", response_model=None, responses=STREAMED)
@router.post("/completions", response_model=None, responses=STREAMED)
async def complete(edge: EdgeOf, tenant: Caller, body: CompletionBody, request: Request) -> Response:
    """Continues texts or tokens."""
    body.check()
    with body.naming(edge.model.context_length):
        body = await _by_token(edge, tenant, body)
        prompts, habits = await resolved(edge, tenant, body.prompt), edge.model.habits
        starts = await of_many(
            len(prompts), lambda: [body.start(tenant, one, habits, markup=True, echo=True) for one in prompts]
        )
        samples = await while_connected(request, start_all(edge, tenant, starts))
    turns = [turn for one in samples for turn in one.turns]
    answer = Completions(edge, turns, body, starts[0].params, several=body.several)
    return await respond(request, answer, stream=body.stream)


@router.post("/infill", response_model=None, responses=STREAMED)
async def infill(edge: EdgeOf, tenant: Caller, body: InfillBody, request: Request) -> Response:
    """Writes the middle of a text, if the model has tokens for that."""
    edge.require_engine()
    with body.naming(edge.model.context_length):
        body = await _by_token(edge, tenant, body)
        others = [(snippet.filename, snippet.text) for snippet in body.input_extra or ()]
        prompt = await fill_prompt(edge, tenant, body.input_prefix + body.prompt, body.input_suffix, others)
        start = stopping(edge, body.start(tenant, prompt, edge.model.habits, echo=True))
        turn = await while_connected(request, edge.start(tenant, start))
    return await respond(request, Completions(edge, [turn], body, start.params, several=False), stream=body.stream)


async def _by_token(edge: Edge, tenant: Tenant, body: C) -> C:
    """Returns the request with biases of tokens alone. With `ignore_eos`, the model's end tokens are forbidden."""
    given = await biases(edge, tenant, body.logit_bias or {})
    if body.given().get("ignore_eos"):
        given |= dict.fromkeys(edge.model.eos_ids, NEVER)
    return body.model_copy(update={"logit_bias": given or None})
