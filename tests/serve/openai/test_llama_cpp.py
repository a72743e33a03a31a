"""Routes and fields for clients of llama.cpp's server, and stop ids and grammars in the forms of other servers."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.serve.openai.calls import GREEDY, HI
from tests.serve.server import Server


def test_paths_without_prefix_are_the_same(witness: Server) -> None:
    with OpenAI(base_url=witness.url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["witness"]
        plain = client.chat.completions.create(messages=HI, max_tokens=4, **GREEDY)
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(messages=HI, max_tokens=4, **GREEDY).choices == plain.choices


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "a" * 9000}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "a" * 9000}], "stream": True}),
        ("/completion", {"prompt": "a" * 9000}),
        ("/completion", {"prompt": [1] * 4096}),
    ],
)
def test_errors_count_the_tokens_of_a_prompt_that_is_too_long(witness: Server, path: str, body: Any) -> None:
    with witness.client() as http:
        refused = http.post(path, json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 4096)
        assert error["n_prompt_tokens"] >= 4096
        if path == "/chat/completions":
            there = http.post(f"/v1{path}", json=body).json()["error"]
            assert there["type"] == "invalid_request_error"
            assert there["details"] == {"prompt_tokens": error["n_prompt_tokens"], "context_length": 4096}
            assert (there["code"], there["message"]) == (error["code"], error["message"])


def test_a_template_is_applied_to_messages_as_in_a_chat(witness: Server) -> None:
    with witness.client() as http:
        prompt = http.post("/apply-template", json={"messages": HI}).raise_for_status().json()["prompt"]
        assert "hi" in prompt
        unfinished = http.post("/apply-template", json={"messages": HI, "add_generation_prompt": False}).json()
        assert prompt.startswith(unfinished["prompt"])
        assert len(prompt) > len(unfinished["prompt"])
        refused = http.post("/apply-template", json={"messages": []})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")


def test_the_properties_have_the_context_and_the_slots(witness: Server) -> None:
    props = httpx.get(f"{witness.url}/props", timeout=60).raise_for_status().json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["total_slots"] >= 1
    assert props["model_alias"] == "witness"


def test_stop_ids_that_the_model_does_not_have_stop_nothing(client: OpenAI) -> None:
    unknown: Any = {"stop_token_ids": [2**31 - 1, 10**6]}
    asked: dict[str, Any] = {"prompt": "hello", "max_tokens": 6, **GREEDY}
    usual = client.completions.create(**asked)
    assert client.completions.create(extra_body=unknown, **asked).choices == usual.choices
    assert client.completions.create(extra_body={**unknown, "min_tokens": 3}, **asked).choices == usual.choices


def test_the_same_grammar_in_two_fields_is_one(client: OpenAI) -> None:
    schema = {"type": "integer"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    asked: dict[str, Any] = {"messages": HI, "max_tokens": 4, "response_format": form, **GREEDY}
    one = client.chat.completions.create(**asked)
    for same in (schema, '{"type":"integer"}'):
        assert client.chat.completions.create(extra_body={"guided_json": same}, **asked).choices == one.choices
    with pytest.raises(openai.BadRequestError, match="not JSON") as refused:
        client.chat.completions.create(extra_body={"guided_json": "{"}, **asked)
    assert refused.value.param == "guided_json"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(extra_body={"guided_json": {"type": "string"}}, **asked)
