"""The items of a Realtime conversation, as its client sees and edits them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tenuto.base.errors import AlreadyExists, InvalidRequest, LimitReached, NotFound
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.turns import Message
from tenuto.serve.openai.realtime_schemas import RealtimeItem
from tenuto.serve.openai.response_schemas import RESULTS, messages_of, text_of
from tenuto.serve.shared.placing import placed
from tenuto.serve.shared.schemas import MAX_MESSAGES

ROOT = "root"
"""The place before all items."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of an item. Items with equal content are the same to the model. `text`: of a message, a call's
    arguments, or its result. `name`: that of a call."""

    type: Literal["message", "function_call", "function_call_output"]
    role: str | None
    text: str
    call_id: str = ""
    name: str = ""

    @staticmethod
    def of(item: RealtimeItem) -> Content:
        """Returns the content of a client's item. Raises `InvalidRequest`."""
        if item.type == "message":
            return Content("message", item.role, text_of(item.content))
        if not item.call_id and item.type in RESULTS:
            raise InvalidRequest(f"a {item.type} has no call_id; allowed: the id of the call", param="item.call_id")
        if item.type == "function_call":
            return Content("function_call", None, item.arguments, item.call_id or new_id("call"), item.name)
        return Content("function_call_output", None, text_of(item.output), item.call_id)

    def item(self) -> RealtimeItem:
        """Returns the content in the form of requests."""
        given: dict[str, Any] = {"type": self.type, "role": self.role, "content": self.text}
        if self.type == "function_call":
            given = {"type": self.type, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        elif self.type == "function_call_output":
            given = {"type": self.type, "call_id": self.call_id, "output": self.text}
        return RealtimeItem.model_validate(given)


@dataclass(slots=True)
class Entry:
    """An item of a conversation."""

    id: str
    content: Content
    status: str = "completed"

    def view(self) -> dict[str, Any]:
        """Returns the item in the form for clients."""
        content = self.content
        about = {"id": self.id, "object": "realtime.item", "type": content.type, "status": self.status}
        if content.type == "message":
            kind = "output_text" if content.role == "assistant" else "input_text"
            parts = [{"type": kind, "text": content.text}] if content.text or self.status == "completed" else []
            return {**about, "role": content.role, "content": parts}
        if content.type == "function_call":
            return {**about, "call_id": content.call_id, "name": content.name, "arguments": content.text}
        return {**about, "call_id": content.call_id, "output": content.text}


class Items:
    """The items of one conversation, in order. `most_bytes`: the most that they may take."""

    def __init__(self, most_bytes: int) -> None:
        self._entries: list[Entry] = []
        self._most_bytes = most_bytes

    def find(self, name: str, param: str = "item_id") -> Entry:
        """Returns an item by its id. Raises `NotFound`."""
        for entry in self._entries:
            if entry.id == name:
                return entry
        raise NotFound(f"the conversation has no item {name[:80]!r}", param=param)

    def all(self) -> list[Entry]:
        """Returns all items."""
        return list(self._entries)

    def put(self, entry: Entry, after: str | None = None) -> str | None:
        """Adds a client's item behind the item `after`, or at the end. Returns the id of the item before it. Raises
        `NotFound`, `AlreadyExists` or `LimitReached`."""
        if any(each.id == entry.id for each in self._entries):
            raise AlreadyExists(f"the conversation has an item {entry.id!r} already", param="item.id")
        size = sum(len(each.content.text) for each in self._entries) + len(entry.content.text)
        if len(self._entries) >= MAX_MESSAGES or size > self._most_bytes:
            raise LimitReached(
                f"the conversation has {len(self._entries)} items and would have {size} characters; allowed:"
                f" {MAX_MESSAGES} and {self._most_bytes}; delete some"
            )
        if after not in (None, ROOT):
            self.find(after, "previous_item_id")
        return self.insert(entry, after)

    def insert(self, entry: Entry, after: str | None) -> str | None:
        """Adds an item of a response as `put` does; at the end if `after` has been removed meanwhile."""
        places = [0] if after == ROOT else [at for at, each in enumerate(self._entries, 1) if each.id == after]
        at = places[0] if places else len(self._entries)
        self._entries.insert(at, entry)
        return self._entries[at - 1].id if at else None

    def remove(self, name: str) -> None:
        """Removes an item. Raises `NotFound`."""
        self._entries.remove(self.find(name))


def messages_for(
    contents: Sequence[Content], habits: ModelHabits, instructions: str | None, *, begun: bool
) -> list[dict[str, Any]]:
    """Returns items as native messages. `instructions`: the system message before them. `begun`: they continue a
    session."""
    messages = messages_of([content.item() for content in contents])
    if instructions and not begun:
        messages.insert(0, Message("system", instructions))
    return [_body(message) for message in placed(messages, habits, begun=begun)]


def _body(message: Message) -> dict[str, Any]:
    body = {name: value for name, value in asdict(message).items() if value}
    return {"role": message.role, "content": message.content, **body}


def new_id(kind: str) -> str:
    """Returns a new id, of an item, an event or a response."""
    return f"{kind}_{secrets.token_hex(12)}"
