"""Routes that score documents by their relevance to a query, as vLLM, llama.cpp, Jina and Cohere have them."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.serve.openai.schemas import Generation
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.embeddings import MAX_INPUTS, Texts
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.relevance import Relevance, relevance
from tenuto.serve.shared.schemas import REFUSALS, ModelName
from tenuto.serve.shared.sse import while_connected
from tenuto.serve.shared.turn_request import TurnRequest

router = APIRouter(route_class=JsonRoute, tags=["relevance"], responses=REFUSALS)

IGNORED = frozenset({"user", "request_id", "max_chunks_per_doc", "use_activation"})
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("truncate_prompt_tokens", "max_tokens_per_doc"), (None,)),
    **dict.fromkeys(("mm_processor_kwargs", "rank_fields"), NOTHING),
    "priority": (None, 0),
}


class Document(ForeignObject):
    """A document as an object."""

    text: str


class Relevant(ForeignObject, TurnRequest):
    """The fields that both kinds of request share."""

    too_long = Generation.too_long
    ignored = IGNORED
    not_supported = NOT_SUPPORTED

    model: ModelName = None
    instruction: str | None = Field(None, description="The task that a model is asked about, if it is asked.")


class RerankBody(Relevant):
    """A query and the documents to put in order. With `texts`, the request and its answer have the form of Text
    Embeddings Inference."""

    ignored = IGNORED | {"truncation_direction"}
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {**NOT_SUPPORTED, "raw_scores": NOTHING, "truncate": NOTHING}

    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, max_length=MAX_INPUTS)] | None = None
    texts: Texts | None = Field(None, description="The documents.")
    return_text: bool | None = Field(None, description="Repeat `texts` in the answer.")
    top_n: int | None = Field(None, ge=0, description="Answer with so many of the best; 0 means all.")
    return_documents: bool | None = Field(None, description="Repeat the documents in the answer; true if not given.")

    @property
    def given_texts(self) -> list[str]:
        """The documents. Raises `InvalidRequest` unless they are given once."""
        if (self.documents is None) == (self.texts is None):
            given = "neither documents nor texts" if self.texts is None else "both documents and texts"
            raise InvalidRequest(f"there are {given}; allowed: one of them", param="input")
        documents = self.documents if self.documents is not None else self.texts or []
        return [each if isinstance(each, str) else each.text for each in documents]

    def field(self, option: str | None) -> str | None:
        given = "texts" if self.texts is not None else "documents"
        return given if option == "input" else super().field(option)


class ScoreBody(Relevant):
    """Pairs to score: one text and one or several others, or as many of each."""

    input_field = "text_2"

    text_1: str | Texts
    text_2: str | Texts


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/reranking")
@router.post("/v1/reranking")
async def rerank(edge: EdgeOf, tenant: Caller, body: RerankBody, request: Request) -> dict[str, Any] | list[Any]:
    """Puts documents in the order of their relevance to a query."""
    adapter = edge.adapter(body.model)
    with body.naming(edge.model.context_length):
        texts = body.given_texts
        work = relevance(edge, tenant, [(body.query, text) for text in texts], body.instruction, adapter)
        found = await while_connected(request, work)
    best = sorted(range(len(texts)), key=lambda index: -found.scores[index])[: body.top_n or None]
    if body.texts is not None:
        return [
            {"index": index, "score": found.scores[index]} | ({"text": texts[index]} if body.return_text else {})
            for index in best
        ]
    results = [
        {"index": index, "relevance_score": found.scores[index]}
        | ({} if body.return_documents is False else {"document": {"text": texts[index]}})
        for index in best
    ]
    named = {"id": f"rerank-{secrets.token_hex(16)}", "object": "list", "model": edge.name_of(adapter)}
    return {**named, "usage": _usage(found), "results": results}


@router.post("/score")
@router.post("/v1/score")
async def score(edge: EdgeOf, tenant: Caller, body: ScoreBody, request: Request) -> dict[str, Any]:
    """Scores pairs of texts, of a query and a document."""
    adapter = edge.adapter(body.model)
    first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"text_2 has {len(second)} texts; allowed: {len(first)}, as many as text_1", param="text_2"
        )
    with body.naming(edge.model.context_length):
        found = await while_connected(
            request, relevance(edge, tenant, [*zip(first, second, strict=True)], body.instruction, adapter)
        )
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(found.scores)]
    named = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
    return {**named, "model": edge.name_of(adapter), "data": data, "usage": _usage(found)}


def _usage(found: Relevance) -> dict[str, int]:
    return {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
