"""Routes of OpenAI's conversations."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query

from tenuto.serve.openai.conversations import ConversationBody, Conversations, ItemsBody, MetadataBody, listed
from tenuto.serve.openai.found_responses import fate
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, prefix="/v1/conversations", tags=["openai"], responses=REFUSALS)


After = Annotated[str | None, Query(max_length=256, description="List items after this one.")]
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


async def _conversations(edge: EdgeOf, tenant: Caller) -> Conversations:
    return edge.part(
        Conversations, edge.objects(tenant, Conversations.KIND), partial(fate, edge, tenant), tenant=tenant.name
    )


ConversationsOf = Annotated[Conversations, Depends(_conversations)]


@router.post("")
async def create(conversations: ConversationsOf, body: ConversationBody | None = None) -> dict[str, Any]:
    """Opens a conversation. It is kept until it is deleted or, without a fleet, the server ends."""
    body = body or ConversationBody()
    return (await conversations.open(body.items or (), body.metadata or {})).view()


@router.get("/{conversation_id}")
async def read(conversations: ConversationsOf, conversation_id: str) -> dict[str, Any]:
    """Returns a conversation without its items."""
    return (await conversations.find(conversation_id)).view()


@router.post("/{conversation_id}")
async def update(conversations: ConversationsOf, conversation_id: str, body: MetadataBody) -> dict[str, Any]:
    """Replaces a conversation's metadata."""
    return (await conversations.describe(conversation_id, body.metadata)).view()


@router.delete("/{conversation_id}")
async def delete(conversations: ConversationsOf, conversation_id: str) -> dict[str, Any]:
    """Deletes a conversation. Responses that continue it remain."""
    await conversations.close(conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get("/{conversation_id}/items")
async def list_items(
    conversations: ConversationsOf,
    conversation_id: str,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> dict[str, Any]:
    """Returns a page of a conversation's items."""
    return await conversations.page(conversation_id, after, limit, newest_first=order == "desc")


@router.post("/{conversation_id}/items")
async def add_items(conversations: ConversationsOf, conversation_id: str, body: ItemsBody) -> dict[str, Any]:
    """Appends at most 20 items, which get new ids."""
    return listed(await conversations.add(conversation_id, body.items))


@router.get("/{conversation_id}/items/{item_id}")
async def read_item(conversations: ConversationsOf, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Returns an item."""
    return await conversations.item(conversation_id, item_id)


@router.delete("/{conversation_id}/items/{item_id}")
async def delete_item(conversations: ConversationsOf, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Removes an item."""
    return (await conversations.remove(conversation_id, item_id)).view()
