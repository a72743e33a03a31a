"""Requests as coding agents and agent frameworks send them: optional parts are ignored, and the answer names them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest
from anthropic import Anthropic, beta_tool

from tests.eventually import eventually
from tests.serve.server import Server, serving

UNDONE = "x-tenuto-left-undone"
HI = [{"role": "user", "content": "hi"}]
READ = {"name": "Read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {}}}


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(path, json={"model": "witness", **body})


def undone(answer: httpx.Response) -> list[str]:
    """Returns the ignored fields named in the answer's header, after checking that the request succeeded."""
    assert answer.status_code == 200, answer.text
    return answer.headers[UNDONE].split(", ") if UNDONE in answer.headers else []


def message(http: httpx.Client, **fields: Any) -> httpx.Response:
    return post(http, "/v1/messages?beta=true", {"messages": HI, "max_tokens": 4, **fields})


def test_anthropics_coding_agent_is_answered(http: httpx.Client) -> None:
    text = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = message(
        http,
        system=text,
        messages=[{"role": "user", "content": text}, {"role": "system", "content": "It is late."}],
        tools=[READ, {**READ, "name": "Later", "defer_loading": True}],
        metadata={"user_id": "a"},
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stream=True,
    )
    assert undone(answer) == ["thinking"]
    assert "message_stop" in answer.text


def test_unknown_fields_of_messages_and_of_their_parts_are_named(http: httpx.Client) -> None:
    part = {"type": "text", "text": "hi", "source_lang_code": "en", "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [part], "mood": "good"}], "max_tokens": 2}
    left = undone(post(http, "/v1/chat/completions", body))
    assert sorted(left) == ["messages.content.source_lang_code", "messages.mood"]


def test_a_field_that_requests_nothing_is_not_named(http: httpx.Client) -> None:
    assert undone(message(http, thinking={"type": "disabled"}, context_management={}, metadata={})) == []


def test_ignored_fields_are_logged(witness: Server) -> None:
    with witness.client() as http:
        assert undone(message(http, speed="fast")) == ["speed"]
    eventually(lambda: any("left_undone" in line and '["speed"]' in line for line in witness.lines))


def test_a_system_message_within_the_conversation_stays_in_its_place(http: httpx.Client) -> None:
    def counted(*messages: dict[str, Any]) -> int:
        answer = post(http, "/v1/messages/count_tokens", {"messages": messages})
        return int(answer.json()["input_tokens"])

    late = {"role": "system", "content": [{"type": "text", "text": "late"}]}
    assert counted(*HI, late) - counted(*HI) == counted({**HI[0]}, late, late) - counted(*HI, late)


def test_tools_that_cannot_be_run_are_left_out_and_named(http: httpx.Client) -> None:
    hosted = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, {"type": "bash_20250124"}]

    def shown(tools: list[Any]) -> int:
        return int(post(http, "/v1/messages/count_tokens", {"messages": HI, "tools": tools}).json()["input_tokens"])

    assert undone(message(http, tools=[*hosted, READ])) == ["tools.web_search_20250305", "tools.bash_20250124"]
    assert shown([*hosted, READ]) == shown([READ]) > shown(hosted)


def test_the_name_of_an_ignored_tool_cannot_forge_a_header(http: httpx.Client) -> None:
    assert undone(message(http, tools=[{"type": "a, b\r\nset-cookie: c"}])) == ["tools.a__b__set-cookie:_c"]


def test_results_may_refer_to_tools_found_by_search(http: httpx.Client) -> None:
    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "Later"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    turns = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert message(http, messages=turns, tools=[READ]).status_code == 200


