"""Routes of OpenAI's conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from tenuto.serve.openai.conversations import ConversationBody, Conversations, ItemsBody, MetadataBody, kept, listed
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import of_tenant
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, prefix="/v1/conversations", tags=["openai"], responses=REFUSALS)


After = Annotated[str | None, Query(max_length=256, description="List items after this one.")]
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
ConversationsOf = Annotated[Conversations, of_tenant(Conversations)]


@router.post("")
async def create(conversations: ConversationsOf, body: ConversationBody | None = None) -> dict[str, Any]:
    """Opens a conversation. It is kept until it is deleted or the server ends."""
    body = body or ConversationBody()
    return conversations.open(body.items or (), body.metadata or {}).view()


@router.get("/{conversation_id}")
async def read(conversations: ConversationsOf, conversation_id: str) -> dict[str, Any]:
    """Returns a conversation without its items."""
    return conversations.find(conversation_id).view()


@router.post("/{conversation_id}")
async def update(conversations: ConversationsOf, conversation_id: str, body: MetadataBody) -> dict[str, Any]:
    """Replaces a conversation's metadata."""
    found = conversations.find(conversation_id)
    conversations.describe(found, body.metadata)
    return found.view()


@router.delete("/{conversation_id}")
async def delete(conversations: ConversationsOf, conversation_id: str) -> dict[str, Any]:
    """Deletes a conversation. Responses that continue it remain."""
    conversations.close(conversation_id)
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
    return conversations.find(conversation_id).page(after, limit, newest_first=order == "desc")


@router.post("/{conversation_id}/items")
async def add_items(conversations: ConversationsOf, conversation_id: str, body: ItemsBody) -> dict[str, Any]:
    """Appends at most 20 items, which get new ids."""
    found = conversations.idle(conversation_id)
    conversations.require_room()
    items = [kept(item) for item in body.items]
    conversations.add(found, items)
    return listed(items)


@router.get("/{conversation_id}/items/{item_id}")
async def read_item(conversations: ConversationsOf, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Returns an item."""
    return conversations.find(conversation_id).item(item_id)


@router.delete("/{conversation_id}/items/{item_id}")
async def delete_item(conversations: ConversationsOf, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Removes an item."""
    found = conversations.idle(conversation_id)
    conversations.remove(found, item_id)
    return found.view()
