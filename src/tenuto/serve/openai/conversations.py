"""OpenAI's conversations: lists of items that clients edit and responses continue."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from pydantic import Field

from tenuto.base.errors import InvalidRequest, LimitReached, NotFound, SessionBusy
from tenuto.serve.openai.response_answers import LISTED_TEXT, TEXT
from tenuto.serve.openai.response_schemas import Item, Metadata, ResponsePart
from tenuto.serve.shared.objects import ForeignObject

MAX_CONVERSATIONS = 10_000
"""Maximum number of one tenant's conversations."""
MAX_BYTES = 64 * 2**20
"""Maximum size of one tenant's conversations as JSON."""
MAX_ITEMS = 20
"""Maximum number of items in one request."""

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}

Items = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)]


class ConversationBody(ForeignObject):
    """A conversation to open."""

    items: Items | None = None
    metadata: Metadata | None = None


class MetadataBody(ForeignObject):
    """New metadata."""

    metadata: Metadata


class ItemsBody(ForeignObject):
    """Items to add."""

    items: Items


@dataclass(slots=True)
class Conversation:
    """A list of items. `items`: in the form in which clients see them. `size`: bytes of the items and metadata as JSON.
    `busy`: a response is being written."""

    id: str
    metadata: dict[str, str]
    created_at: int = field(default_factory=lambda: int(time.time()))
    items: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0
    busy: bool = False

    def view(self) -> dict[str, Any]:
        """Returns the conversation in the form for clients."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}

    def given(self) -> list[Item]:
        """Returns the items in the form of requests."""
        return [Item.model_validate(item) for item in self.items]

    def page(self, after: str | None, limit: int, *, newest_first: bool) -> dict[str, Any]:
        """Returns at most `limit` items after the one with the id `after`. Raises `NotFound`."""
        return page_of(self.items, after, limit, newest_first=newest_first)

    def item(self, name: str) -> dict[str, Any]:
        """Returns an item by id. Raises `NotFound`."""
        for item in self.items:
            if item["id"] == name:
                return item
        raise NotFound(f"conversation {self.id} has no item {name[:80]!r}")


class GoingOn:
    """A response that may continue a conversation. `earlier`: the conversation's items; empty without one."""

    def __init__(self, conversations: Conversations, conversation: Conversation | None, items: Sequence[Item]) -> None:
        """`items`: the response's input. Raises `InvalidRequest`."""
        self.earlier: list[Item] = []
        self._conversations = conversations
        self._conversation = conversation
        self._input: list[dict[str, Any]] = []
        if conversation is not None:
            self.earlier = conversation.given()
            self._input = [kept(item) for item in items]
            conversation.busy = True

    def add(self, output: Sequence[dict[str, Any]]) -> None:
        """Appends a complete response's input and output to the conversation."""
        if self._conversation is not None:
            self._conversations.add(self._conversation, [*self._input, *output])

    def end(self) -> None:
        """Frees the conversation for the next response."""
        if self._conversation is not None:
            self._conversation.busy = False


