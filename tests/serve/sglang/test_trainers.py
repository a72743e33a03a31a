"""The calls that verl's and slime's rollout clients make, in their form and order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.eventually import eventually
from tests.serve.server import Server, serving

SLIME_PARAMS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 6,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
VERL_PARAMS: dict[str, Any] = {
    "n": 1,
    "max_new_tokens": 6,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "ignore_eos": True,
    "min_new_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}


@pytest.fixture(scope="module")
def trained() -> Iterator[Server]:
    """A separate server, since its weights are replaced; 200 tokens take a second."""
    with serving("--model", "witness:0.005", "--context-length", "4096") as server:
        yield server
        server.audit()


@pytest.fixture
def http(trained: Server) -> Iterator[httpx.Client]:
    with trained.client() as client:
        yield client


def asked(http: httpx.Client, path: str, body: dict[str, Any] | None = None) -> Any:
    answer = http.post(path, json=body if body is not None else {})
    assert answer.status_code == 200, answer.text
    return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text


@pytest.mark.parametrize("params", [SLIME_PARAMS, VERL_PARAMS], ids=["slime", "verl"])
def test_a_rollout_has_its_tokens_and_their_log_probabilities(http: httpx.Client, params: dict[str, Any]) -> None:
    body = {"input_ids": [1, 2, 3], "sampling_params": params, "return_logprob": True, "stream": False}
    answer = asked(http, "/generate", body)
    meta = answer["meta_info"]
    pairs = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
    assert [token for token, _ in pairs] == answer["output_ids"]
    assert len(pairs) == meta["completion_tokens"] == 6
    assert all(logprob <= 0 for _, logprob in pairs)
    assert meta["finish_reason"]["type"] == "length"
    assert meta["prompt_tokens"] == 3
    assert meta["cached_tokens"] == 0
    assert meta["weight_version"] == http.get("/get_weight_version").json()["weight_version"]


def test_several_prompts_are_a_batch(http: httpx.Client) -> None:
    """As verl's engine sends a batch of prompts at once."""
    body = {
        "input_ids": [[1, 2], [3, 4, 5]],
        "sampling_params": VERL_PARAMS,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
    }
    answers = asked(http, "/generate", body)
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 3]
    assert all(len(answer["meta_info"]["output_token_logprobs"]) == 6 for answer in answers)


def test_a_partial_rollout_is_aborted_and_goes_on_under_new_weights(http: httpx.Client) -> None:
    """slime aborts all requests, replaces the weights, and continues from the tokens that it has."""
    prompt = list(range(1, 40))
    params = {**SLIME_PARAMS, "max_new_tokens": 3000, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(asked, http, "/generate", body)
        eventually(lambda: http.get("/get_server_info").json()["internal_states"][0]["running"] > 0)
        threading.Event().wait(0.2)
        asked(http, "/abort_request", {"rid": "", "abort_all": True})
        partial = rollout.result()
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    said = [token for _, token, *_ in partial["meta_info"]["output_token_logprobs"]]
    assert said == partial["output_ids"]
    before = partial["meta_info"]["weight_version"]
    asked(http, "/pause_generation")
    http.get("/flush_cache").raise_for_status()
    updated = asked(http, "/update_weights_from_disk", {"model_path": "step 2", "weight_version": "2"})
    assert updated["success"] is True
    asked(http, "/continue_generation")
    again = asked(http, "/generate", {**body, "input_ids": [*prompt, *said], "sampling_params": SLIME_PARAMS})
    assert again["meta_info"]["weight_version"] == "2" != before
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["prompt_tokens"] == len(prompt) + len(said)


def test_a_rollout_goes_on_while_the_weights_are_replaced_in_place(http: httpx.Client) -> None:
    """With `keep_state`, a running request continues without computing its prompt again."""
    params = {**SLIME_PARAMS, "max_new_tokens": 120, "ignore_eos": True}
    body = {"input_ids": list(range(1, 400)), "sampling_params": params, "return_logprob": True}
    computed = lambda: http.get("/metrics").text  # noqa: E731 - read twice

    def tokens_computed() -> float:
        lines = [line for line in computed().splitlines() if line.startswith("tenuto_computed_tokens_total")]
        return sum(float(line.split()[-1]) for line in lines)

    before = tokens_computed()
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(asked, http, "/generate", body)
        eventually(lambda: http.get("/get_server_info").json()["internal_states"][0]["running"] > 0)
        threading.Event().wait(0.2)
        asked(http, "/pause_generation", {"mode": "in_place"})
        body = {"model_path": "step 3", "weight_version": "3", "keep_state": True, "flush_cache": False}
        asked(http, "/update_weights_from_disk", body)
        asked(http, "/continue_generation")
        answer = rollout.result()
    assert answer["meta_info"]["completion_tokens"] == 120
    assert answer["meta_info"]["weight_version"] == "3"
    assert tokens_computed() - before < 399 + 120 + 8


def test_memory_is_released_for_training_and_resumed(http: httpx.Client) -> None:
    """verl gives memory back after a rollout, and takes it again before the next, the weights first."""
    asked(http, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    asked(http, "/resume_memory_occupation", {"tags": ["weights"]})
    asked(http, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    http.get("/flush_cache").raise_for_status()
    assert http.get("/health_generate").status_code == 200
    body = {"input_ids": [1, 2, 3], "sampling_params": VERL_PARAMS, "return_logprob": True}
    assert len(asked(http, "/generate", body)["output_ids"]) == 6


def test_the_weights_get_another_version(http: httpx.Client) -> None:
    asked(http, "/update_weight_version", {"new_version": "named", "abort_all_requests": False})
    assert http.get("/get_weight_version").json() == {"weight_version": "named"}
    assert http.get("/model_info").json()["weight_version"] == "named"
    body = {"input_ids": [1], "sampling_params": SLIME_PARAMS}
    assert asked(http, "/generate", body)["meta_info"]["weight_version"] == "named"
    for wrong in ({}, {"new_version": ""}, {"new_version": 7}):
        assert http.post("/update_weight_version", json=wrong).status_code == 400
    assert http.get("/get_weight_version").json() == {"weight_version": "named"}


@pytest.mark.parametrize(
    "wrong",
    [{"keep_state": "yes"}, {"weight_version": ""}, {"weight_version": "v" * 257}, {"flush_cache": False}],
    ids=str,
)
def test_updates_with_wrong_fields_are_refused_and_change_nothing(http: httpx.Client, wrong: dict[str, Any]) -> None:
    before = http.get("/get_weight_version").json()
    refused = http.post("/update_weights_from_disk", json={"model_path": "step 9", **wrong})
    assert refused.status_code == 400
    assert http.get("/get_weight_version").json() == before
