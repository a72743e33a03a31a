"""Chats that are stored, used by OpenAI's own client: read again, listed, described and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.serve.openai.calls import GREEDY, HI

PARTS: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "c", "tool_calls": []},
    {"role": "user", "content": "d", "name": "ann"},
]


@pytest.fixture(autouse=True)
def emptied(client: OpenAI) -> Iterator[None]:
    yield
    for chat in list(client.chat.completions.list()):
        client.chat.completions.delete(chat.id)


def ask(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"messages": HI, "max_tokens": 3, "store": True, **GREEDY, **more})


def test_a_stored_chat_is_read_described_and_deleted(client: OpenAI) -> None:
    answer = ask(client, metadata={"topic": "tea"})
    found = client.chat.completions.retrieve(answer.id)
    assert (found.choices, found.usage, found.created) == (answer.choices, answer.usage, answer.created)
    assert (found.object, found.metadata) == ("chat.completion", {"topic": "tea"})
    changed = client.chat.completions.update(answer.id, metadata={"topic": "coffee"})
    assert changed.metadata == {"topic": "coffee"}
    assert client.chat.completions.retrieve(answer.id) == changed
    assert client.chat.completions.delete(answer.id).model_dump() == {
        "id": answer.id,
        "object": "chat.completion.deleted",
        "deleted": True,
    }
    completions = client.chat.completions
    for gone in (completions.retrieve, completions.delete, completions.messages.list):
        with pytest.raises(openai.NotFoundError):
            gone(answer.id)
    with pytest.raises(openai.NotFoundError):
        completions.update(answer.id, metadata={})


def test_a_streamed_chat_is_stored_whole(client: OpenAI) -> None:
    chunks = list(ask(client, stream=True, n=2))
    found = client.chat.completions.retrieve(chunks[0].id)
    for choice in found.choices:
        said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == choice.index]
        assert choice.message.content == "".join(said)
        assert choice.finish_reason == "length"
    assert (found.object, found.usage and found.usage.completion_tokens) == ("chat.completion", 6)


def test_only_chats_that_ask_for_it_are_stored(client: OpenAI) -> None:
    for store in (False, None):
        answer = ask(client, store=store, metadata={"a": "b"})
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.retrieve(answer.id)
    assert list(client.chat.completions.list()) == []


def test_chats_are_listed_in_pages_and_filtered(client: OpenAI) -> None:
    names = [ask(client, metadata={"n": str(number % 2), "all": "yes"}).id for number in range(5)]
    client.chat.completions.update(names[0], metadata={"n": "0", "changed": "yes"})  # keeps its place

    def listed(**wanted: Any) -> list[str]:
        return [chat.id for chat in client.chat.completions.list(limit=2, **wanted)]  # follows the pages

    assert listed() == names
    assert listed(order="desc") == names[::-1]
    assert listed(after=names[2]) == names[3:]
    assert listed(metadata={"n": "0"}) == names[::2]
    assert listed(metadata={"n": "0", "all": "yes"}) == names[2::2]
    assert listed(model="witness") == names
    assert listed(model="other") == []


def test_messages_of_a_stored_chat_are_listed(client: OpenAI) -> None:
    answer = ask(client, messages=PARTS)
    listed = [message.model_dump() for message in client.chat.completions.messages.list(answer.id, limit=3)]
    assert [message["id"] for message in listed] == [f"{answer.id}-{number}" for number in range(4)]
    assert [message["role"] for message in listed] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in listed] == ["Be brief.", None, "c", "d"]
    assert [part["text"] for part in listed[1]["content_parts"]] == ["a", "b"]
    assert listed[3]["name"] == "ann"
    backwards = client.chat.completions.messages.list(answer.id, order="desc", after=listed[2]["id"])
    assert [message.id for message in backwards] == [listed[1]["id"], listed[0]["id"]]


def test_wrong_metadata_and_filters_are_refused(client: OpenAI, http: httpx.Client) -> None:
    for metadata in ({"a": 1}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(number): "" for number in range(17)}):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, metadata=metadata)
        assert refused.value.param == "metadata"
    assert ask(client, store=False, metadata={"a": 1}).choices
    for query, named in (("limit=0", "limit"), ("order=up", "order"), ("metadata=a", "metadata"), ("after=x", "after")):
        answer = http.get(f"/v1/chat/completions?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404 if named == "after" else 400, named)
