"""Routes of stored chats."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response

from tenuto.base.errors import InvalidRequest
from tenuto.serve.openai.conversation_routes import After, Limit, Order
from tenuto.serve.openai.conversations import MetadataBody, page_of
from tenuto.serve.openai.routes import StoredOf
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, prefix="/v1/chat/completions", tags=["openai"], responses=REFUSALS)

_FILTER = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)


@router.get("", response_model=None)
async def list_chats(
    chats: StoredOf,
    request: Request,
    model: Annotated[str, Query(max_length=256, description="List chats with this model.")] = "",
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Response:
    """Returns a page of the stored chats. `metadata[KEY]=VALUE` lists those with this metadata."""
    metadata = {}
    for name, value in request.query_params.items():
        if name.startswith("metadata"):
            found = _FILTER.fullmatch(name)
            if found is None:
                raise InvalidRequest("a filter by metadata is not metadata[KEY]=VALUE", param="metadata")
            metadata[found[1]] = value
    return _json(await chats.page(model, metadata, after, limit, newest_first=order == "desc"))


@router.get("/{completion_id}", response_model=None)
async def read(chats: StoredOf, completion_id: str) -> Response:
    """Returns a stored chat."""
    return _json(msgspec.Raw(await chats.chat(completion_id)))


@router.post("/{completion_id}", response_model=None)
async def update(chats: StoredOf, completion_id: str, body: MetadataBody) -> Response:
    """Replaces the metadata of a stored chat."""
    return _json(msgspec.Raw(await chats.describe(completion_id, body.metadata)))


@router.delete("/{completion_id}")
async def delete(chats: StoredOf, completion_id: str) -> dict[str, Any]:
    """Deletes a stored chat."""
    await chats.delete(completion_id)
    return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}


@router.get("/{completion_id}/messages")
async def list_messages(
    chats: StoredOf, completion_id: str, after: After = None, limit: Limit = 20, order: Order = "asc"
) -> dict[str, Any]:
    """Returns a page of the messages that a stored chat answers."""
    messages = await chats.messages_of(completion_id)
    named = [{"id": f"{completion_id}-{number}", **message} for number, message in enumerate(messages)]
    return page_of(named, after, limit, newest_first=order == "desc")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
