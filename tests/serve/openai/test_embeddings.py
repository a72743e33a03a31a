"""Embeddings as the official client asks for them, and in llama.cpp's older form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from tenuto.exec.witness_hashes import history_hash, vectors_of
from tenuto.runtime.models import WITNESS_VOCABULARY
from tenuto.text.words import witness_tokenizer
from tests.serve.openai.calls import held, is_left
from tests.serve.server import Server, serving

TOKENIZER = witness_tokenizer(WITNESS_VOCABULARY)


def expected(tokens: Sequence[int], pooling: str = "last", dimensions: int = 4, *, unit: bool = True) -> list[float]:
    every = vectors_of(np.array([history_hash(tokens[: i + 1]) for i in range(len(tokens))], np.uint64))
    vector = {"last": every[-1], "mean": every.mean(axis=0), "cls": every[0]}[pooling][:dimensions]
    found: list[float] = (vector / np.linalg.norm(vector) if unit else vector).tolist()
    return found


def test_the_official_client_gets_the_same_vectors_in_both_encodings(client: OpenAI) -> None:
    texts = ["tea", "coffee, black", "ü"]
    tokens = [TOKENIZER.encode(text) for text in texts]
    whole = client.embeddings.create(model="default", input=texts)  # the client asks for base64
    assert [entry.index for entry in whole.data] == [0, 1, 2]
    assert (whole.object, whole.model) == ("list", "witness")
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == sum(map(len, tokens))
    for entry, given in zip(whole.data, tokens, strict=True):
        assert entry.embedding == pytest.approx(expected(given), abs=1e-6)
    floats = client.embeddings.create(model="default", input=texts, encoding_format="float")
    assert [entry.embedding for entry in floats.data] == [entry.embedding for entry in whole.data]
    ids = client.embeddings.create(model="default", input=tokens)
    assert [entry.embedding for entry in ids.data] == [entry.embedding for entry in whole.data]
    for one in (texts[0], tokens[0]):
        assert client.embeddings.create(model="default", input=one).data[0].embedding == whole.data[0].embedding


def test_llama_cpps_forms_of_texts_give_the_same_vectors(client: OpenAI) -> None:
    tokens = TOKENIZER.encode("tea, black")
    content = [{"type": "text", "text": "tea, "}, {"type": "text", "text": "black"}]
    mixed = [*tokens[:-1], TOKENIZER.decode(tokens[-1:])]
    given = ["tea, black", tokens, {"prompt_string": "tea, black"}, {"content": content}, mixed]
    for body in ({"input": given}, {"content": given}):
        path = "/v1/embeddings" if "input" in body else "/embedding"
        answer = (
            httpx.post(f"{str(client.base_url).removesuffix('/v1/')}{path}", json=body, timeout=60)
            .raise_for_status()
            .json()
        )
        vectors = [entry["embedding"] for entry in (answer["data"] if path == "/v1/embeddings" else answer)]
        assert vectors == vectors[:1] * len(given)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_vectors_are_pooled_cut_and_scaled_as_asked(client: OpenAI, pooling: str) -> None:
    text = "the cat sat on the mat " * 9
    asked: dict[str, Any] = {"model": "default", "input": text}
    for dimensions in (1, 3, 4):
        vector = client.embeddings.create(**asked, dimensions=dimensions, extra_body={"pooling": pooling}).data[0]
        assert vector.embedding == pytest.approx(expected(TOKENIZER.encode(text), pooling, dimensions), abs=1e-6)
    raw = client.embeddings.create(**asked, extra_body={"pooling": pooling, "normalize": False}).data[0]
    assert raw.embedding == pytest.approx(expected(TOKENIZER.encode(text), pooling, unit=False), abs=1e-4)


def test_hundreds_of_inputs_run_side_by_side_and_come_back_in_order(client: OpenAI) -> None:
    tokens = [[i % 900, (7 * i) % 900][: 1 + i % 2] for i in range(300)]
    found = client.embeddings.create(model="default", input=tokens, encoding_format="float").data
    for entry, given in zip(found, tokens, strict=True):
        assert entry.embedding == pytest.approx(expected(given), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": []}, "invalid_request", "input"),
        ({"input": ""}, "invalid_request", "input"),
        ({"input": ["a", ""]}, "invalid_request", "input"),
        ({"input": [[1], []]}, "invalid_request", "input"),
        ({"input": ["a"] * 2049}, "invalid_request", "input"),
        ({"input": [[1] * 4000] * 76}, "invalid_request", "input"),
        ({"input": [1, None]}, "invalid_request", "input"),
        ({"input": {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}}, "unsupported", "input.content"),
        ({"input": [10**6]}, "invalid_request", "input"),
        ({"input": [1] * 5000}, "context_length_exceeded", "input"),
        ({"input": "a", "dimensions": 5}, "invalid_request", "dimensions"),
        ({"input": "a", "dimensions": 0}, "invalid_request", "dimensions"),
        ({"input": "a", "pooling": "max"}, "invalid_request", "pooling"),
        ({"input": "a", "prompt_name": "query"}, "invalid_request", "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "unsupported", "truncate_prompt_tokens"),
        ({"input": "a", "add_special_tokens": False}, "unsupported", "add_special_tokens"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
    ],
)
def test_what_cannot_be_embedded_is_refused(witness: Server, fields: dict[str, Any], code: str, param: str) -> None:
    answer = httpx.post(f"{witness.url}/v1/embeddings", json=fields, timeout=60)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"].partition("[")[0]) == (code, param), error


def test_texts_with_too_many_tokens_in_all_are_refused(witness: Server) -> None:
    answer = httpx.post(f"{witness.url}/v1/embeddings", json={"input": ["a" * 4000] * 80}, timeout=60)
    assert answer.status_code == 400
    assert "allowed: 300000 in all" in answer.json()["error"]["message"]


def test_a_request_has_no_more_turns_open_than_its_tenant_may(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[[keys]]\ntenant = 'ann'\nkey = 'secret'\nlimits = { turns = 2 }\n")
    with serving("--model", "witness", "--keys", str(keys)) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            assert len(client.embeddings.create(model="default", input=["a", "b", "c", "d", "e"]).data) == 5
        with (
            OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.embeddings.create(model="default", input="a")


def test_a_client_that_leaves_takes_its_turns_with_it(slow: Server) -> None:
    before = held(slow)
    body = {"input": ["a" * 4000] * 70}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow.url}/v1/embeddings", json=body, timeout=httpx.Timeout(60, read=0.3))
    is_left(slow, before)


def test_llama_cpps_older_form_has_lists_of_one_vector(witness: Server) -> None:
    with witness.client() as http:
        for path, field in (("/embedding", "content"), ("/embeddings", "input"), ("/embedding", "input")):
            found = http.post(path, json={field: ["tea", "cake"]}).raise_for_status().json()
            assert [entry["index"] for entry in found] == [0, 1]
            assert found[1]["embedding"] == [pytest.approx(expected(TOKENIZER.encode("cake")), abs=1e-6)]
        raw = http.post("/embedding", json={"content": "tea", "embd_normalize": -1}).json()
        assert raw[0]["embedding"] == [expected(TOKENIZER.encode("tea"), unit=False)]
        assert http.post("/embedding", json={}).json()["error"]["param"] == "content"
