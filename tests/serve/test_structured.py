"""Structured answers, requested by each interface's own names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

import tenuto
from tests.serve.server import Server

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
HI: list[Any] = [{"role": "user", "content": "hi"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=8)


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def is_pet(text: str) -> bool:
    return bool(Pet.model_validate_json(text))


def is_json(text: str) -> bool:
    return isinstance(json.loads(text), dict)


EBNF = 'root ::= "<" [0-9]+ ">"'
LARK = 'start: "<" /[0-9]+/ ">"'
WRAPPED = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ({"response_format": WRAPPED}, is_pet),
        ({"guided_json": SCHEMA}, is_pet),
        ({"guided_json": json.dumps(SCHEMA)}, is_pet),
        ({"guided_regex": "[a-c]{4}"}, re.compile("[a-c]{4}").fullmatch),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}.__contains__),
        ({"guided_grammar": EBNF}, re.compile("<[0-9]+>").fullmatch),
        ({"guided_grammar": LARK}, re.compile("<[0-9]+>").fullmatch),
        ({"structured_outputs": {"json": SCHEMA}}, is_pet),
        ({"structured_outputs": {"regex": "[a-c]{4}"}}, re.compile("[a-c]{4}").fullmatch),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}.__contains__),
        ({"structured_outputs": {"grammar": EBNF}}, re.compile("<[0-9]+>").fullmatch),
        ({"regex": "[a-c]{4}"}, re.compile("[a-c]{4}").fullmatch),
        ({"ebnf": EBNF}, re.compile("<[0-9]+>").fullmatch),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_chats_and_completions_follow_the_requested_structure(client: OpenAI, body: dict[str, Any], right: Any) -> None:
    chat = client.chat.completions.create(model="witness", messages=HI, max_tokens=900, extra_body=body)
    assert chat.choices[0].finish_reason == "stop"
    assert right(chat.choices[0].message.content), chat
    text = client.completions.create(model="witness", prompt="hi", max_tokens=900, extra_body=body)
    assert right(text.choices[0].text), text


def test_any_json_object_can_be_requested(client: OpenAI) -> None:
    """The witness would write on endlessly, so the object's end is forced."""
    body = {"response_format": {"type": "json_object"}, "stop": ["}"], "include_stop_str_in_output": True}
    chat = client.chat.completions.create(model="witness", messages=HI, max_tokens=3000, extra_body=body)
    assert (chat.choices[0].message.content or "").startswith("{")


def test_samples_and_streams_also_follow_the_structure(client: OpenAI) -> None:
    chat = client.chat.completions.create(model="witness", messages=HI, n=4, extra_body={"guided_json": SCHEMA})
    assert all(is_pet(choice.message.content or "") for choice in chat.choices)
    assert len({choice.message.content for choice in chat.choices}) > 1
    stream = client.chat.completions.create(
        model="witness", messages=HI, stream=True, extra_body={"guided_json": SCHEMA}
    )
    assert is_pet("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))


def test_openais_client_parses_its_requested_schema(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(model="witness", messages=HI, response_format=Pet)
    assert isinstance(parsed.choices[0].message.parsed, Pet)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root = x"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
    ids=str,
)
def test_an_impossible_structure_is_refused_by_its_field(client: OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="witness", messages=HI, extra_body=body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("params", "right"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, is_pet),
        ({"regex": "[a-c]{4}"}, re.compile("[a-c]{4}").fullmatch),
        ({"ebnf": EBNF}, re.compile("<[0-9]+>").fullmatch),
    ],
)
def test_sglangs_names_request_the_same_structures(witness: Server, params: dict[str, Any], right: Any) -> None:
    body = {"text": "hi", "sampling_params": {**params, "max_new_tokens": 900}}
    answer = httpx.post(f"{witness.url}/generate", json=body, timeout=60).json()
    assert right(answer["text"]), answer


def test_sglangs_clients_learn_which_field_is_wrong(witness: Server) -> None:
    body = {"text": "hi", "sampling_params": {"json_schema": '{"type": "nonsense"}'}}
    answer = httpx.post(f"{witness.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "sampling_params.json_schema"


def test_sessions_follow_a_structure_over_http_and_regenerate_in_another(witness: Server) -> None:
    with tenuto.connect(witness.url) as engine:
        session = engine.session()
        turn = session.chat("hi", grammar={"json_schema": SCHEMA})
        assert is_pet("".join(turn))
        again = session.regenerate(grammar={"choice": ["yes", "no"]}, temperature=1.0, seed=3)
        assert "".join(again) in ("yes", "no")
        with pytest.raises(tenuto.errors.InvalidRequest) as refused:
            session.chat("hi", grammar={"regex": "["}).result()
        assert refused.value.param == "grammar"
        assert session.info.tokens > 0
