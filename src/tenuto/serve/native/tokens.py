"""A session's tokens with who made them, as JSON or as Arrow tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tenuto.base.arrow import parquet_of, stream_of
from tenuto.base.errors import NotAcceptable
from tenuto.base.tokens import PackedTokens, SessionTokens
from tenuto.base.wire.messages import GetTokens
from tenuto.serve.native.answer_schemas import TokenList, etag
from tenuto.serve.native.schemas import SessionId
from tenuto.serve.shared.bodies import JsonRoute, in_parser
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, prefix="/v1/sessions", tags=["sessions"], responses=REFUSALS)


def _json(tokens: PackedTokens) -> bytes:
    return msgspec.json.encode(SessionTokens.of(tokens))


FORMATS: dict[str, Callable[[PackedTokens], bytes]] = {
    "application/json": _json,
    "application/vnd.apache.arrow.stream": stream_of,
    "application/vnd.apache.parquet": parquet_of,
}
"""The media types of answers, the preferred one first."""
_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {media: _BINARY for media in FORMATS if media != "application/json"}},
    406: {"description": "No accepted format is supported"},
    501: {"description": "The server lacks the library for Arrow tables"},
}


def accepted(header: str) -> str:
    """Returns the format that an `Accept` header prefers. Raises `NotAcceptable` if it accepts none."""
    wishes: dict[str, float] = {}
    for part in header.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        given = [value for name, _, value in (each.partition("=") for each in parameters) if name.strip() == "q"]
        try:
            wishes[media] = float(given[0]) if given else 1.0
        except ValueError:
            wishes[media] = 0.0

    def weight(media: str) -> float:
        of_kind = f"{media.partition('/')[0]}/*"
        return next((wishes[each] for each in (media, of_kind, "*/*") if each in wishes), 0.0)

    best = max(FORMATS, key=weight)  # the first of several
    if weight(best) <= 0:
        raise NotAcceptable(f"the request accepts {header[:200]!r}; allowed: {', '.join(FORMATS)}", param="accept")
    return best


@router.get("/{session_id}/tokens", response_model=TokenList, responses=_ANSWER)
async def list_tokens(edge: EdgeOf, tenant: Caller, session_id: SessionId, request: Request) -> Response:
    """Returns all committed tokens: which were sampled, their log-probabilities if the turn asked for them, the seed
    and the weights of each turn, and the session's place in the tree of forks. `Accept` chooses JSON, a stream of
    Arrow's or a Parquet file; the latter two have a row for each token."""
    media = accepted(request.headers.get("accept", "*/*"))
    tokens = await edge.link.call(GetTokens(tenant=tenant.name, session=session_id))
    content = await in_parser(partial(FORMATS[media], tokens))
    return Response(content, media_type=media, headers={"etag": etag(tokens.version), "vary": "accept"})
