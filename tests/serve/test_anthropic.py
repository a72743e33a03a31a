"""The interface in Anthropic's manner, spoken to by Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from tests.serve.server import Server

HI: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "x", "input_schema": SCHEMA}
FORCED: Any = {"type": "tool", "name": "weather"}


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=witness.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Anthropic, messages: list[Any] = HI, **options: Any) -> Any:
    return client.messages.create(**{"model": "witness", "messages": messages, "max_tokens": 200, **options})


def test_messages_are_answered(client: Anthropic) -> None:
    answer = ask(client, max_tokens=9)
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == (
        "message",
        "assistant",
        "witness",
        "max_tokens",
    )
    assert [block.type for block in answer.content] == ["text"]
    assert answer.usage.output_tokens == 9
    read = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert read == client.messages.count_tokens(model="witness", messages=HI).input_tokens


def test_a_stream_says_what_the_whole_answer_says(client: Anthropic) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "extra_body": {"temperature": 0}}
    whole = ask(client, **options)
    with client.messages.stream(model="witness", messages=HI, **options) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 20)


def test_a_system_message_and_blocks_of_text_are_rendered(client: Anthropic) -> None:
    counted = [
        client.messages.count_tokens(model="witness", **options).input_tokens
        for options in (
            {"messages": HI},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            {"messages": HI, "system": "Be brief."},
            {"messages": HI, "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
            {"messages": HI, "tools": [WEATHER]},
        )
    ]
    assert counted[0] == counted[1] < counted[2] == counted[3] < counted[4]


def test_a_stop_sequence_ends_an_answer(client: Anthropic) -> None:
    text = ask(client, max_tokens=20, extra_body={"temperature": 0}).content[0].text
    stop = text[len(text) // 2 :][:6]
    answer = ask(client, max_tokens=20, extra_body={"temperature": 0}, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


def test_a_loop_of_tools_and_results(client: Anthropic) -> None:
    messages = list(HI)
    for _ in range(3):
        answer = ask(client, messages, tools=[WEATHER], tool_choice=FORCED)
        (block,) = answer.content
        assert (answer.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
        assert len(block.input["city"]) <= 8
        messages.append({"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in answer.content]})
        result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "4 degrees"}]}
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "and?"}]})
    usage = ask(client, messages, tools=[WEATHER], max_tokens=4).usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 200


def test_a_stream_tells_the_call_that_the_whole_answer_has(client: Anthropic) -> None:
    options: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": FORCED,
        "max_tokens": 200,
        "extra_body": {"temperature": 0},
    }
    whole = ask(client, **options)
    with client.messages.stream(model="witness", messages=HI, **options) as stream:
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use"
    assert block.input == whole.content[0].input
    assert final.stop_reason == "tool_use"


def test_an_answer_follows_a_schema(client: Anthropic) -> None:
    answer = ask(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert set(json.loads(answer.content[0].text)) == {"city"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "so"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "f"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "f", "input_schema": {"type": "x"}}], "tool_choice": {"type": "any"}}, "tools"),
        ({"temperature": -1}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_and_the_field_named(
    client: Anthropic, witness: Server, options: dict[str, Any], param: str
) -> None:
    body = {"model": "witness", "messages": HI, "max_tokens": 5, **options}
    answer = httpx.post(f"{witness.url}/v1/messages", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_that_is_not_there_is_not_found(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        ask(client, model="other")
