"""An embedding model's vectors are those of transformers: the end token appended, the last vector, of length 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import AutoTokenizer, PreTrainedModel

from tests.exec.kernels import KERNELS
from tests.models.tiny_embedding import PROMPTS, save_embedding_model
from tests.serve.openai.calls import client_of
from tests.serve.server import Server, serving

TEXTS = ["a plum is a fruit", "Iron is a metal. " * 12, "ü", "a plum is a fruit, and so is a cherry"]


@pytest.fixture(scope="module", params=KERNELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    decoder = save_embedding_model(directory, matryoshka_dimensions=[16, 32])
    options = ("--kernels", request.param) if request.param != "torch" else ("--kernels", "torch", "--dtype", "float32")
    with serving("--model", str(directory), "--context-length", "256", *options) as server:
        yield server, decoder, directory
        server.audit()


def expected(decoder: PreTrainedModel, directory: Path, text: str) -> np.ndarray:
    """Returns the vector as the model's own description makes it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        assert tokenizer.decode(tokens[0, -1]) == "<|endoftext|>"
        vector = decoder(tokens).last_hidden_state[0, -1].numpy()
    return np.asarray(vector / np.linalg.norm(vector))


def near(ours: list[float], theirs: np.ndarray) -> None:
    assert np.linalg.norm(ours) == pytest.approx(1, abs=1e-5)
    assert float(np.dot(ours, theirs)) > 0.999


def test_vectors_are_those_of_transformers(served: tuple[Server, PreTrainedModel, Path]) -> None:
    server, decoder, directory = served
    with client_of(server) as client:
        found = client.embeddings.create(model="default", input=TEXTS)  # the client asks for base64
        for text, entry in zip(TEXTS, found.data, strict=True):
            near(entry.embedding, expected(decoder, directory, text))
        floats = client.embeddings.create(model="default", input=TEXTS, encoding_format="float")
        for one, other in zip(floats.data, found.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        prompted = client.embeddings.create(model="default", input=TEXTS, extra_body={"prompt_name": "query"})
        for text, entry in zip(TEXTS, prompted.data, strict=True):
            near(entry.embedding, expected(decoder, directory, PROMPTS["query"] + text))
        short = client.embeddings.create(model="default", input=TEXTS[0], dimensions=16).data[0].embedding
        cut = expected(decoder, directory, TEXTS[0])[:16]
        near(short, cut / np.linalg.norm(cut))


def test_its_relevance_is_the_cosine_of_prompted_queries_and_documents(served: Any) -> None:
    server, decoder, directory = served
    query = expected(decoder, directory, PROMPTS["query"] + "what is a plum?")
    wanted = [float(query @ expected(decoder, directory, text)) for text in TEXTS]
    with server.client() as http:
        answer = (
            http.post("/v1/rerank", json={"query": "what is a plum?", "documents": TEXTS}).raise_for_status().json()
        )
        found = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
        assert [found[index] for index in range(len(TEXTS))] == pytest.approx(wanted, abs=0.02)
        scores = http.post("/score", json={"text_1": "what is a plum?", "text_2": TEXTS}).raise_for_status().json()
        assert [entry["score"] for entry in scores["data"]] == pytest.approx([found[i] for i in range(4)], abs=1e-5)


def test_what_the_model_does_not_allow_is_refused(served: tuple[Server, PreTrainedModel, Path]) -> None:
    server, _, _ = served
    with server.client() as http:
        refused = http.post("/v1/embeddings", json={"input": "a", "dimensions": 17})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
        assert "[16, 32, 48]" in refused.json()["error"]["message"]
        refused = http.post("/v1/embeddings", json={"input": "a", "prompt_name": "passage"})
        assert "'query', 'document'" in refused.json()["error"]["message"]
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
            refused = http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported"), refused.text


def test_a_model_whose_files_do_not_allow_it_is_not_cut(smollm2_server: Server) -> None:
    asked = {"input": "a", "dimensions": 64}
    refused = httpx.post(f"{smollm2_server.url}/v1/embeddings", json=asked, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")


def test_related_texts_are_nearer_than_unrelated_ones(smollm2_server: Server) -> None:
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Quarterly revenue grew by eight percent."]
    with OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": "mean"}).data
    first, second, third = (np.array(entry.embedding) for entry in found)
    assert first @ second > first @ third
