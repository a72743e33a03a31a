"""Refusals of malformed requests: they name the field as the request does, and give the allowed values."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import httpx
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from tenuto.base.errors import TenutoError
from tenuto.serve.shared.invalid import refusal_of
from tests.serve.server import Server

COMPLETION: dict[str, Any] = {"model": "witness", "prompt": [1], "max_tokens": 1}
CHAT: dict[str, Any] = {"model": "witness", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
GENERATE: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
PLACES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "witness", "input": "a", "max_output_tokens": 1},
    "/generate": GENERATE,
    "/v1/sessions": {"id": "invalid"},
    "/v1/sessions/invalid/turns": {"input": [1], "max_new_tokens": 1, "stream": False},
    "/v1/sessions/invalid/append": {"input": [1]},
    "/v1/sessions/invalid/abort": {"keep": 1},
    "/v1/sessions/invalid/trim": {"turns": []},
    "/open_session": {"capacity_of_str_len": 1},
    "/abort_request": {"rid": "a"},
}
SCHEMA = "response_format.json_schema.schema"
OF_PYTHON = re.compile(
    r"Input should|instance of|list\[|dict\[|constrained|function-|literal|nullable|Extra inputs|Field "
)
"""Python's own words, which a user neither wrote nor needs to know."""


@pytest.fixture(autouse=True)
def session(http: httpx.Client) -> None:
    http.post("/v1/sessions", json={"id": "invalid"})  # or it is open already


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) - {"details"} == {"message", "type", "param", "code"}
    return error


# -- the field, and the allowed values


PART = {"type": "text", "text": "a"}
PROMPTS = "prompt should be a string, a list of integers, a list of strings, or a list of lists of integers"
INPUTS = "input should be a string, a list of integers, or a list of messages"
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"prompt": 5}, "prompt", PROMPTS),
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt[1]", "prompt[1] should be an integer"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt[1]", "prompt[1] should be a string"),
    ("/v1/completions", {"prompt": [[1], [2, "a"]]}, "prompt[1][1]", "prompt[1][1] should be an integer"),
    ("/v1/completions", {"prompt": [5.5]}, "prompt[0]", "prompt[0] should be an integer, a string, or a list"),
    ("/v1/completions", {"prompt": [-1]}, "prompt[0]", "prompt[0] should be greater than or equal to 0"),
    ("/v1/completions", {"stop": 5}, "stop", "stop should be a string or a list of strings"),
    ("/v1/completions", {"stop": ["a", 5]}, "stop[1]", "stop[1] should be a string"),
    ("/v1/completions", {"temperature": "hot"}, "temperature", "temperature should be a number"),
    ("/v1/completions", {"temperature": -1}, "temperature", "temperature should be greater than or equal to 0"),
    ("/v1/completions", {"colour": "red"}, "colour", "colour is not a known field here"),
    ("/v1/completions", {"a b": 1}, '["a b"]', '["a b"] is not a known field here'),
    ("/v1/completions", {"logit_bias": {"a": 1}}, "logit_bias.a", "logit_bias.a is a key that should be an integer"),
    ("/v1/completions", {"logit_bias": {"5": "a"}}, 'logit_bias["5"]', 'logit_bias["5"] should be a number'),
    ("/v1/completions", {"session_id": ".."}, "session_id", "'.' or '..'"),
    ("/v1/chat/completions", {"messages": "a"}, "messages", "messages should be a list"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user"}]},
        "messages[0].content",
        "messages[0].content is required",
    ),
    (
        "/v1/chat/completions",
        {"messages": [CHAT["messages"][0], {"role": "user", "content": {"str": 1}}]},
        "messages[1].content",
        "messages[1].content should be a string or a list of parts",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART, {"type": "text"}]}]},
        "messages[0].content[1].text",
        "messages[0].content[1].text is required",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART, {"type": "image_url"}]}]},
        "messages[0].content[1].type",
        "messages[0].content[1].type is 'image_url', which is not supported; allowed: 'text'",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "not supported"),
    ("/v1/chat/completions", {"tools": [{}]}, "tools[0].type", "tools[0].type is required"),
    ("/v1/chat/completions", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ("/generate", {"input_ids": None, "text": 5}, "text", "text should be a string or a list of strings"),
    ("/generate", {"sampling_params": {"n": "a"}}, "sampling_params.n", "sampling_params.n should be an integer"),
    (
        "/generate",
        {"sampling_params": [{"n": "a"}]},
        "sampling_params[0].n",
        "sampling_params[0].n should be an integer",
    ),
    ("/generate", {"sampling_params": 5}, "sampling_params", "should be an object or a list of objects"),
    (
        "/generate",
        {"sampling_params": {"structural_tag": "a"}},
        "sampling_params.structural_tag",
        "structural_tag is not supported",
    ),
    ("/v1/sessions/invalid/turns", {"input": 5}, "input", INPUTS),
    ("/v1/sessions/invalid/turns", {"input": [{"role": "user"}]}, "input[0].content", "input[0].content is required"),
    ("/v1/sessions/invalid/turns", {"input": [1, {"role": "a"}]}, "input[1]", "input[1] should be an integer"),
    ("/v1/sessions/invalid/turns", {"if_busy": "wait"}, "if_busy", "if_busy should be 'reject' or 'queue'"),
    ("/v1/sessions/invalid/abort", {"keep": "most"}, "keep", "'none', 'delivered' or 'all', or an integer"),
    ("/v1/sessions", {"id": "a/b"}, "id", "id should be 1 to 64 letters, digits, '.', '_', ':' and '-'"),
    ("/v1/sessions", {"metadata": {"a": 1}}, "metadata.a", "metadata.a should be a string"),
    ("/v1/sessions", {"metadata": {"a": "b" * 513}}, "metadata.a", "metadata.a should have at most 512 characters"),
    ("/v1/sessions", {"metadata": {"a " * 33: ""}}, f'metadata["{"a " * 20}"]', "is a key that should have at most 64"),
    ("/v1/sessions", {"ttl": 0}, "ttl", "ttl should be greater than 0"),
    ("/v1/sessions", {"priority": 10**6}, "priority", "priority should be less than or equal to 1000"),
    ("/generate", {"rid": ""}, "rid", "rid should have 1 or more characters"),
    (
        "/v1/sessions/invalid/trim",
        {"turns": [1] * 100_001},
        "turns",
        "turns should have at most 100000 items, not 100001",
    ),
]


