"""OpenAI's `context_management` of Responses, used by OpenAI's own client: a response begins with a summary that takes
the place of a long conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve.server import Server, serving
from tests.serve.test_response_inputs import ask, sessions, user

TALK: list[Any] = [user("one"), {"role": "assistant", "content": "a long answer " * 40}, user("two")]
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def witness() -> Iterator[Server]:
    """A server whose context has room for summaries, which the witness makes long."""
    with serving("--model", "witness", "--context-length", "16384") as server:
        yield server
        server.audit()


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def above(threshold: int | None) -> list[Any]:
    return [{"type": "compaction", "compact_threshold": threshold}]


def count(client: OpenAI, items: list[Any], **options: Any) -> int:
    return client.responses.input_tokens.count(input=items, **options).input_tokens


def as_input(response: Any) -> list[Any]:
    return [item.to_dict(warnings=False) for item in response.output]


def test_a_long_conversation_is_replaced_by_a_summary(client: OpenAI, witness: Server) -> None:
    for threshold in (None, 10**6):
        assert [item.type for item in ask(client, input=TALK, context_management=above(threshold)).output] == [
            "message"
        ]
    before = sessions(witness)
    response = ask(client, input=TALK, context_management=above(100), store=False)
    assert [item.type for item in response.output] == ["compaction", "message"]
    assert sessions(witness) == before
    item = response.output[0].to_dict()
    covering_all = {**item, "encrypted_content": item["encrypted_content"].removesuffix(":1")}
    assert covering_all != item, "the last question is not part of the summary"
    assert response.usage.input_tokens == count(client, [TALK[0], covering_all, TALK[2]])
    assert response.usage.input_tokens == count(client, [*TALK, item])


@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_a_compacted_response_is_continued_from_its_state(client: OpenAI, instructions: str | None) -> None:
    told: dict[str, Any] = {"instructions": instructions} if instructions else {}
    first = ask(client, input=[*TALK[:2], user("and")], **told)
    second = ask(client, input="two", previous_response_id=first.id, context_management=above(100), **told)
    assert [item.type for item in second.output] == ["compaction", "message"]
    third = ask(client, input="three", previous_response_id=second.id, **told)
    known = second.usage.input_tokens + second.usage.output_tokens
    assert third.usage.input_tokens_details.cached_tokens >= known - 1
    sent = [*TALK[:2], user("and"), *as_input(first), user("two"), as_input(second)[0]]
    assert count(client, sent, **told) == second.usage.input_tokens, "as if the client had sent everything"
    again = ask(client, input="four", previous_response_id=third.id, context_management=above(100), **told)
    assert [item.type for item in again.output] == ["compaction", "message"]
    assert again.output[0].encrypted_content != second.output[0].encrypted_content


def test_a_conversation_that_is_sent_again_goes_on_from_the_summary(client: OpenAI) -> None:
    key: Any = {"prompt_cache_key": "compacted", "store": False}
    first = ask(client, input=TALK, context_management=above(100), **key)
    sent = [*TALK, *as_input(first), user("three")]
    second = ask(client, input=sent, **key)
    known = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= known - 1


def test_calls_stay_with_their_results(client: OpenAI) -> None:
    asked: Any = {"tools": [WEATHER], "context_management": above(100), "store": False}
    calls: list[Any] = [
        {"type": "function_call", "call_id": f"c{n}", "name": "weather", "arguments": '{"city": "Rome"}'}
        for n in (1, 2)
    ]
    results: list[Any] = [{"type": "function_call_output", "call_id": f"c{n}", "output": "4"} for n in (1, 2)]
    response = ask(client, input=[*TALK, *calls, *results], **asked)
    item = response.output[0].to_dict()
    assert item["encrypted_content"].endswith(":4")
    plain = {**item, "encrypted_content": item["encrypted_content"].removesuffix(":4")}
    replaced = [TALK[0], TALK[2], plain, *calls, *results]
    assert response.usage.input_tokens == count(client, replaced, tools=[WEATHER])


def test_a_stream_begins_with_the_summary(client: OpenAI) -> None:
    events = list(ask(client, input=TALK, context_management=above(100), stream=True))
    items = [event for event in events if event.type.startswith("response.output_item")]
    assert [(each.type.rpartition(".")[2], each.item.type, each.output_index) for each in items] == [
        ("added", "compaction", 0),
        ("done", "compaction", 0),
        ("added", "message", 1),
        ("done", "message", 1),
    ]
    response = events[-1].response
    assert response.output[0] == items[0].item
    assert client.responses.retrieve(response.id).output == response.output
    rest = list(client.responses.retrieve(response.id, stream=True, starting_after=3))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[4:]]


def test_the_items_of_a_conversation_have_the_summary(client: OpenAI) -> None:
    name = client.conversations.create(items=TALK[:2]).id
    first = ask(client, input="two", conversation=name, context_management=above(100))
    items = list(client.conversations.items.list(name, order="asc"))
    assert [item.type for item in items] == ["message", "message", "message", "compaction", "message"]
    later = count(client, [*TALK[:2], user("two"), *as_input(first), user("three")])
    assert client.responses.input_tokens.count(conversation=name, input="three").input_tokens == later


def test_nothing_but_a_question_cannot_be_compacted(client: OpenAI) -> None:
    response = ask(client, input="a long question " * 100, context_management=above(10))
    assert [item.type for item in response.output] == ["message"]


@pytest.mark.parametrize(
    ("management", "param"),
    [
        ([{"type": "forget"}], "context_management[0].type"),
        ([{"type": "compaction", "compact_threshold": 0}], "context_management[0].compact_threshold"),
        ([{"type": "compaction", "compact_threshold": "x"}], "context_management[0].compact_threshold"),
        ([{}], "context_management[0].type"),
        ({}, "context_management"),
        ([{"type": "compaction"}] * 17, "context_management"),
    ],
)
def test_impossible_compactions_are_refused_by_their_field(client: OpenAI, management: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, input=TALK, extra_body={"context_management": management})
    assert refused.value.param == param


@pytest.mark.parametrize("content", ["tenuto-summary:aGk=:x", "tenuto-summary:aGk=:99999", "tenuto-summary:aGk=:1:2"])
def test_damaged_summaries_are_refused(client: OpenAI, content: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, input=[user("a"), {"type": "compaction", "encrypted_content": content}])
    assert refused.value.param == "input[1].encrypted_content"
    assert "not a summary of this server" in json.dumps(refused.value.body)