class Conversations:
    """The conversations of a tenant. They exist only in this process and end with it."""

    def __init__(self) -> None:
        self._by_id: dict[str, Conversation] = {}
        self._bytes = 0

    def open(self, items: Sequence[Item], metadata: dict[str, str]) -> Conversation:
        """Opens a conversation. Raises `LimitReached`."""
        if len(self._by_id) >= MAX_CONVERSATIONS:
            raise LimitReached(f"{MAX_CONVERSATIONS} conversations exist, the most allowed; delete some")
        self.require_room()
        conversation = Conversation(f"conv_{secrets.token_hex(16)}", {})
        self._by_id[conversation.id] = conversation
        self.describe(conversation, metadata)
        self.add(conversation, [kept(item) for item in items])
        return conversation

    def find(self, name: str) -> Conversation:
        """Returns a conversation by id. Raises `NotFound`."""
        found = self._by_id.get(name)
        if found is None:
            raise NotFound(f"there is no conversation {name[:80]!r}; conversations end with the server")
        return found

    def go_on(self, name: str | None, items: Sequence[Item]) -> GoingOn:
        """Begins a response with input `items` that continues the conversation `name`, if given. The caller must call
        its `end`. Raises `NotFound`, `SessionBusy`, `LimitReached`, `InvalidRequest`."""
        if name is None:
            return GoingOn(self, None, items)
        self.require_room()
        return GoingOn(self, self.idle(name, "conversation"), items)

    def idle(self, name: str, param: str | None = None) -> Conversation:
        """Returns a conversation without a response in progress. `param`: the field that names it. Raises `NotFound`,
        `SessionBusy`."""
        found = self.find(name)
        if found.busy:
            raise SessionBusy(f"a response in conversation {name} is not complete yet", param=param)
        return found

    def require_room(self) -> None:
        """Raises `LimitReached` if the conversations are full."""
        if self._bytes >= MAX_BYTES:
            raise LimitReached(f"conversations have {self._bytes} bytes; allowed: {MAX_BYTES}; delete some")

    def add(self, conversation: Conversation, items: Sequence[dict[str, Any]]) -> None:
        """Appends items, which must have ids."""
        conversation.items += items
        self._resize(conversation, sum(map(_size, items)))

    def describe(self, conversation: Conversation, metadata: dict[str, str]) -> None:
        """Replaces the metadata."""
        self._resize(conversation, _size(metadata) - _size(conversation.metadata))
        conversation.metadata = metadata

    def remove(self, conversation: Conversation, item: str) -> None:
        """Removes an item. Raises `NotFound`."""
        found = conversation.item(item)
        conversation.items.remove(found)
        self._resize(conversation, -_size(found))

    def close(self, name: str) -> None:
        """Deletes a conversation. Raises `NotFound`."""
        self._bytes -= self.find(name).size
        del self._by_id[name]

    def _resize(self, conversation: Conversation, by: int) -> None:
        conversation.size += by
        if conversation.id in self._by_id:  # otherwise deleted during a response
            self._bytes += by


def page_of(items: Sequence[dict[str, Any]], after: str | None, limit: int, *, newest_first: bool) -> dict[str, Any]:
    """Returns at most `limit` items after the one with the id `after`. Raises `NotFound`."""
    ordered = items[::-1] if newest_first else items
    start = 0 if after is None else 1 + next((i for i, one in enumerate(ordered) if one["id"] == after), -1)
    if after is not None and not start:
        raise NotFound(f"there is no item {after[:80]!r} here", param="after")
    return listed(ordered[start : start + limit], more=start + limit < len(ordered))


def listed(items: Sequence[dict[str, Any]], *, more: bool = False) -> dict[str, Any]:
    """Returns items as a list in OpenAI's form."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else ("", "")
    return {"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": more}


def kept(item: Item) -> dict[str, Any]:
    """Returns an item of a conversation in the form of a list's entry, with a new id. Raises `InvalidRequest` for a
    call or result without the call's id."""
    if item.type not in ("message", "reasoning", "compaction") and not item.call_id:
        raise InvalidRequest(f"a {item.type} has no call_id; allowed: the id of the call", param="items")
    return entry_of(item)


def entry_of(item: Item) -> dict[str, Any]:
    """Returns an item in the form of a list's entry, with a new id."""
    base = {"id": f"{_PREFIXES[item.type]}_{secrets.token_hex(12)}", "type": item.type, "status": "completed"}
    if item.type == "message":
        kind = TEXT if item.role == "assistant" else "input_text"
        return {**base, "role": item.role, "content": _parts(item.content, kind)}
    if item.type == "reasoning":
        return {
            **base,
            "summary": _parts(item.summary, "summary_text"),
            "content": _parts(item.content, "reasoning_text"),
        }
    if item.type == "function_call":
        return {**base, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if item.type == "compaction":
        return {**base, "encrypted_content": item.encrypted_content}
    if item.type == "custom_tool_call":
        return {**base, "call_id": item.call_id, "name": item.name, "input": item.input}
    output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
    return {**base, "call_id": item.call_id, "output": output}


def _parts(content: str | list[ResponsePart] | None, kind: str) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part.text for part in content or ()]
    more: dict[str, Any] = LISTED_TEXT if kind == TEXT else {}
    return [{"type": kind, "text": text, **more} for text in texts]


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))