@pytest.mark.parametrize(("path", "change", "param", "said"), WRONG)
def test_a_refusal_names_the_field_as_written_and_the_allowed_values(
    http: httpx.Client, path: str, change: dict[str, Any], param: str, said: str
) -> None:
    error = error_of(http.post(path, json={**PLACES[path], **change}))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert said in error["message"]
    assert not OF_PYTHON.search(error["message"])
    supported = "not supported" not in error["message"]
    assert error["code"] == ("invalid_request" if supported else "unsupported")


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 5000}, "prompt"),
        ("/v1/completions", {"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
        ("/v1/completions", {"logit_bias": {"5": 1e9}}, "logit_bias"),
        ("/v1/completions", {"guided_regex": ""}, "guided_regex"),
        ("/v1/completions", {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ("/v1/completions", {"guided_grammar": "root ::= oops"}, "guided_grammar"),
        ("/v1/chat/completions", {"max_completion_tokens": 1, "min_tokens": 2}, "min_tokens"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": "a"}}}, SCHEMA),
        ("/v1/chat/completions", {"stop": ["a"] * 100}, "stop"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"model": "other"}, "model"),
        ("/v1/completions", {"n": 2, "session_id": "a"}, "n"),
        ("/v1/completions", {"stream_options": {}}, "stream_options"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 9000}]}, "messages"),
        ("/v1/chat/completions", {"top_logprobs": 1}, "top_logprobs"),
        ("/generate", {"sampling_params": {"top_p": 5.0}}, "sampling_params.top_p"),
        ("/generate", {"sampling_params": {"top_k": 0}}, "sampling_params.top_k"),
        ("/generate", {"sampling_params": [{"top_k": 0}]}, "sampling_params[0].top_k"),
        ("/generate", {"sampling_params": {"regex": ""}}, "sampling_params.regex"),
        ("/generate", {"input_ids": [10**6]}, "input_ids"),
        ("/v1/sessions/invalid/turns", {"min_new_tokens": 5}, "min_new_tokens"),
        ("/v1/sessions/invalid/turns", {"input": [10**6]}, "input"),
    ],
)
def test_refusals_by_the_engine_also_name_the_field(
    http: httpx.Client, path: str, change: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json={**PLACES[path], **change})
    assert error_of(answer, answer.status_code)["param"] == param
    assert answer.status_code in (400, 404)


