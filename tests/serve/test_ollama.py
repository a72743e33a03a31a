"""Ollama's interface, used by Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import mul
from typing import Any

import httpx
import pytest
from ollama import Client, ResponseError
from pydantic import BaseModel

from tests.serve.server import Server

HI: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "num_predict": 12}
ROUNDING = 1e-3
"""How much cosines may change with the number of tokens in a step, with kernels for AMX."""


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[Client]:
    with Client(host=witness.url) as client:
        yield client


@pytest.fixture(scope="module")
def smollm2(smollm2_server: Server) -> Iterator[Client]:
    with Client(host=smollm2_server.url) as client:
        yield client


def chat(client: Client, messages: list[Any] = HI, **options: Any) -> Any:
    return client.chat(**{"model": "witness", "messages": messages, "options": GREEDY, **options})


def test_a_stream_has_the_text_of_the_whole_answer_and_ends_with_counts_and_times(client: Client) -> None:
    whole = chat(client)
    parts = list(chat(client, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for end in (whole, parts[-1]):
        assert (end.done_reason, end.eval_count) == ("length", 12)
        assert end.prompt_eval_count == whole.prompt_eval_count
        assert end.total_duration == pytest.approx(end.prompt_eval_duration + end.eval_duration, abs=2)
        assert end.prompt_eval_duration > 0


def test_a_stream_is_lines_of_json(witness: Server) -> None:
    answer = httpx.post(
        f"{witness.url}/api/chat", json={"model": "witness", "messages": HI, "options": GREEDY}, timeout=60
    )
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert all(json.loads(line)["model"] == "witness" for line in answer.text.splitlines())


def test_a_generated_text_goes_on_from_its_context(smollm2: Client) -> None:
    options: Any = {"model": "smollm2", "options": GREEDY}
    first = smollm2.generate(prompt="My name is Ada. Say hello.", **options)
    second = smollm2.generate(prompt="What is my name?", context=first.context, **options)
    assert first.context is not None
    assert second.context is not None
    assert second.context[: len(first.context)] == first.context
    assert (second.prompt_eval_count or 0) > len(first.context)


def test_a_raw_prompt_is_continued_without_the_template(smollm2: Client) -> None:
    raw = smollm2.generate(model="smollm2", prompt="Once upon a", raw=True, options=GREEDY)
    told = smollm2.generate(model="smollm2", prompt="Once upon a", options=GREEDY)
    assert (raw.prompt_eval_count or 0) < (told.prompt_eval_count or 0)
    assert "time" in (raw.response or "")


def test_formats_are_enforced(smollm2: Client) -> None:
    class City(BaseModel):
        name: str

    schema = City.model_json_schema() | {"additionalProperties": False}
    schema["properties"]["name"]["maxLength"] = 6
    said = chat(smollm2, model="smollm2", format=schema, options={"num_predict": 60}).message.content
    assert City.model_validate_json(said).name is not None
    some = smollm2.generate(model="smollm2", prompt="An object", format="json", options={"num_predict": 3})
    assert (some.response or "").lstrip().startswith("{")


def test_a_call_and_its_result_are_rendered(client: Client) -> None:
    call = {"function": {"name": "look_up", "arguments": {"city": "Rome"}}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "look_up", "content": "large"},
    ]
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    counts = [
        chat(client, some, tools=tools).prompt_eval_count
        for some, tools in ((HI, []), (HI, [tool]), (messages, [tool]))
    ]
    assert counts[0] < counts[1] < counts[2]


def cosine(vector: Sequence[float], other: Sequence[float]) -> float:
    """Returns the cosine of the angle between two vectors of length 1."""
    return sum(map(mul, vector, other))


def test_texts_are_embedded(smollm2: Client, smollm2_server: Server) -> None:
    texts = ["tea", "coffee with milk"]
    found = smollm2.embed("smollm2", texts)
    usual = httpx.post(
        f"{smollm2_server.url}/v1/embeddings", json={"input": texts, "normalize": True}, timeout=60
    ).json()
    for vector, other in zip(found.embeddings, usual["data"], strict=True):
        assert cosine(vector, other["embedding"]) == pytest.approx(1, abs=ROUNDING)
        assert sum(number**2 for number in vector) == pytest.approx(1)
    assert cosine(*found.embeddings) < 1 - 10 * ROUNDING
    assert found.prompt_eval_count == usual["usage"]["prompt_tokens"]
    assert cosine(smollm2.embeddings("smollm2", "tea").embedding, found.embeddings[0]) == pytest.approx(1, abs=ROUNDING)
    with pytest.raises(ResponseError, match="input is empty"):
        smollm2.embed("smollm2", "")


def test_the_model_is_listed_and_described(smollm2: Client) -> None:
    (listed,) = smollm2.list().models
    assert (listed.model, listed.details and listed.details.format) == ("smollm2", "gguf")
    assert listed.size is not None
    assert listed.size > 10**7
    assert listed.modified_at is not None
    (running,) = smollm2.ps().models
    assert running.context_length == 2048
    shown = smollm2.show("smollm2:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.context_length"] == 2048


def test_a_request_without_input_says_that_the_model_is_loaded(client: Client) -> None:
    assert chat(client, []).done_reason == "load"
    assert client.generate(model="witness").done_reason == "load"


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ({"model": "other"}, 404, "there is no model 'other'"),
        ({"options": {"num_ctx": 2**30}}, 400, "options.num_ctx"),
        ({"options": {"temperature": -1}}, 400, "options.temperature"),
        ({"options": {"mirostat": 1}}, 400, "options.mirostat"),
        ({"options": {"no_such": 1}}, 400, "options.no_such"),
        ({"messages": [{**HI[0], "images": [b"png"]}]}, 400, "messages[0].images"),
        ({"messages": [{"role": "user", "content": "word " * 99_999}]}, 400, "context"),
        ({"format": {"type": "hiccup"}}, 400, "hiccup"),
    ],
)
def test_refusals_are_in_ollamas_form(client: Client, more: dict[str, Any], status: int, said: str) -> None:
    with pytest.raises(ResponseError) as refused:
        chat(client, **more)
    assert refused.value.status_code == status
    assert said in refused.value.error


def test_fields_that_ask_for_nothing_special_are_accepted(witness: Server) -> None:
    usual = {
        "keep_alive": "5m",
        "think": False,
        "format": "",
        "tools": [],
        "logprobs": False,
        "options": {**GREEDY, "seed": -1, "repeat_last_n": 64, "num_ctx": 512, "mirostat": 0, "num_gpu": 1, "stop": []},
    }
    asked = {"model": "witness", "messages": HI, "stream": False}
    answer = httpx.post(f"{witness.url}/api/chat", json={**asked, **usual}, timeout=60)
    assert (answer.status_code, answer.headers.get("x-tenuto-left-undone")) == (200, None)
    left = httpx.post(
        f"{witness.url}/api/chat", json={**asked, "options": GREEDY, "keep_alive": 0, "think": True}, timeout=60
    )
    assert left.headers["x-tenuto-left-undone"] == "keep_alive, think"


def test_log_probabilities_are_shown(smollm2: Client) -> None:
    answer = chat(smollm2, model="smollm2", logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == answer.eval_count
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in answer.logprobs)
