"""The Anthropic interface, used by Anthropic's own client."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from tests.serve.server import Server, serving

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
    answer = ask(client, max_tokens=9, extra_body={"temperature": 0})
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == (
        "message",
        "assistant",
        "witness",
        "max_tokens",
    )
    assert [block.type for block in answer.content] == ["text"]
    assert answer.usage.output_tokens == 9
    assert prompt_tokens(answer.usage) == client.messages.count_tokens(model="witness", messages=HI).input_tokens


def prompt_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def test_tokens_of_whole_pages_count_as_created_and_are_read_later(client: Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Pages that nobody sent before. " * 20}]
    first, second = (ask(client, messages, max_tokens=1).usage for _ in range(2))
    page = 32
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens % page) == (0, 0)
    assert first.cache_creation_input_tokens > 10 * page > page > first.input_tokens
    assert (second.cache_read_input_tokens or 0) >= first.cache_creation_input_tokens
    assert second.cache_creation_input_tokens == 0
    assert prompt_tokens(first) == prompt_tokens(second)


def test_the_model_may_be_left_out(witness: Server) -> None:
    with witness.client() as http:
        answer = http.post("/v1/messages", json={"messages": HI, "max_tokens": 2}).raise_for_status().json()
        assert answer["model"] == "witness"
        http.post("/v1/messages/count_tokens", json={"messages": HI}).raise_for_status()


def test_a_stream_has_the_text_of_the_whole_answer(client: Anthropic) -> None:
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


def test_a_loop_of_tool_calls_and_results(client: Anthropic) -> None:
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
    assert prompt_tokens(usage) > 200


def test_a_stream_has_the_call_of_the_whole_answer(client: Anthropic) -> None:
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
    ("options", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "so"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "f"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "x"}}], "tool_choice": {"type": "any"}},
            "parameters of 'f'",
        ),
        ({"temperature": -1}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=str,
)
def test_an_impossible_request_is_refused_by_its_field(
    client: Anthropic, witness: Server, options: dict[str, Any], named: str
) -> None:
    body = {"model": "witness", "messages": HI, "max_tokens": 5, **options}
    answer = httpx.post(f"{witness.url}/v1/messages", json=body, timeout=60)
    error = told(answer, 400, "invalid_request_error")
    assert re.search(rf"\b{re.escape(named)}", error["message"]), error


# -- errors have Anthropic's form


def told(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """Returns the error of an answer, checked to have exactly Anthropic's form."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


def test_an_unknown_model_is_not_found(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model") as refused:
        ask(client, model="other")
    assert refused.value.type == "not_found_error"
    assert refused.value.request_id


def test_answers_have_the_id_of_their_request(client: Anthropic) -> None:
    answer = ask(client, max_tokens=1, extra_headers={"x-request-id": "mine"})
    assert answer._request_id == "mine"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b'{"a": "\xff"}', 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", b"{}", 400, "invalid_request_error"),
        ("POST", "/v1/messages/other", b"{}", 404, "not_found_error"),
        ("POST", "/v1/messages/batches", b"{}", 400, "invalid_request_error"),
        ("GET", "/v1/messages/batches/x", b"", 404, "not_found_error"),
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages", b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", 413, "request_too_large"),
    ],
)
def test_errors_before_a_message_is_read_have_anthropics_form(
    http: httpx.Client, method: str, path: str, content: bytes, status: int, kind: str
) -> None:
    told(http.request(method, path, content=content, headers={"content-type": "application/json"}), status, kind)


def test_errors_of_the_connection_have_anthropics_form(http: httpx.Client) -> None:
    many = [("x-a", "b")] * 300
    told(http.post("/v1/messages?beta=true", headers=many), 431, "invalid_request_error")
    assert set(http.post("/v1/completions", headers=many).json()) == {"error"}


def test_the_error_that_ends_a_stream_has_anthropics_form(slow_witness: Server) -> None:
    body = {"model": "witness", "messages": HI, "max_tokens": 3000, "stream": True}
    with slow_witness.client() as http, http.stream("POST", "/v1/messages", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        http.post("/abort_request", json={"abort_all": True})
        said = list(lines)
        data = json.loads(said[said.index("event: error") + 1].removeprefix("data: "))
        assert data == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": data["error"]["message"]},
            "request_id": answer.headers["request-id"],
        }
        assert "aborted" in data["error"]["message"]


def test_errors_of_keys_limits_and_shutdown_have_anthropics_form(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[[keys]]\ntenant = 'alice'\nkey = 'alice-key'\nlimits = { turns = 1 }\n")
    with serving("--model", "witness:0.005", "--context-length", "4096", "--keys", str(keys)) as server:
        url, body = f"{server.url}/v1/messages", {"model": "witness", "messages": HI, "max_tokens": 3000}
        told(httpx.post(url, json=body, timeout=60), 401, "authentication_error")
        mine = {"x-api-key": "alice-key"}
        stream = {**body, "stream": True}
        with httpx.Client(headers=mine, timeout=60) as http, http.stream("POST", url, json=stream) as open_one:
            next(open_one.iter_lines())
            told(http.post(url, json=body), 429, "rate_limit_error")
            server.process.send_signal(signal.SIGTERM)
            told(_refused_by_the_end(http, url, body), 503, "overloaded_error")


def _refused_by_the_end(http: httpx.Client, url: str, body: dict[str, Any]) -> httpx.Response:
    """Returns the first answer after the server has begun to end."""
    deadline = time.monotonic() + 60
    while (answer := http.post(url, json=body)).status_code == 429:
        assert time.monotonic() < deadline
    return answer
