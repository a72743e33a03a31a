"""Chats that a request asks to store: they can be read again, listed, described and deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from tenuto.base.errors import InvalidRequest, NotFound
from tenuto.serve.openai.answers import Choices, Writer
from tenuto.serve.openai.conversations import page_of
from tenuto.serve.openai.response_schemas import Metadata
from tenuto.serve.openai.schemas import ChatMessage
from tenuto.serve.shared.kept import Kept

_METADATA: TypeAdapter[dict[str, str]] = TypeAdapter(Metadata)


@dataclass(frozen=True, slots=True)
class Head:
    """The fields of a chat by which lists are filtered. `number`: chats are listed in the order of their numbers."""

    number: int
    model: str
    metadata: Mapping[str, str]


class StoredChats(Kept):
    """The latest stored chats of a tenant. `messages`: the lists of their input messages as JSON; those of the oldest
    may be missing.

    Invariant: `_heads` are those of the kept chats, by their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages = Kept()
        self._heads: dict[str, Head] = {}
        self._numbers = count()

    def store(self, chat: dict[str, Any], *, metadata: Mapping[str, str], messages: bytes) -> None:
        """Stores a chat with its input messages, as JSON."""
        head = Head(next(self._numbers), chat["model"], metadata)
        self._put(chat, head)
        if chat["id"] in self._heads:
            self.messages.keep(chat["id"], messages)

    def _put(self, chat: dict[str, Any], head: Head) -> None:
        name, messages = chat["id"], self.messages.find(chat["id"])
        self.keep(name, msgspec.json.encode({**chat, "metadata": head.metadata}))
        if self.find(name) is not None:
            self._heads[name] = head
            if messages is not None:
                self.messages.keep(name, messages)

    def chat(self, name: str) -> bytes:
        """Returns a chat as JSON. Raises `NotFound`."""
        found = self.find(name)
        if found is None:
            raise NotFound(f"there is no stored chat {name[:80]!r}; chats are stored with store true")
        return found

    def messages_of(self, name: str) -> list[dict[str, Any]]:
        """Returns the input messages of a chat. Raises `NotFound`."""
        self.chat(name)
        found = self.messages.find(name)
        if found is None:
            raise NotFound(f"the messages of chat {name} are no longer stored")
        messages: list[dict[str, Any]] = msgspec.json.decode(found)
        return messages

    def describe(self, name: str, metadata: Mapping[str, str]) -> bytes:
        """Replaces the metadata of a chat, and returns the chat. Raises `NotFound`."""
        chat = msgspec.json.decode(self.chat(name))
        self._put(chat, replace(self._heads[name], metadata=metadata))
        return self.chat(name)

    def page(
        self, model: str, metadata: Mapping[str, str], after: str | None, limit: int, *, newest_first: bool
    ) -> dict[str, Any]:
        """Returns a page of the chats of a model, or of all models if `model` is empty, that have this metadata. Raises
        `NotFound`."""
        heads = [
            (head.number, name)
            for name, head in self._heads.items()
            if model in ("", head.model) and metadata.items() <= head.metadata.items()
        ]
        page = page_of([{"id": name} for _, name in sorted(heads)], after, limit, newest_first=newest_first)
        page["data"] = [msgspec.Raw(self.chat(entry["id"])) for entry in page["data"]]
        return page

    def forget(self, name: str) -> None:
        super().forget(name)
        self.messages.forget(name)
        self._heads.pop(name, None)


def checked_metadata(given: object) -> dict[str, str]:
    """Returns the metadata of a chat to be stored. Raises `InvalidRequest`."""
    try:
        return _METADATA.validate_python(given or {}, strict=True)
    except ValidationError:
        allowed = "at most 16 texts of up to 512 characters, with names of up to 64"
        raise InvalidRequest(
            f"metadata cannot be stored; allowed with store: an object of {allowed}", param="metadata"
        ) from None


def listed_messages(messages: Sequence[ChatMessage]) -> bytes:
    """Returns the messages of a request as JSON, in the form of a list's entries, without ids."""
    return msgspec.json.encode([_entry(message) for message in messages])


def _entry(message: ChatMessage) -> dict[str, Any]:
    entry: dict[str, Any] = {"content": None, "content_parts": None, **message.model_dump(exclude_none=True)}
    if isinstance(entry["content"], list):
        entry |= {"content": None, "content_parts": entry["content"]}
    return entry


class StoredChoices(Choices):
    """The choices of a chat that is stored once it is complete, also if it is streamed."""

    def __init__(self, store: Callable[[dict[str, Any]], None], again: Sequence[Writer], *given: Any) -> None:
        """`store`: called with the whole answer. `again`: new writers, which write it after a stream. `given`: as for
        `Choices`."""
        super().__init__(*given)
        self._store = store
        self._again = again

    async def whole(self) -> dict[str, Any]:
        whole = await super().whole()
        self._store(whole)
        return whole

    def closing(self) -> bytes:
        self._store(self.written(self._again))
        return super().closing()