@pytest.mark.parametrize("number", [9, 10**30])
@pytest.mark.parametrize(
    ("action", "field"),
    [
        ("rewind", "turn"),
        ("rewind", "position"),
        ("fork", "turn"),
        ("fork", "position"),
        ("trim", "turns"),
        ("append", "input"),
    ],
)
def test_a_place_that_a_session_does_not_have_is_named(
    http: httpx.Client, action: str, field: str, number: int
) -> None:
    wrong: Any = [number if field == "turns" else 10**6 * number] if field in ("turns", "input") else number
    error = error_of(http.post(f"/v1/sessions/invalid/{action}", json={field: wrong}))
    assert error["param"].removesuffix("[0]") == field
    assert "allowed: " in error["message"] or "should be" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/messages", "/v1/sessions"])
def test_unknown_fields_with_lone_surrogates_in_their_names_are_refused(http: httpx.Client, path: str) -> None:
    body = json.dumps({**PLACES.get(path, {}), "\ud800": 1})
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_an_item_that_a_conversation_cannot_keep_is_named_by_its_place(http: httpx.Client) -> None:
    orphan = [{"type": "function_call_output", "output": "a"}]
    name = http.post("/v1/conversations", json={}).json()["id"]
    response = {"model": "witness", "input": orphan, "conversation": name}
    assert error_of(http.post("/v1/responses", json=response))["param"] == "input"
    assert error_of(http.post(f"/v1/conversations/{name}/items", json={"items": orphan}))["param"] == "items"


def test_openais_client_learns_which_field_was_wrong(witness: Server) -> None:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="witness", messages=[{"role": "user", "content": 5}])
        assert refused.value.param == "messages[0].content"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="other", prompt="a")
        assert unknown.value.param == "model"


def test_query_path_and_header_parameters_are_named_with_their_place(http: httpx.Client) -> None:
    for answer, said in (
        (http.get("/v1/sessions?limit=0"), "query parameter limit should be greater than or equal to 1"),
        (http.get("/v1/sessions/a%20b"), "path parameter session_id should be 1 to 64 letters"),
        (
            http.get(f"/v1/sessions/invalid/turns/turn-{'0' * 24}/events", headers={"last-event-id": "a"}),
            "header parameter last-event-id should be an integer",
        ),
    ):
        error = error_of(answer)
        assert said in error["message"]
        assert error["param"] in said


# -- invalid bodies


@pytest.mark.parametrize("path", list(PLACES))
def test_a_body_not_declared_as_json_is_refused_by_its_content_type(http: httpx.Client, path: str) -> None:
    content = json.dumps(PLACES[path]).encode()
    for declared in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", "json", "\xff"):
        error = error_of(http.post(path, content=content, headers={b"content-type": declared.encode("latin-1")}), 415)
        assert error["code"] == "unsupported_media_type"
        assert error["message"] == f"the body's content-type is {declared!a}; allowed: application/json"
    error = error_of(http.post(path, content=content), 415)
    assert error["message"] == "the body's content-type is not given; allowed: application/json"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the body is empty; allowed: a JSON object"),
        (b"[]", "the body should be an object"),
        (b'"a"', "the body should be an object"),
        (b'{"a": 1,}', "the body is not JSON: .* at character 8"),
        (b"{'a': 1}", "the body is not JSON: .* at character 1"),
        (b'{"a": "\xff"}', "the body is not readable JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "the body is not readable JSON"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused_as_such(http: httpx.Client, content: bytes, said: str) -> None:
    for path in ("/v1/completions", "/generate", "/v1/sessions"):
        error = error_of(http.post(path, content=content, headers={"content-type": "application/json"}))
        assert re.match(said, error["message"]), error["message"]
        assert (error["code"], error["param"]) == ("invalid_request", None)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "temperature"),
        ("/v1/chat/completions", "top_p"),
        ("/generate", "sampling_params.frequency_penalty"),
        ("/generate", "sampling_params.min_p"),
        ("/v1/sessions", "ttl"),
        ("/v1/sessions/invalid/turns", "repetition_penalty"),
        ("/v1/sessions/invalid/append", "timeout"),
        ("/open_session", "timeout"),
    ],
)
def test_non_finite_numbers_are_refused_by_their_field(http: httpx.Client, path: str, field: str, number: str) -> None:
    outer, _, inner = field.partition(".")
    body = json.dumps({**PLACES[path], outer: {inner: "?"} if inner else "?"}).replace('"?"', number)
    error = error_of(http.post(path, content=body, headers={"content-type": "application/json"}))
    assert (error["param"], error["message"]) == (field, f"{field} should be a finite number")


def test_a_non_finite_bias_is_refused_by_its_field(http: httpx.Client) -> None:
    for path in ("/v1/completions", "/v1/sessions/invalid/turns"):
        body = json.dumps({**PLACES[path], "logit_bias": {"5": float("nan")}})
        error = error_of(http.post(path, content=body, headers={"content-type": "application/json"}))
        assert error["param"] == 'logit_bias["5"]'


