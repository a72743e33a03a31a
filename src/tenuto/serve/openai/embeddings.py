"""OpenAI's embeddings, with fields of other servers, and llama.cpp's older form of them."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import Pooling
from tenuto.serve.openai.schemas import Generation
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.embeddings import Embedded, Vectors, embed
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.prompt_forms import Inputs, resolved
from tenuto.serve.shared.schemas import REFUSALS, ModelName
from tenuto.serve.shared.sse import while_connected
from tenuto.serve.shared.turn_request import TurnRequest

router = APIRouter(route_class=JsonRoute, tags=["openai"], responses=REFUSALS)

EMBEDDINGS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The embeddings", "content": {"application/json": {"schema": {}}}}
}
Encoding = Literal["float", "base64"]
POOLINGS: dict[str, Pooling] = {"last": "last", "mean": "mean", "cls": "first", "first": "first"}
"""The token whose vector is taken, or the average of all, by the names of other servers."""
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("messages", "chat_template", "chat_template_kwargs", "mm_processor_kwargs"), NOTHING),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), (None,)),
    **dict.fromkeys(("cache_salt", "lora_path"), (None, "")),
    "add_special_tokens": (None, True),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "priority": (None, 0),
    "use_activation": (None, True),
}


class EmbeddingBody(ForeignObject, TurnRequest):
    """Texts or lists of token ids to embed. `prompt_name` comes from Text Embeddings Inference, `normalize` and
    `pooling` from vLLM and llama.cpp."""

    too_long = Generation.too_long
    ignored = frozenset({"user", "request_id", "rid"})
    not_supported = NOT_SUPPORTED

    model: ModelName = None
    input: Inputs
    encoding_format: Encoding | None = Field(None, description="base64: little-endian float32 numbers.")
    dimensions: int | None = Field(
        None, ge=1, description="Cut vectors to so many numbers; for models that were trained for it."
    )
    normalize: bool | None = Field(None, description="Scale vectors to length 1; as the model says if not given.")
    pooling: Literal["last", "mean", "cls", "first"] | None = Field(
        None, description="Take the vector after this token, or the average; as the model says if not given."
    )
    prompt_name: str | None = Field(None, description="The model's prompt to put before texts; empty for none.")


class OldBody(ForeignObject, TurnRequest):
    """llama.cpp's older form of the same."""

    ignored = frozenset({"model"})
    input_field = "content"

    input: Inputs | None = None
    content: Inputs | None = None
    encoding_format: Encoding | None = None
    embd_normalize: Literal[-1, 2] | None = Field(None, description="-1: as computed; 2 (the default): of length 1.")


@router.post("/v1/embeddings", response_model=None, responses=EMBEDDINGS)
async def embeddings(edge: EdgeOf, tenant: Caller, body: EmbeddingBody, request: Request) -> Response:
    """Returns a vector for each text or list of tokens."""
    adapter = edge.adapter(body.model)
    with body.naming(edge.model.context_length):
        work = embed(
            edge,
            tenant,
            await resolved(edge, tenant, body.input),
            dimensions=body.dimensions,
            normalize=body.normalize,
            pooling=POOLINGS[body.pooling] if body.pooling is not None else None,
            prompt=body.prompt_name,
            adapter=adapter,
        )
        found = await while_connected(request, work)
    write = _base64 if body.encoding_format == "base64" else _floats
    data = await _written(found.vectors, b'{"object":"embedding","index":%d,"embedding":%b}', write)
    rest = msgspec.json.encode({"model": edge.name_of(adapter), "usage": _usage(found)})
    return Response(b'{"object":"list","data":' + data + b"," + rest[1:], media_type="application/json")


@router.post("/embedding", response_model=None, responses=EMBEDDINGS, tags=["llama.cpp"])
@router.post("/embeddings", response_model=None, responses=EMBEDDINGS, tags=["llama.cpp"])
async def old_embeddings(edge: EdgeOf, tenant: Caller, body: OldBody, request: Request) -> Response:
    """Returns a list with a list of one vector for each text or list of tokens."""
    if (given := body.input if body.input is not None else body.content) is None:
        raise InvalidRequest("there is neither input nor content; allowed: one of them", param="content")
    with body.naming(edge.model.context_length):
        work = embed(edge, tenant, await resolved(edge, tenant, given), normalize=body.embd_normalize != -1)
        found = await while_connected(request, work)
    write = _base64 if body.encoding_format == "base64" else _floats
    data = await _written(found.vectors, b'{"index":%d,"embedding":[%b]}', write)
    return Response(data, media_type="application/json")


def _usage(found: Embedded) -> dict[str, Any]:
    details = {"cached_tokens": found.cached}
    return {"prompt_tokens": found.tokens, "total_tokens": found.tokens, "prompt_tokens_details": details}


def _floats(vector: Vectors) -> bytes:
    return msgspec.json.encode(vector.tolist())


def _base64(vector: Vectors) -> bytes:
    return b'"' + b64encode(vector.astype("<f4").tobytes()) + b'"'


async def _written(vectors: Vectors, form: bytes, write: Callable[[Vectors], bytes]) -> bytes:
    """Returns the JSON list of vectors, each in `form` with its index, without holding up other requests."""
    parts = []
    for index, vector in enumerate(vectors):
        parts.append(form % (index, write(vector)))
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"
