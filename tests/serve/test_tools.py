"""Tools over OpenAI's interface. The witness cannot decide to call; a grammar makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

import tenuto
from tests.serve.server import Server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": SCHEMA}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
HI: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, messages: list[Any] = HI, **options: Any) -> Any:
    return client.chat.completions.create(model="witness", messages=messages, **{"max_tokens": 800, **options})


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_required_call_is_made_and_its_arguments_follow_the_schema(client: OpenAI, choice: Any) -> None:
    answer = ask(client, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content, call.function.name) == ("tool_calls", None, "weather")
    given = json.loads(call.function.arguments)
    assert len(given["city"]) <= 8
    assert 1 <= given["days"] <= 9
    assert call.id.startswith("call_")


def test_a_stream_has_the_call_of_the_whole_answer(client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": NAMED, "temperature": 0}
    (whole,) = ask(client, **options).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0]
    assert "".join(call.function.arguments for call in calls) == whole.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


def test_several_calls_may_be_made_in_parallel(client: OpenAI) -> None:
    found = set()
    for seed in range(40):
        answer = ask(client, tools=[WEATHER], tool_choice="required", seed=seed).choices[0]
        found.add(len(answer.message.tool_calls))
        if max(found) > 1:
            return
    pytest.fail(f"there were only {found} calls")


def test_without_a_call_the_answer_is_text(client: OpenAI) -> None:
    for choice in ("auto", "none"):
        answer = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=8, temperature=0).choices[0]
        assert answer.message.tool_calls is None
        assert answer.finish_reason == "length"


def test_tools_are_rendered_whatever_the_choice(client: OpenAI) -> None:
    several: list[dict[str, Any]] = [
        {},
        {"tools": []},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [WEATHER]},
    ]
    counted = [ask(client, max_tokens=1, **options).usage.prompt_tokens for options in several]
    assert counted[0] == counted[1] < counted[2] - 100
    assert counted[2] == counted[3]


def test_with_tools_and_a_schema_the_answer_is_either_a_call_or_follows_it(client: OpenAI) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    seen = set()
    for seed in range(60):
        message = ask(client, tools=[CLOCK], response_format=shape, seed=seed, stop=["{}"]).choices[0].message
        seen.add("call" if message.tool_calls or (message.content or "").startswith('{"name"') else message.content)
        if len(seen) > 1:
            break
    assert seen <= {"call", "true", "false"}
    assert len(seen) > 1


def test_a_loop_of_calls_and_results_renders_the_whole_conversation(client: OpenAI) -> None:
    messages = list(HI)
    for turn in range(3):
        answer = ask(client, messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"{turn} degrees"}
        messages.append(result)
    messages.append({"role": "assistant", "content": None, "tool_calls": messages[1]["tool_calls"]})
    assert ask(client, [*messages, *HI], tools=[WEATHER], max_tokens=4).usage.prompt_tokens > 200


def test_a_tool_result_is_the_next_turn_of_a_session_and_nothing_is_recomputed(client: OpenAI, witness: Server) -> None:
    session: dict[str, Any] = {"tools": [WEATHER], "extra_body": {"session_id": "agent"}}
    forced = {**session, "tool_choice": NAMED}
    answer = ask(client, **forced)
    for turn in range(5):
        call = answer.choices[0].message.tool_calls[0]
        before = answer.usage.prompt_tokens + answer.usage.completion_tokens
        result = {"role": "tool", "tool_call_id": call.id, "content": f"{turn} degrees"}
        answer = ask(client, [result], **forced)
        assert answer.usage.prompt_tokens_details.cached_tokens >= before - 1  # its last token had no successor
        assert answer.usage.prompt_tokens - before < 60  # the result and the markup around it
    records = httpx.get(f"{witness.url}/v1/sessions/agent/turns", timeout=60).json()["data"]
    assert len(records) == 6
    with pytest.raises(openai.BadRequestError, match="opened with other tools") as refused:
        ask(client, HI, tools=[CLOCK], extra_body={"session_id": "agent"})
    assert refused.value.param == "tools"
    httpx.delete(f"{witness.url}/v1/sessions/agent", timeout=60).raise_for_status()


def test_a_session_opened_without_tools_gets_none_later(client: OpenAI, witness: Server) -> None:
    ask(client, max_tokens=3, extra_body={"session_id": "plain"})
    with pytest.raises(openai.BadRequestError, match="opened with no tools"):
        ask(client, tools=[CLOCK], extra_body={"session_id": "plain"})
    httpx.delete(f"{witness.url}/v1/sessions/plain", timeout=60).raise_for_status()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "retrieval"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "tool_calls",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
    ids=str,
)
def test_invalid_tools_are_refused_by_their_field(client: OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "witness", "messages": HI, **options})
    assert refused.value.param == param


def test_native_sessions_also_accept_calls_and_results(witness: Server) -> None:
    call = {"name": "weather", "arguments": '{"city": "Rome"}', "id": "x"}
    with tenuto.connect(witness.url) as engine:
        session = engine.session()
        said: Any = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
        session.turn([*said, {"role": "tool", "content": "4 degrees", "tool_call_id": "x"}], max_new_tokens=3).result()
        (record,) = httpx.get(f"{witness.url}/v1/sessions/{session.id}/turns", timeout=60).json()["data"]
        assert '{"name": "weather", "arguments": {"city": "Rome"}}' in record["input_text"]
