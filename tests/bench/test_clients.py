"""The model with which clients' tool loops are run."""

from __future__ import annotations

from pathlib import Path

import httpx

from bench.clients.caller import ANSWER, write_caller
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
