"""Chats that a request asks to store: they can be read again, listed, described and deleted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from tenuto.base.errors import InvalidRequest, NotFound
from tenuto.base.objects import StoredObject
from tenuto.serve.openai.answers import Choices, Writer
from tenuto.serve.openai.conversations import page_of
from tenuto.serve.openai.response_schemas import Metadata
from tenuto.serve.openai.schemas import ChatMessage
from tenuto.serve.shared.kept import MAX_BYTES, MAX_KEPT
from tenuto.serve.shared.sse import Chunk
from tenuto.serve.shared.tenant_objects import Edit, TenantObjects

CHAT, MESSAGES = "chat", "messages of a chat"
"""The kinds of objects."""
_METADATA: TypeAdapter[dict[str, str]] = TypeAdapter(Metadata)


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a chat by which lists are filtered."""

    model: str
    metadata: dict[str, str]


class StoredChats:
    """The latest stored chats of a tenant, and the lists of their input messages as JSON; those of the oldest may be
    missing. A chat is an object, and has one item: itself as JSON, without its metadata."""

    def __init__(self, chats: TenantObjects, messages: TenantObjects) -> None:
        self._chats = chats
        self._messages = messages

    async def store(self, chat: dict[str, Any], *, metadata: dict[str, str], messages: bytes) -> None:
        """Stores a chat with its input messages, as JSON. Above the limits, the oldest ones are dropped."""
        name, body = chat["id"], msgspec.json.encode(chat)
        if len(body) > MAX_BYTES:
            return
        if len(messages) <= MAX_BYTES:
            await self._messages.create(name, b"", messages)
            await self._messages.drop_oldest(MAX_KEPT, MAX_BYTES)
        head = msgspec.msgpack.encode(Head(chat["model"], metadata))
        await self._chats.create(name, head, body)
        await self._chats.drop_oldest(MAX_KEPT, MAX_BYTES)

    async def chat(self, name: str) -> bytes:
        """Returns a chat as JSON. Raises `NotFound`."""
        found = await self._chats.find(name)
        body = await self._chats.only_item(name) if found is not None else None
        if found is None or body is None:
            raise _missing(name)
        return msgspec.json.encode({**msgspec.json.decode(body), "metadata": _head(found).metadata})

    async def messages_of(self, name: str) -> list[dict[str, Any]]:
        """Returns the input messages of a chat. Raises `NotFound`."""
        if await self._chats.find(name) is None:
            raise _missing(name)
        found = await self._messages.only_item(name)
        if found is None:
            raise NotFound(f"the messages of chat {name} are no longer stored")
        messages: list[dict[str, Any]] = msgspec.json.decode(found)
        return messages

    async def describe(self, name: str, metadata: dict[str, str]) -> bytes:
        """Replaces the metadata of a chat, and returns the chat. Raises `NotFound`."""

        def described(found: StoredObject | None) -> Edit:
            if found is None:
                raise _missing(name)
            return Edit(msgspec.msgpack.encode(Head(_head(found).model, metadata)))

        await self._chats.change(name, described)
        return await self.chat(name)

    async def page(
        self, model: str, metadata: Mapping[str, str], after: str | None, limit: int, *, newest_first: bool
    ) -> dict[str, Any]:
        """Returns a page of the chats of a model, or of all models if `model` is empty, that have this metadata. Raises
        `NotFound`."""
        heads = [(each.name, _head(each)) for each in await self._chats.listed()]
        names = [
            {"id": name}
            for name, head in heads
            if model in ("", head.model) and metadata.items() <= head.metadata.items()
        ]
        page = page_of(names, after, limit, newest_first=newest_first)
        data = []
        for entry in page["data"]:
            with suppress(NotFound):  # it was deleted meanwhile
                data.append(msgspec.Raw(await self.chat(entry["id"])))
        return {**page, "data": data}

    async def delete(self, name: str) -> None:
        """Deletes a chat with its messages. Raises `NotFound`."""
        if not await self._chats.delete(name):
            raise _missing(name)
        await self._messages.delete(name)


def _head(found: StoredObject) -> Head:
    return msgspec.msgpack.decode(found.head, type=Head)


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no stored chat {name[:80]!r}; chats are stored with store true")


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

    def __init__(
        self, store: Callable[[dict[str, Any]], Awaitable[None]], again: Sequence[Writer], *given: Any
    ) -> None:
        """`store`: called with the whole answer. `again`: new writers, which write it after a stream. `given`: as for
        `Choices`."""
        super().__init__(*given)
        self._store = store
        self._again = again

    async def whole(self) -> dict[str, Any]:
        whole = await super().whole()
        await self._store(whole)
        return whole

    def closing(self) -> Chunk:
        return self._closing

    async def _closing(self) -> bytes:
        await self._store(self.written(self._again))
        return self.end()
