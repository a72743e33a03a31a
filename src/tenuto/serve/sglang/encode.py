"""SGLang's route for embeddings."""

from __future__ import annotations

import secrets
from typing import Any, cast

from fastapi import APIRouter, Request
from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.turns import TurnInput
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.embeddings import Texts, TokenLists, embed
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.schemas import REFUSALS, Items, TokenId
from tenuto.serve.shared.sse import while_connected
from tenuto.serve.shared.turn_request import TurnRequest

router = APIRouter(route_class=JsonRoute, tags=["sglang"], responses=REFUSALS)


class EncodeRequest(ForeignObject, TurnRequest):
    """One or several texts or lists of token ids to embed."""

    input_field = "text"
    ignored = frozenset({"rid", "sampling_params", "log_metrics", "bootstrap_host", "bootstrap_port", "bootstrap_room"})
    not_supported = dict.fromkeys(("image_data", "audio_data", "video_data", "modalities"), NOTHING)

    text: str | Texts | None = None
    input_ids: Items[TokenId] | TokenLists | None = None
    model: str | None = None
    dimensions: int | None = Field(None, ge=1)

    @property
    def inputs(self) -> list[TurnInput]:
        """The texts or token ids; one of the two must be given. Raises `InvalidRequest`."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("there are both text and input_ids, or neither; allowed: one of them", param="text")
        given = self.text if self.text is not None else self.input_ids or []
        return list(cast("list[str]", given)) if self.several else [cast("str", given)]

    @property
    def several(self) -> bool:
        """Whether a list of inputs was given."""
        return isinstance(self.text, list) or (bool(self.input_ids) and isinstance((self.input_ids or [0])[0], list))


@router.post("/encode", response_model=None)
@router.put("/encode", response_model=None)
async def encode(edge: EdgeOf, tenant: Caller, body: EncodeRequest, request: Request) -> Any:
    """Returns the embedding of a text or list of tokens, or a list of them."""
    adapter = edge.adapter(body.model)
    with body.naming(edge.model.context_length):
        work = embed(edge, tenant, body.inputs, dimensions=body.dimensions, adapter=adapter)
        found = await while_connected(request, work)
    answers = [
        {
            "embedding": vector.tolist(),
            "meta_info": {
                "id": secrets.token_hex(16),
                "prompt_tokens": usage.prompt,
                "cached_tokens": usage.cached,
                "finish_reason": {"type": "length", "length": 0},
            },
        }
        for vector, usage in zip(found.vectors, found.usages, strict=True)
    ]
    return answers if body.several else answers[0]
