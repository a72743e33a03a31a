"""Counts and summaries of input for responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.eventually import eventually
from tests.serve.server import Server

CLOCK: Any = {"type": "function", "name": "clock"}


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": "witness", "max_output_tokens": 4, "temperature": 0, **options})


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def sessions(server: Server) -> set[str]:
    return {each["id"] for each in httpx.get(f"{server.url}/v1/sessions", timeout=60).json()["data"]}


def test_the_counted_tokens_are_those_of_the_response(client: OpenAI, witness: Server) -> None:
    first = ask(client, input="a question", instructions="Be brief.")
    name = client.conversations.create(items=[user("one"), user("two")]).id
    several: list[dict[str, Any]] = [
        {"input": "hi"},
        {"input": [user("hi"), user("there")], "instructions": "Be brief.", "tools": [CLOCK]},
        {"input": "three", "conversation": name},
        {"input": "and?", "previous_response_id": first.id, "instructions": "Be brief."},
        {"input": "and?", "previous_response_id": first.id, "instructions": "Be long."},
    ]
    for options in several:
        before = sessions(witness)
        counted = client.responses.input_tokens.count(**options)
        assert counted.object == "response.input_tokens"
        assert sessions(witness) == before
        assert counted.input_tokens == ask(client, **options).usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(input="a", previous_response_id="resp_x")


def test_a_compacted_conversation_goes_on_from_its_summary(client: OpenAI, witness: Server) -> None:
    talk: list[Any] = [user("one"), {"role": "assistant", "content": "a long answer " * 40}, user("two")]
    short = {"max_output_tokens": 20}
    compacted = client.responses.compact(model="witness", input=talk, extra_body=short)
    assert (compacted.object, compacted.usage.output_tokens) == ("response.compaction", 20)
    *users, summary = [item.to_dict(warnings=False) for item in compacted.output]
    texts: Any = [item["content"] for item in users]
    assert [parts[0]["text"] for parts in texts] == ["one", "two"]
    sent: list[Any] = [*users, summary, user("three")]
    after = ask(client, input=sent)
    assert after.usage.input_tokens < ask(client, input=[*talk, user("three")]).usage.input_tokens
    without = ask(client, input=[*users, user("three")])
    assert after.usage.input_tokens > without.usage.input_tokens + 20
    items: list[Any] = list(client.responses.input_items.list(after.id, order="asc"))
    assert [item.type for item in items] == ["message", "message", "compaction", "message"]
    assert items[2].encrypted_content == summary["encrypted_content"]
    name = client.conversations.create(items=sent).id
    assert client.responses.input_tokens.count(conversation=name).input_tokens == after.usage.input_tokens


def test_only_the_new_input_of_a_compaction_is_computed(client: OpenAI, witness: Server) -> None:
    first = ask(client, input="a question of some length " * 20)
    before = sessions(witness)
    compacted = client.responses.compact(
        model="witness", previous_response_id=first.id, extra_body={"max_output_tokens": 5}
    )
    assert [item.type for item in compacted.output] == ["compaction"]
    assert compacted.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    eventually(lambda: sessions(witness) == before)  # its session is closed just after it is answered


def test_a_summary_of_another_server_is_refused(client: OpenAI) -> None:
    for content in ("gAAAA", "tenuto-summary:?"):
        item: Any = {"type": "compaction", "encrypted_content": content}
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, input=[item])
        assert refused.value.param == "input[0].encrypted_content"
