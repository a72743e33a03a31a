"""llama.cpp's fields in requests of chats and tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.server import Server

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Write an example."}], "temperature": 0}


def chat(server: Server, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/chat/completions", json={**HI, "max_tokens": 12, **more}, timeout=60)


def test_a_chat_shows_its_times(smollm2_server: Server) -> None:
    whole = chat(smollm2_server, timings_per_token=True).json()
    times, usage = whole["timings"], whole["usage"]
    assert times["predicted_n"] == usage["completion_tokens"]
    assert times["prompt_n"] + times["cache_n"] == usage["prompt_tokens"]
    assert times["prompt_ms"] > 0
    assert times["predicted_per_token_ms"] * times["predicted_n"] == pytest.approx(times["predicted_ms"])
    assert "timings" not in chat(smollm2_server).json()


def test_a_stream_shows_its_times_with_each_token(smollm2_server: Server) -> None:
    asked = {"stream": True, "timings_per_token": True, "stream_options": {"include_usage": True}}
    lines = chat(smollm2_server, **asked).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "timings" not in chunks[0]
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks[1:]]
    assert counts == sorted(counts)
    assert "prompt_n" in chunks[-1]["timings"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, '"42"'),
    ],
)
def test_grammars_are_enforced(smollm2_server: Server, asked: dict[str, Any], said: str) -> None:
    assert chat(smollm2_server, **asked).json()["choices"][0]["message"]["content"] == said


def test_a_schema_belongs_to_json_objects(smollm2_server: Server) -> None:
    refused = chat(smollm2_server, response_format={"type": "text", "schema": {"const": "42"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.schema")


def test_fields_that_ask_for_nothing_are_ignored_and_others_named(smollm2_server: Server) -> None:
    usual = {"cache_prompt": True, "id_slot": -1, "mirostat": 0, "typical_p": 1.0, "samplers": [], "n_keep": 0}
    assert "x-tenuto-left-undone" not in chat(smollm2_server, **usual).headers
    left = chat(smollm2_server, cache_prompt=False, id_slot=0, return_progress=True)
    assert left.headers["x-tenuto-left-undone"] == "cache_prompt, id_slot, return_progress"
    assert chat(smollm2_server, xtc_probability=0.5).json()["error"]["param"] == "xtc_probability"


def test_content_is_tokenized_and_back(smollm2_server: Server) -> None:
    with smollm2_server.client() as http:
        plain = http.post("/tokenize", json={"content": "What is tea?<|im_end|>"}).json()["tokens"]
        spelled = http.post("/tokenize", json={"content": "What is tea?<|im_end|>", "parse_special": False}).json()
        pieces = http.post("/tokenize", json={"content": "What is tea?", "with_pieces": True}).json()["tokens"]
        assert len(plain) < len(spelled["tokens"])
        assert [one["id"] for one in pieces] == plain[:-1]
        assert "".join(one["piece"] for one in pieces) == "What is tea?"
        assert http.post("/detokenize", json={"tokens": plain}).json()["content"] == "What is tea?<|im_end|>"
        assert http.post("/tokenize", json={"content": "a", "prompt": "a"}).status_code == 400


def test_a_verbose_answer_shows_its_prompt(smollm2_server: Server) -> None:
    assert "Write an example." in chat(smollm2_server, verbose=True).json()["__verbose"]["prompt"]
    assert "__verbose" not in chat(smollm2_server, verbose=False).json()


def test_messages_are_counted(smollm2_server: Server) -> None:
    with smollm2_server.client() as http:
        counted = http.post("/chat/completions/input_tokens", json={"messages": HI["messages"]}).json()
    assert counted["input_tokens"] == chat(smollm2_server).json()["usage"]["prompt_tokens"]
