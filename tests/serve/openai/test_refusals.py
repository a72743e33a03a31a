"""Refused and accepted fields of the OpenAI interface."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.serve.openai.calls import GREEDY, HI
from tests.serve.openai.test_completions import texts


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "function", "content": "x"}]}, "function"),
    ],
)
def test_unsupported_fields_are_refused_by_name(client: OpenAI, options: dict[str, Any], name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=name) as refused:
        client.chat.completions.create(**{**GREEDY, "messages": HI, **options})
    assert refused.value.code == "unsupported"


def test_fields_without_effect_are_accepted(client: OpenAI) -> None:
    assert texts(
        client,
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        parallel_tool_calls=True,
        tool_choice="none",
        tools=[],
        response_format={"type": "text"},
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [3],
            "request_id": "x",
            "rid": "y",
            "separate_reasoning": True,
            "length_penalty": 1.0,
            "use_beam_search": False,
            "lora_path": None,
        },
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": "hi"}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}),
        ("chat/completions", {"messages": HI, "unknown_field": 1}),
        ("chat/completions", {"messages": HI, "max_tokens": 0}),
        ("chat/completions", {"messages": HI, "top_logprobs": 2}),
        ("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 21}),
        ("chat/completions", {"messages": HI, "n": 129}),
        ("chat/completions", {"messages": HI, "n": 2, "session_id": "x"}),
        ("chat/completions", {"messages": HI, "session_id": "a/b"}),
        ("chat/completions", {"messages": HI, "session_id": "~n"}),
        ("chat/completions", {"messages": HI, "stream_options": {"include_usage": True}}),
        ("chat/completions", {"messages": HI, "logit_bias": {"a": 1}}),
        ("chat/completions", {"messages": HI, "logit_bias": {"99999": 1}}),
        ("chat/completions", {"messages": HI, "logit_bias": {"1": 101}}),
        ("chat/completions", {"messages": HI, "temperature": "hot"}),
        ("completions", {}),
        ("completions", {"prompt": None}),
        ("completions", {"prompt": []}),
        ("completions", {"prompt": [1, "a"]}),
        ("completions", {"prompt": [-1]}),
        ("completions", {"prompt": [2**70]}),
        ("completions", {"prompt": [5000]}),
        ("completions", {"prompt": "x", "n": 3, "best_of": 4}),
        ("completions", {"prompt": "x", "suffix": "y"}),
        ("completions", {"prompt": "x", "logprobs": 21}),
        ("completions", {"prompt": "x", "stop": [""]}),
        ("completions", {"prompt": "x", "max_tokens": 2**70}),
        ("completions", {"prompt": ["x"] * 2, "session_id": "x"}),
        ("completions", {"prompt": ["x"] * 1025}),
        ("completions", {"prompt": "\ud800"}),
        ("completions", {"prompt": "x", "\ud800": 1}),
        ("completions", {"prompt": "x", "stop": "\ud800"}),
    ],
)
def test_a_malformed_request_names_the_wrong_field(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    content = json.dumps({"model": "witness", **body})
    answer = http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_the_model_name_default_means_the_served_model(client: OpenAI, http: httpx.Client) -> None:
    done = client.completions.create(prompt="a", max_tokens=1, **{**GREEDY, "model": "default"})
    assert done.model == "witness"
    answered = client.chat.completions.create(messages=HI, max_tokens=1, **{**GREEDY, "model": "default"})
    assert answered.model == "witness"
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    for name, status in (("default", 200), ("witness", 200), ("gpt", 404)):
        assert http.post("/generate", json={**body, "model": name}).status_code == status


def test_another_model_and_a_prompt_that_is_too_long_are_refused_with_openais_codes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        texts(client, model="gpt")
    assert unknown.value.code == "model_not_found"
    for n in (1, 2):
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(prompt=[1] * 5000, n=n, **GREEDY)
        assert long.value.code == "context_length_exceeded"


def test_a_turn_that_ends_too_late_is_an_error(client: OpenAI) -> None:
    late: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"timeout": 0.05, "ignore_eos": True}}
    for n in (1, 3):
        with pytest.raises(openai.InternalServerError) as passed:
            texts(client, n=n, **late)
        assert (passed.value.status_code, passed.value.code) == (504, "deadline_passed")
    with pytest.raises(openai.APIError, match="deadline"):
        list(client.completions.create(prompt="x", stream=True, **late, **GREEDY))
