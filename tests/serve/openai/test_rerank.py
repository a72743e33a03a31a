"""Documents in the order of their relevance, in the forms of vLLM and llama.cpp, by models that are asked."""

from __future__ import annotations

from math import exp
from typing import Any

import httpx
import pytest

from tenuto.serve.shared.relevance import _ASKED, _JUDGE, TASK
from tests.serve.server import Server

QUERY = "Which animal purrs?"
ROUNDING = 5e-3
"""How much a score may change with the number of tokens in a step, with kernels for AMX."""
DOCUMENTS = ["Cats purr when they are content.", "The Rhine flows north.", "Bread is made of flour."]


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120).raise_for_status().json()


def logprob(server: Server, document: str, word: str) -> float:
    """Returns the log-probability of an answer, as a scored token of the input."""
    messages = [
        {"role": "system", "content": _JUDGE},
        {"role": "user", "content": _ASKED.format(TASK, QUERY, document)},
    ]
    tokens = post(server, "/tokenize", {"messages": messages})["tokens"]
    (token,) = post(server, "/tokenize", {"prompt": word})["tokens"]
    asked = {"prompt": [*tokens, token], "max_tokens": 1, "echo": True, "logprobs": 0, "model": "default"}
    scored: float = post(server, "/v1/completions", asked)["choices"][0]["logprobs"]["token_logprobs"][len(tokens)]
    return scored


def test_a_model_is_asked_and_its_yes_weighed_against_its_no(smollm2_server: Server) -> None:
    server = smollm2_server
    wanted = [1 / (1 + exp(logprob(server, text, "no") - logprob(server, text, "yes"))) for text in DOCUMENTS]
    answer = post(server, "/v1/rerank", {"model": "default", "query": QUERY, "documents": DOCUMENTS})
    assert [entry["relevance_score"] for entry in answer["results"]] == pytest.approx(
        sorted(wanted, reverse=True), abs=ROUNDING
    )
    for entry in answer["results"]:
        assert entry["relevance_score"] == pytest.approx(wanted[entry["index"]], abs=ROUNDING)
        assert entry["document"] == {"text": DOCUMENTS[entry["index"]]}
    assert answer["usage"]["total_tokens"] > 100
    scores = post(server, "/score", {"text_1": QUERY, "text_2": DOCUMENTS})["data"]
    assert [entry["score"] for entry in scores] == pytest.approx(wanted, abs=ROUNDING)
    best = post(server, "/rerank", {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 1})
    assert [entry["index"] for entry in best["results"]] == [answer["results"][0]["index"]]
    bare = post(server, "/reranking", {"query": QUERY, "documents": DOCUMENTS, "return_documents": False})
    assert all(entry.keys() == {"index", "relevance_score"} for entry in bare["results"])


def test_texts_give_a_list_as_in_text_embeddings_inference(smollm2_server: Server) -> None:
    usual = post(smollm2_server, "/rerank", {"query": QUERY, "documents": DOCUMENTS})["results"]
    given = {"query": QUERY, "texts": DOCUMENTS}
    answer = post(smollm2_server, "/rerank", {**given, "return_text": True})
    assert answer == [
        {"index": each["index"], "score": pytest.approx(each["relevance_score"]), "text": DOCUMENTS[each["index"]]}
        for each in usual
    ]
    assert [entry.keys() for entry in post(smollm2_server, "/rerank", {**given, "top_n": 1})] == [{"index", "score"}]
    for body, name in (({"query": QUERY}, "documents"), ({**given, "documents": DOCUMENTS}, "texts")):
        refused = httpx.post(f"{smollm2_server.url}/rerank", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_texts_are_scored_one_against_many_or_pair_by_pair(witness: Server) -> None:
    for first, second in (("a", "b"), ("a", ["b", "c"]), (["a", "b"], ["c", "d"])):
        data = post(witness, "/v1/score", {"text_1": first, "text_2": second})["data"]
        assert [entry["index"] for entry in data] == list(range(2 if isinstance(second, list) else 1))
        assert all(0 <= entry["score"] <= 1 for entry in data)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 5000]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_2"),
        ("/score", {"text_1": [], "text_2": []}, "text_2"),
    ],
)
def test_what_cannot_be_scored_is_refused(witness: Server, path: str, body: dict[str, Any], param: str) -> None:
    refused = httpx.post(f"{witness.url}{path}", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