# -- fields of several allowed types


def refused(model: type[BaseModel], body: dict[str, Any]) -> TenutoError:
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    return refusal_of([{**one, "loc": ("body", *one["loc"])} for one in error.value.errors()], body, None)


class Entry(BaseModel):
    value: int | list[int]


def no_more(value: list[Any]) -> list[Any]:
    if len(value) > 2:
        raise ValueError(f"there are {len(value)} entries; allowed: at most 2")
    return value


class Holder(BaseModel):
    field: str | list[int] | Annotated[list[str], Field(max_length=2)] | list[Entry] = ""
    checked: Annotated[list[int], AfterValidator(no_more)] = []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["a", "b", "c"], "field should have at most 2 items, not 3"),
        ([1, 2, "a"], "field[2] should be an integer"),
        (["a", 2], "field[1] should be a string"),
        ([{"value": 1}, {"value": "a"}], "field[1].value should be an integer or a list of integers"),
        ([{"value": 1}, {"value": [1, "a"]}], "field[1].value[1] should be an integer"),
        ([{"value": 1}, {}], "field[1].value is required"),
        ([None], "field[0] should be an integer, a string, or an object"),
        (None, "field should be a string, a list of integers, a list of strings, or a list of objects"),
    ],
)
def test_a_value_is_checked_against_the_type_it_most_resembles(value: Any, said: str) -> None:
    error = refused(Holder, {"field": value})
    assert (str(error), error.param) == (said, said.split(maxsplit=1)[0])


def test_a_custom_check_is_reported_in_its_own_words() -> None:
    assert str(refused(Holder, {"checked": [1, 2, 3]})) == (
        "checked is refused: there are 3 entries; allowed: at most 2"
    )


def test_only_the_first_of_many_problems_are_reported() -> None:
    said = str(refused(Holder, {"checked": ["a"] * 100_000}))
    assert said.count("should be an integer") == 8
    assert said.endswith("; and 992 more")


# -- arbitrary requests


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.sampled_from(["", "a", "list[int]", "é"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "str", "list[Part]", "n", "0"]), inner)
    ),
    max_leaves=6,
)
FIELDS = (
    *(
        "input",
        "prompt",
        "messages",
        "text",
        "input_ids",
        "sampling_params",
        "session_params",
        "stop",
        "stop_ids",
        "rid",
    ),
    *("keep", "logit_bias", "return_logprob", "logprob_start_len", "top_logprobs_num", "stream_options", "temperature"),
    *("metadata", "turns", "seed", "id", "session_id"),
)


def reached(body: Any, param: str) -> bool:
    """Returns whether a field, as refusals write it, leads to a value of the body or to a missing key of one of its
    objects."""
    steps = re.findall(r"\[(\d+)\]|\[(\"(?:[^\"\\]|\\.)*\")\]|\.?([^.\[\]]+)", param)
    for number, (index, quoted, name) in enumerate(steps):
        last = number == len(steps) - 1
        if index and isinstance(body, list) and int(index) < len(body):
            body = body[int(index)]
            continue
        key = json.loads(quoted) if quoted else name
        if not index and isinstance(body, dict) and (key in body or last):
            body = body.get(key)
            continue
        return False
    return True


def test_no_refusal_names_anything_the_request_does_not_have(http: httpx.Client) -> None:
    refusals = 0

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(list(PLACES)), st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2))
    @example("/v1/chat/completions", {"messages": [{"role": "user", "content": {"str": 1}}]})
    @example("/v1/chat/completions", {"messages": [{"role": "user", "content": {"list[Part]": 1}}]})
    @example("/generate", {"sampling_params": [{"stop": {}}]})
    def in_plain_words(path: str, fields: dict[str, Any]) -> None:
        nonlocal refusals
        body = {**PLACES[path], **fields, "max_new_tokens": 1} if path.endswith("turns") else {**PLACES[path], **fields}
        answer = http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
        if answer.status_code < 400:
            return
        refusals += 1
        error = error_of(answer, answer.status_code)
        assert answer.status_code < 500, answer.text
        said = re.sub(r"'list\[int\S*|\[\"list\[Part\]\"\]", "", error["message"])  # words of the request itself
        assert not OF_PYTHON.search(said), said
        if error["param"] is not None and "[" in error["param"]:
            assert reached(body, error["param"]), (error["param"], body)

    in_plain_words()
    assert refusals > 100
