"""Custom tools, and choices among tools, in chats and Responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.present import present
from tests.serve.openai.calls import GREEDY, HI, client_of
from tests.serve.server import Server

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["n"],
    "additionalProperties": False,
}
FLAT: list[Any] = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("one", "two", "three")]
REGEX = {"definition": "(ab){1,3}", "syntax": "regex"}
LARK = {"definition": 'start: "a"', "syntax": "lark"}
CUSTOM: Any = {"name": "patch", "description": "Changes a file."}


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    """A client that leaves stored responses behind."""
    with client_of(witness) as client:
        yield client


def nested(tool: Any) -> Any:
    """Returns a tool of Responses in the form of chats."""
    return {"type": tool["type"], tool["type"]: {name: value for name, value in tool.items() if name != "type"}}


def test_only_allowed_tools_are_called(client: OpenAI) -> None:
    allowed = [{"type": "function", "name": name} for name in ("two", "three")]
    rules: dict[str, Any] = {"mode": "required", "tools": [*allowed, {"type": "web_search"}]}
    flat: Any = {"type": "allowed_tools", **rules}
    chat: Any = {"type": "allowed_tools", "allowed_tools": {**rules, "tools": [nested(tool) for tool in allowed]}}
    called = set()
    for seed in range(12):
        options: dict[str, Any] = {"model": "witness", "parallel_tool_calls": False}
        answer = client.chat.completions.create(
            messages=HI, tools=[nested(tool) for tool in FLAT], tool_choice=chat, seed=seed, **options
        )
        (call,) = present(answer.choices[0].message.tool_calls)
        assert call.type == "function"
        response = client.responses.create(input="hi", tools=FLAT, tool_choice=flat, store=False, **options)
        (item,) = response.output
        assert item.type == "function_call"
        called |= {call.function.name, item.name}
    assert called <= {"two", "three"}
    assert response.to_dict()["tool_choice"] == {**flat, "tools": allowed}
    everyone = client.responses.create(model="witness", input="hi", tools=FLAT, store=False, max_output_tokens=1)
    assert prompt_tokens(response) == prompt_tokens(everyone)  # the prompt has all tools


def prompt_tokens(response: Any) -> int:
    return int(response.usage.input_tokens)


@pytest.mark.parametrize(
    ("mode", "names"), [("auto", ["four"]), ("required", [])], ids=["an unknown tool", "none that can be called"]
)
def test_allowed_tools_that_do_not_exist_are_refused(client: OpenAI, mode: Any, names: list[str]) -> None:
    tools: Any = [{"type": "function", "name": name} for name in names] + [{"type": "mcp", "server_label": "x"}]
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": tools}
    with pytest.raises(openai.BadRequestError, match="allowed: functions that tools has") as refused:
        client.responses.create(model="witness", input="hi", tools=FLAT, tool_choice=choice)
    assert refused.value.param == "tool_choice"


def test_a_custom_tool_gets_text_in_a_chat(client: OpenAI) -> None:
    tool: Any = {"type": "custom", "custom": {**CUSTOM, "format": {"type": "grammar", "grammar": REGEX}}}
    options: dict[str, Any] = {"tools": [tool], "tool_choice": nested({"type": "custom", "name": "patch"}), **GREEDY}
    message = client.chat.completions.create(messages=HI, **options).choices[0].message
    (call,) = present(message.tool_calls)
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input.replace("ab", "")) == ("patch", "")
    chunks = client.chat.completions.create(messages=HI, stream=True, **options)
    (streamed,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert streamed.to_dict()["custom"] == call.custom.to_dict()
    again: list[Any] = [*HI, message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert client.chat.completions.create(messages=again, tools=[tool], max_tokens=1, **GREEDY).usage


def test_a_custom_tool_gets_text_in_a_response(client: OpenAI) -> None:
    tool: Any = {"type": "custom", **CUSTOM, "format": {"type": "grammar", **REGEX}}
    options: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "custom", "name": "patch"}, **GREEDY}
    first = client.responses.create(input="hi", **options)
    (call,) = first.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input.replace("ab", "")) == ("patch", "")
    assert first.to_dict()["tools"] == [tool]
    events = list(client.responses.create(input="hi", stream=True, **options))
    (delta,) = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert delta == done == call.input
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    short: dict[str, Any] = {"tools": [tool], "max_output_tokens": 1, **GREEDY}
    stored = client.responses.create(input=[result], previous_response_id=first.id, **short)
    sent: Any = [{"role": "user", "content": "hi"}, call.to_dict(), result]
    resent = client.responses.create(input=sent, **short)
    assert prompt_tokens(stored) > prompt_tokens(first)
    assert prompt_tokens(resent) > prompt_tokens(first)
    name = client.conversations.create(items=sent).id
    kept: Any = client.conversations.items.list(name, order="asc").data
    assert [item.type for item in kept] == ["message", "custom_tool_call", "custom_tool_call_output"]
    assert kept[1].input == call.input


def test_a_grammar_that_cannot_be_enforced_is_told_to_the_model_and_named(client: OpenAI) -> None:
    tool: Any = {"type": "custom", **CUSTOM, "format": {"type": "grammar", **LARK}}
    raw = client.responses.with_raw_response.create(input="hi", tools=[tool], max_output_tokens=1, **GREEDY)
    plain = client.responses.create(input="hi", tools=[{"type": "custom", **CUSTOM}], max_output_tokens=1, **GREEDY)
    assert raw.headers["x-tenuto-left-undone"] == "tools.custom.format"
    assert prompt_tokens(raw.parse()) > prompt_tokens(plain)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "custom"}], "tools[0].custom"),
        ([nested({"type": "custom", **CUSTOM, "format": {"type": "grammar"}})], "tools[0].custom.format.definition"),
        ([nested({"type": "function", "name": "patch"}), nested({"type": "custom", **CUSTOM})], "tools[1].custom.name"),
    ],
    ids=json.dumps,
)
def test_malformed_custom_tools_are_refused_by_their_field(client: OpenAI, tools: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=HI, tools=tools, **GREEDY)
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)
