"""Ollama's routes of embeddings."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.serve.ollama.answers import NANOSECONDS
from tenuto.serve.ollama.errors import REFUSALS
from tenuto.serve.ollama.models import adapter_of
from tenuto.serve.ollama.schemas import Options
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.embeddings import Embedded, Texts, embed
from tenuto.serve.shared.objects import ForeignObject
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import while_connected
from tenuto.serve.shared.turn_request import TurnRequest

router = APIRouter(route_class=JsonRoute, prefix="/api", tags=["ollama"], responses=REFUSALS)


class Embedding(ForeignObject, TurnRequest):
    """The fields that both kinds of request share."""

    ignored = frozenset({"keep_alive", "truncate"})

    model: str = Field(description="A name listed by `/api/tags`.")
    options_: Options | None = Field(None, alias="options", description="Change nothing here.")


class EmbedBody(Embedding):
    """Texts to embed. Those that are too long are refused."""

    input: str | Texts
    dimensions: int | None = Field(None, ge=1)


class OldBody(Embedding):
    """A text to embed."""

    input_field = "prompt"

    prompt: str


@router.post("/embed", response_model=None)
async def embed_texts(edge: EdgeOf, tenant: Caller, body: EmbedBody, request: Request) -> Response:
    """Returns a vector of length 1 for each text."""
    began, texts = time.perf_counter(), [body.input] if isinstance(body.input, str) else body.input
    found = await _embed(edge, tenant, body, texts, request, body.dimensions)
    vectors = []
    for vector in found.vectors:
        vectors.append(msgspec.Raw(msgspec.json.encode(vector.tolist())))
        await asyncio.sleep(0)  # lets other requests run
    told = {
        "model": body.model,
        "embeddings": vectors,
        "total_duration": round((time.perf_counter() - began) * NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": found.tokens,
    }
    return Response(msgspec.json.encode(told), media_type="application/json")


@router.post("/embeddings")
async def embed_text(edge: EdgeOf, tenant: Caller, body: OldBody, request: Request) -> dict[str, Any]:
    """Returns the vector of a text, of length 1; an older form of `/api/embed`."""
    found = await _embed(edge, tenant, body, [body.prompt], request)
    return {"embedding": found.vectors[0].tolist()}


async def _embed(
    edge: Edge, tenant: Tenant, body: Embedding, texts: list[str], request: Request, dimensions: int | None = None
) -> Embedded:
    if adapter_of(edge, body.model):
        raise InvalidRequest("the model is an adapter; allowed: the model itself", param="model")
    with body.naming(edge.model.context_length):
        work = embed(edge, tenant, texts, dimensions=dimensions, normalize=True)
        return await while_connected(request, work)
