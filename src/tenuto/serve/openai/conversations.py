"""OpenAI's conversations: lists of items that clients edit and responses continue."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
from pydantic import Field

from tenuto.base.errors import EngineStopped, InvalidRequest, LimitReached, NotAcknowledged, NotFound, SessionBusy
from tenuto.base.objects import NOBODY, ItemName, NewItem, ObjectsUse, StoredObject
from tenuto.serve.openai.response_answers import LISTED_TEXT, TEXT
from tenuto.serve.openai.response_schemas import Item, Metadata, ResponsePart
from tenuto.serve.shared.objects import ForeignObject
from tenuto.serve.shared.tenant_objects import Edit, TenantObjects

MAX_CONVERSATIONS = 10_000
"""Maximum number of one tenant's conversations."""
MAX_BYTES = 64 * 2**20
"""Maximum size of one tenant's conversations as JSON."""
MAX_ITEMS = 20
"""Maximum number of items in one request."""
AGAIN_SECONDS = 1.0
"""Time between attempts to free a conversation."""
ITEMS, PENDING = "items", "pending"
"""The lists of a conversation's items, and of the input of the response being written."""

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


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The head of a conversation's object. `response`: the one being written that is to be added;
    empty for none."""

    metadata: dict[str, str]
    created_at: int
    response: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A list of items, as it was when it was read. Its items are in the form in which clients see them."""

    stored: StoredObject
    head: Head

    @classmethod
    def of(cls, stored: StoredObject) -> Self:
        return cls(stored, msgspec.msgpack.decode(stored.head, type=Head))

    @property
    def id(self) -> str:
        return self.stored.name

    def view(self) -> dict[str, Any]:
        """Returns the conversation in the form for clients."""
        head = self.head
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": head.created_at,
            "metadata": head.metadata,
        }

    def missing(self, item: str) -> NotFound:
        """Returns the error of a request for an item that is not there."""
        return NotFound(f"conversation {self.id} has no item {item[:80]!r}")


class GoingOn:
    """A response that may continue a conversation. `earlier`: the conversation's items; empty without one."""

    def __init__(self, conversations: Conversations, name: str | None, response: str, earlier: list[Item]) -> None:
        self.earlier = earlier
        self._conversations = conversations
        self._name = name
        self._response = response
        self._ended = name is None

    async def add(self, output: Sequence[dict[str, Any]]) -> None:
        """Appends a complete response's input and output to the conversation, and frees it. Raises `NotAcknowledged` if
        it has gone on without the response, or that is unknown."""
        if self._name is not None and not self._ended:
            await self._conversations.complete(self._name, self._response, output)
            self._ended = True

    async def end(self) -> None:
        """Frees the conversation for the next response, unless that has happened. Tries until it is free."""
        await self._until_done(self._conversations.free)

    async def leave(self) -> None:
        """Does that if the response may go on at another replica, which then decides whether it is added."""
        await self._until_done(self._conversations.leave)

    async def _until_done(self, do: Callable[[str, str], Awaitable[None]]) -> None:
        while not self._ended and self._name is not None:
            try:
                await do(self._name, self._response)
                self._ended = True
            except NotAcknowledged:
                await asyncio.sleep(AGAIN_SECONDS)
            except EngineStopped:  # others find out that this replica is gone
                return


Fate = Callable[[str], Awaitable[list[dict[str, Any]] | None]]
"""Returns the output of a response whose replica is gone; `None` if it has none. Raises `SessionBusy` while it is
being written elsewhere."""