def test_openais_coding_agent_is_answered(http: httpx.Client) -> None:
    function = {"type": "function", "name": "run", "strict": False, "parameters": {"type": "object", "properties": {}}}
    spawn = {"type": "namespace", "name": "agents", "description": "x", "tools": [{**function, "name": "spawn"}]}
    body = {
        "input": [
            {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        ],
        "tools": [function, spawn, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"session_id": "a"},
        "prompt_cache_key": "a",
        "max_output_tokens": 4,
        "store": False,
    }
    answer = post(http, "/v1/responses", body)
    assert set(undone(answer)) == {"tools.namespace", "tools.web_search", "reasoning", "include"}
    assert [tool["name"] for tool in answer.json()["tools"]] == ["run"]


def test_advisory_fields_of_chats_are_accepted_and_named(http: httpx.Client) -> None:
    advice = {
        "store": True,
        "reasoning_effort": "high",
        "verbosity": "low",
        "service_tier": "priority",
        "web_search_options": {"search_context_size": "low"},
    }
    answer = post(http, "/v1/chat/completions", {"messages": HI, "max_tokens": 2, **advice})
    assert set(undone(answer)) == set(advice)


def test_fields_that_clients_add_to_messages_they_send_back_are_accepted(http: httpx.Client) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function, "index": 0, "provider_specific_fields": None}
    added = {"provider_specific_fields": {"a": 1}, "thinking_blocks": [], "reasoning_details": [{}], "id": "x"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", **cached}], "metadata": {}},
        {"role": "assistant", "content": None, "tool_calls": [call], **added},
        {"role": "tool", "tool_call_id": "c", "content": "done", **cached},
    ]
    tools = [{"type": "function", "function": {"name": "f"}, **cached}]
    answer = post(http, "/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 1})
    assert undone(answer) == []


def test_a_thread_is_refused_with_the_error_that_makes_the_client_fall_back(witness: Server) -> None:
    asked: list[str] = []

    @beta_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "mild"

    with Anthropic(base_url=witness.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="witness",
            max_tokens=200,
            tools=[weather],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            messages=[{"role": "user", "content": "Is it mild?"}],
            max_iterations=2,
        )
        stops = [answer.stop_reason for answer in runner]
    assert stops == ["tool_use", "tool_use"]
    assert asked


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/v1/chat/completions", {"messages": None}, "messages", "This model's maximum context length is 4096 tokens"),
        ("/v1/completions", {"prompt": None}, "prompt", "This model's maximum context length is 4096 tokens"),
        ("/v1/responses", {"input": None}, "input", "This model's maximum context length is 4096 tokens"),
    ],
)
def test_an_exceeded_context_is_reported_in_the_words_that_clients_look_for(
    http: httpx.Client, path: str, body: dict[str, Any], field: str, words: str
) -> None:
    long: Any = "word " * 2000
    given = [{"role": "user", "content": long}] if field == "messages" else long
    answer = post(http, path, {**body, field: given})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert error["message"].startswith(words)
    assert "allowed: 409" in error["message"]


def test_a_prompt_that_is_too_long_is_reported_in_the_words_that_anthropics_clients_look_for(
    http: httpx.Client,
) -> None:
    answer = post(http, "/v1/messages", {"messages": [{"role": "user", "content": "word " * 2000}], "max_tokens": 5})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long")
    assert "allowed: 409" in error["message"]


def test_the_same_grammar_given_twice_counts_once(http: httpx.Client) -> None:
    rules = 'start: "yes" | "no"'
    twice = {"guided_grammar": rules, "structured_outputs": {"grammar": rules}, "guided_decoding_backend": "guidance"}
    chat = {"messages": HI, "max_tokens": 9}
    answer = post(http, "/v1/chat/completions", {**chat, **twice})
    assert answer.json()["choices"][0]["message"]["content"] in ("yes", "no")
    other = post(http, "/v1/chat/completions", {**chat, **twice, "guided_grammar": 'start: "maybe"'})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "invalid_request")


@pytest.fixture(scope="module")
def renamed() -> Iterator[Server]:
    names = ("--served-model-name", "claude-x", "--served-model-name", "gpt-x")
    with serving("--model", "witness", "--context-length", "512", *names) as server:
        yield server


def test_a_model_may_have_several_names(renamed: Server) -> None:
    with renamed.client() as http:
        listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert listed == ["claude-x", "gpt-x"]
        assert [http.get(f"/v1/models/{name}").json()["id"] for name in (*listed, "default")] == [*listed, "claude-x"]
        for name, status in (("claude-x", 200), ("gpt-x", 200), ("default", 200), ("witness", 404)):
            answer = http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
            assert answer.status_code == status
        assert "'claude-x', 'gpt-x'" in answer.json()["error"]["message"]


def test_anthropics_client_lists_models_in_its_own_form(renamed: Server) -> None:
    with Anthropic(base_url=renamed.url, api_key="none", max_retries=0) as client:
        pages = client.models.list(limit=1)
        assert (pages.first_id, pages.last_id, pages.has_more) == ("claude-x", "claude-x", True)
        assert [model.id for model in pages] == ["claude-x", "gpt-x"]  # of both pages
        assert [model.id for model in client.models.list(before_id="gpt-x").data] == ["claude-x"]
        model = client.models.retrieve("gpt-x")
        assert (model.type, model.id, model.max_input_tokens, model.created_at.year) == ("model", "gpt-x", 512, 1970)
        for ask in (lambda: client.models.retrieve("other"), lambda: client.models.list(after_id="other")):
            with pytest.raises(anthropic.NotFoundError, match="allowed: ") as refused:
                ask()
            assert refused.value.type == "not_found_error"
            assert refused.value.request_id


def test_any_model_name_is_accepted_if_the_server_allows_it() -> None:
    options = ("--model", "witness", "--context-length", "512", "--any-model-name")
    with serving(*options) as server, server.client() as http:
        answer = http.post("/v1/completions", json={"model": "gpt-6", "prompt": "a", "max_tokens": 1})
        assert json.loads(answer.text)["model"] == "witness"
        assert http.get("/v1/models/gpt-6").json()["id"] == "gpt-6"
