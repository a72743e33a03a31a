"""Routes of OpenAI's conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from tenuto.serve.openai.conversations import ConversationBody, Conversations, ItemsBody, MetadataBody, kept, listed
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, prefix="/v1/conversations", tags=["openai"])


async def _conversations(request: Request) -> Conversations:
    """Returns the application's conversations, created for its first request."""
    state = request.app.state
    if not hasattr(state, "conversations"):
        state.conversations = Conversations()
    conversations: Conversations = state.conversations
    return conversations


ConversationsOf = Annotated[Conversations, Depends(_conversations)]


@router.post("", responses=REFUSALS)
async def create(tenant: Caller, all_of: ConversationsOf, body: ConversationBody | None = None) -> dict[str, Any]:
    """Opens a conversation. It is kept until it is deleted or the server ends."""
    body = body or ConversationBody()
    return all_of.open(tenant.name, body.items or (), body.metadata or {}).view()


@router.get("/{conversation_id}", responses=REFUSALS)
async def read(tenant: Caller, all_of: ConversationsOf, conversation_id: str) -> dict[str, Any]:
    """Returns a conversation without its items."""
    return all_of.find(tenant.name, conversation_id).view()


@router.post("/{conversation_id}", responses=REFUSALS)
async def update(tenant: Caller, all_of: ConversationsOf, conversation_id: str, body: MetadataBody) -> dict[str, Any]:
    """Replaces a conversation's metadata."""
    found = all_of.find(tenant.name, conversation_id)
    all_of.describe(tenant.name, found, body.metadata)
    return found.view()


@router.delete("/{conversation_id}", responses=REFUSALS)
async def delete(tenant: Caller, all_of: ConversationsOf, conversation_id: str) -> dict[str, Any]:
    """Deletes a conversation. Responses that continue it remain."""
    all_of.close(tenant.name, all_of.find(tenant.name, conversation_id))
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get("/{conversation_id}/items", responses=REFUSALS)
async def list_items(
    tenant: Caller,
    all_of: ConversationsOf,
    conversation_id: str,
    after: Annotated[str | None, Query(max_length=256, description="List items after this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """Returns a page of a conversation's items."""
    return all_of.find(tenant.name, conversation_id).page(after, limit, newest_first=order == "desc")


@router.post("/{conversation_id}/items", responses=REFUSALS)
async def add_items(tenant: Caller, all_of: ConversationsOf, conversation_id: str, body: ItemsBody) -> dict[str, Any]:
    """Appends at most 20 items, which get new ids."""
    found = all_of.idle(tenant.name, conversation_id)
    all_of.require_room(tenant.name)
    items = [kept(item) for item in body.items]
    all_of.add(tenant.name, found, items)
    return listed(items)


@router.get("/{conversation_id}/items/{item_id}", responses=REFUSALS)
async def read_item(tenant: Caller, all_of: ConversationsOf, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Returns an item."""
    return all_of.item(all_of.find(tenant.name, conversation_id), item_id)


@router.delete("/{conversation_id}/items/{item_id}", responses=REFUSALS)
async def delete_item(tenant: Caller, all_of: ConversationsOf, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Removes an item."""
    found = all_of.idle(tenant.name, conversation_id)
    all_of.remove(tenant.name, found, item_id)
    return found.view()