class Conversations:
    """The conversations of a tenant.

    Invariant: a response that is to be added to a conversation is named in its head from before the response begins,
    and its input is in the list `PENDING`. One change adds input and output, and removes the name. So if a replica is
    gone, any other that finds the name of its response can do its part, and only one does: no response is in the
    conversation twice, and none that was answered is missing.
    """

    KIND = "conversation"

    def __init__(self, objects: TenantObjects, fate: Fate) -> None:
        self._objects = objects
        self._fate = fate

    async def open(self, items: Sequence[Item], metadata: dict[str, str]) -> Conversation:
        """Opens a conversation. Raises `LimitReached`."""
        used = await self._objects.use()
        if used.objects >= MAX_CONVERSATIONS:
            raise LimitReached(f"{MAX_CONVERSATIONS} conversations exist, the most allowed; delete some")
        _require_room(used)
        name = f"conv_{secrets.token_hex(16)}"
        head = _encoded(Head(metadata, int(time.time())))
        await self._objects.edit(name, "", Edit(head, added=_new([kept(item) for item in items])))
        return await self.find(name)

    async def find(self, name: str) -> Conversation:
        """Returns a conversation by id, after a response whose replica is gone was added or given up. Raises
        `NotFound`."""
        found = await self._find(name)
        if not found.stored.abandoned:
            return found
        try:
            output = await self._fate(found.head.response)
        except SessionBusy:  # it goes on elsewhere
            return found
        if output is None:
            await self.free(name, found.head.response)
        else:
            with suppress(NotAcknowledged):  # another request has added it
                await self.complete(name, found.head.response, output)
        return await self._find(name)

    async def _find(self, name: str) -> Conversation:
        if (found := await self._objects.find(name)) is None:
            raise _absent(name)
        return Conversation.of(found)

    async def items(self, name: str) -> list[Item]:
        """Returns all items of a conversation in the form of requests. Raises `NotFound`."""
        await self.find(name)
        return await self._given(name)

    async def _given(self, name: str) -> list[Item]:
        return [Item.model_validate(item) for item in await self._items(name, ITEMS)]

    async def _items(self, name: str, part: str) -> list[dict[str, Any]]:
        return [msgspec.json.decode(item.body) for item in await self._objects.items(name, part)]

    async def page(self, name: str, after: str | None, limit: int, *, newest_first: bool) -> dict[str, Any]:
        """Returns at most `limit` items after the one with the id `after`. Raises `NotFound`."""
        await self.find(name)
        page = await self._objects.page(name, ITEMS, limit, after, newest_first=newest_first)
        if page is None:
            raise _absent(name)
        if not page.found:
            raise NotFound(f"there is no item {str(after)[:80]!r} here", param="after")
        return listed([msgspec.json.decode(item.body) for item in page.items], more=page.more)

    async def item(self, name: str, item: str) -> dict[str, Any]:
        """Returns an item by id. Raises `NotFound`."""
        found = await self.find(name)
        for each in await self._items(name, ITEMS):
            if each["id"] == item:
                return each
        raise found.missing(item)

    async def go_on(self, name: str | None, items: Sequence[Item], response: str) -> GoingOn:
        """Begins a response with input `items` that continues the conversation `name`, if given. The caller must call
        its `end`. Raises `NotFound`, `SessionBusy`, `LimitReached`, `InvalidRequest`."""
        if name is None:
            return GoingOn(self, None, response, [])
        given = _new([kept(item) for item in items], PENDING)
        while True:
            found = await self._idle(name, "conversation")
            _require_room(await self._objects.use())
            edit = Edit(_with(found, response=response), self._objects.worker, (PENDING,), added=given)
            going_on = GoingOn(self, name, response, [])
            try:
                if await self._objects.edit(name, found.stored.revision, edit) is None:
                    continue
                going_on.earlier = await self._given(name)
            except BaseException:
                await going_on.end()
                raise
            return going_on

    async def _idle(self, name: str, param: str | None = None) -> Conversation:
        """Returns a conversation without a response in progress. `param`: the field that names it. Raises `NotFound`,
        `SessionBusy`."""
        found = await self.find(name)
        if found.head.response:
            raise SessionBusy(f"a response in conversation {name} is not complete yet", param=param)
        return found

    async def complete(self, name: str, response: str, output: Sequence[dict[str, Any]]) -> None:
        """Appends the input and output of the response that the conversation names, and frees it. Nothing happens if
        the conversation was deleted. Raises `NotAcknowledged` if it names another one."""
        given = await self._items(name, PENDING)

        def completed(found: StoredObject | None) -> Edit | None:
            if found is None:
                return None
            conversation = Conversation.of(found)
            if conversation.head.response != response:
                raise NotAcknowledged(f"conversation {name} has gone on without this response; ask again")
            return Edit(_with(conversation, response=""), None, (PENDING,), added=_new([*given, *output]))

        await self._objects.change(name, completed)

    async def free(self, name: str, response: str) -> None:
        """Gives up the response, if the conversation names it."""

        def freed(found: StoredObject | None) -> Edit | None:
            if found is None or (conversation := Conversation.of(found)).head.response != response:
                return None
            return Edit(_with(conversation, response=""), None, (PENDING,))

        await self._objects.change(name, freed)

    async def leave(self, name: str, response: str) -> None:
        """Lets the next request find out what has become of the response, if the conversation names it."""

        def left(found: StoredObject | None) -> Edit | None:
            if found is None or Conversation.of(found).head.response != response:
                return None
            return Edit(found.head, NOBODY)

        await self._objects.change(name, left)

    async def add(self, name: str, items: Sequence[Item]) -> list[dict[str, Any]]:
        """Appends items, which get ids, and returns them. Raises `NotFound`, `SessionBusy`, `LimitReached`,
        `InvalidRequest`."""
        new = [kept(item) for item in items]
        while True:
            found = await self._idle(name)
            _require_room(await self._objects.use())
            if await self._objects.edit(name, found.stored.revision, Edit(found.stored.head, added=_new(new))):
                return new

    async def describe(self, name: str, metadata: dict[str, str]) -> Conversation:
        """Replaces the metadata. Raises `NotFound`."""

        def described(found: StoredObject | None) -> Edit:
            if found is None:
                raise _absent(name)
            return Edit(_with(Conversation.of(found), metadata=metadata), found.worker)

        await self._objects.change(name, described)
        return await self._find(name)

    async def remove(self, name: str, item: str) -> Conversation:
        """Removes an item. Raises `NotFound`, `SessionBusy`."""
        while True:
            found = await self._idle(name)
            await self.item(name, item)
            edit = Edit(found.stored.head, removed=[ItemName(ITEMS, item)])
            if await self._objects.edit(name, found.stored.revision, edit):
                return found

    async def close(self, name: str) -> None:
        """Deletes a conversation. Raises `NotFound`."""
        if not await self._objects.delete(name):
            raise _absent(name)


def _absent(name: str) -> NotFound:
    return NotFound(f"there is no conversation {name[:80]!r}; those of a server without a fleet end with it")


def _require_room(used: ObjectsUse) -> None:
    """Raises `LimitReached` if the conversations are full."""
    if used.size >= MAX_BYTES:
        raise LimitReached(f"conversations have {used.size} bytes; allowed: {MAX_BYTES}; delete some")


def _encoded(head: Head) -> bytes:
    return msgspec.msgpack.encode(head)


def _with(conversation: Conversation, **fields: Any) -> bytes:
    """Returns the head of a conversation with other values of these fields."""
    return _encoded(msgspec.structs.replace(conversation.head, **fields))


def _new(items: Sequence[dict[str, Any]], part: str = ITEMS) -> list[NewItem]:
    return [NewItem(part, item["id"], msgspec.json.encode(item)) for item in items]


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
