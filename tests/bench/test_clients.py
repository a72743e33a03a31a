"""The model with which clients' tool loops are run, and the record of what they reuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.clients.caller import ANSWER, write_caller
from bench.clients.recording import recording
from bench.clients.replay import replay
from tests.serve.server import serving


def test_the_handmade_model_calls_a_tool_first_and_answers_when_it_has_a_result(tmp_path: Path) -> None:
    model = write_caller(tmp_path / "model", "read", {"path": "a ‘b’"})
    tools = [{"type": "function", "function": {"name": "read"}}]
    with serving("--model", str(model), "--context-length", "512") as server:

        def ask(*messages: object) -> dict[str, object]:
            body = {"model": "default", "messages": messages, "tools": tools}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            message: dict[str, object] = answer.json()["choices"][0]["message"]
            return message

        asked = {"role": "user", "content": "x"}
        called = ask(asked)
        assert str(called["tool_calls"]).count("a ‘b’") == 1
        result = {"role": "tool", "tool_call_id": "c", "content": "y"}
        assert ask(asked, called, result)["content"] == ANSWER
        assert ask(asked, called, result, called, result, asked)["content"] == ANSWER


def test_a_recording_counts_the_earlier_tokens_that_were_reused() -> None:
    with serving("--model", "witness") as server, recording(server.url) as record:

        def ask(*messages: str, session: str, **more: object) -> str:
            roles = ("user", "assistant")
            given = [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
            body = {"model": "witness", "messages": given, "max_tokens": 8, "seed": 1, **more}
            url, headers = f"{record.url}/v1/chat/completions", {"x-session-id": session}
            answer = httpx.post(url, json=body, headers=headers, timeout=60).json()
            return str(answer["choices"][0]["message"]["content"])

        said = ask(long := "one" * 100, session="a")
        ask(long, said, "two", session="a")
        [(reused, earlier)] = record.reuse(2)
        assert 300 < earlier - 1 <= reused <= earlier
        with serving("--model", "witness") as other:
            first, second = replay(other.url, record.requests)
        assert 300 < first.computed == first.prompt < earlier
        assert second.computed < second.prompt - 300
        assert first.seconds > 0 < second.seconds
        with pytest.raises(AssertionError, match="no session has 3 requests"):
            record.reuse(3)
        ask(long, "changed", "two", session="a")  # forks at the beginning
        with pytest.raises(AssertionError, match="no session has 3 requests"):
            record.reuse(3)


def test_the_handmade_model_calls_several_functions_at_once_and_goes_on_without_an_end(tmp_path: Path) -> None:
    calls = [("find", {"name": "b"})]
    model = write_caller(tmp_path / "model", "read", {"path": "a"}, calls=calls, goes_on=" on")
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "find")]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    with serving("--model", str(model), "--context-length", "512") as server:

        def choice(path: str, body: dict[str, Any]) -> Any:
            answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "default", **body}, timeout=60)
            return answer.json()["choices"][0]

        calls_made = choice("chat/completions", asked)["message"]["tool_calls"]
        assert [each["function"]["name"] for each in calls_made] == ["read", "find"]
        written = choice("completions", {"prompt": "x", "max_tokens": 20})
        assert (written["text"], written["finish_reason"]) == (" on" * 20, "length")


def test_the_handmade_model_writes_json_under_a_grammar_alone(tmp_path: Path) -> None:
    text = 'x"'
    model = write_caller(tmp_path / "model", "unused", {}, answer=text, goes_on=text)
    properties = {"name": {"type": "string"}, "size": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "size"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    with serving("--model", str(model), "--context-length", "512") as server:

        def content(**further: object) -> str:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **further}, timeout=60)
            return str(answer.json()["choices"][0]["message"]["content"])

        assert content() == text
        assert json.loads(content(response_format=asked))["name"] == "x"
