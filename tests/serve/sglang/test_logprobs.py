"""Log-probabilities in answers of the SGLang interface."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.sglang.calls import chunks, generate, request


def test_logprobs_are_tuples_of_logprob_token_and_text(smollm2: httpx.Client) -> None:
    answer = generate(
        smollm2,
        "The capital of France is",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert "".join(entry[2] for entry in meta["output_token_logprobs"]) == answer["text"]
    assert all(
        entry[0] == pytest.approx(top[0][0])
        for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    )
    assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == meta["prompt_tokens"]
    assert (meta["input_token_logprobs"][0][0], meta["input_top_logprobs"][0]) == (None, None)
    assert "".join(entry[2] for entry in meta["input_token_logprobs"]) == "The capital of France is"
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [2] * (meta["prompt_tokens"] - 1)
    assert all(entry[0] <= 0 for entry in meta["input_token_logprobs"][1:])


def test_logprobs_of_named_ids_are_shown_at_every_position(smollm2: httpx.Client) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    meta = generate(smollm2, "The capital of France is", token_ids_logprob=[260, 7], **asked)["meta_info"]
    assert meta["input_token_ids_logprobs"][0] is None
    assert len(meta["input_token_ids_logprobs"]) == meta["prompt_tokens"]
    assert len(meta["output_token_ids_logprobs"]) == meta["completion_tokens"]
    for places in (meta["input_token_ids_logprobs"][1:], meta["output_token_ids_logprobs"]):
        assert [[one[1] for one in named] for named in places] == [[260, 7]] * len(places)
    likeliest = [top[0][1] for top in meta["output_top_logprobs"]]
    again = generate(smollm2, "The capital of France is", token_ids_logprob=likeliest, **asked)["meta_info"]
    for place, named in enumerate(again["output_token_ids_logprobs"]):
        assert named[place][0] == pytest.approx(again["output_top_logprobs"][place][0][0], abs=1e-4)
    batch = {**asked, "text": ["a", "b"], "sampling_params": {"max_new_tokens": 1}}
    first, second = smollm2.post("/generate", json={**batch, "token_ids_logprob": [[5], None]}).json()
    assert [one[1] for one in first["meta_info"]["output_token_ids_logprobs"][0]] == [5]
    assert "output_token_ids_logprobs" not in second["meta_info"]


def test_logprobs_of_the_prompt_start_where_requested_and_by_default_nowhere(smollm2: httpx.Client) -> None:
    whole, late, default = (
        generate(smollm2, "The capital of France is", return_logprob=True, **more)["meta_info"]
        for more in ({"logprob_start_len": 0}, {"logprob_start_len": 2}, {})
    )
    assert default["input_token_logprobs"] == []
    assert "output_top_logprobs" not in default
    assert late["input_token_logprobs"][0] == [None, whole["input_token_logprobs"][2][1], None]
    assert late["input_token_logprobs"][1:] == [
        [pytest.approx(logprob, abs=1e-3), token, None] for logprob, token, _ in whole["input_token_logprobs"][3:]
    ]


def test_logprobs_work_in_streams_batches_and_samples(smollm2: httpx.Client) -> None:
    more: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    whole = generate(smollm2, "Hello there", **more)["meta_info"]
    *_, last = chunks(smollm2.post("/generate", json=request("Hello there", stream=True, **more)))
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [entry[1] for entry in last["meta_info"][name]] == [entry[1] for entry in whole[name]]
    for answer in generate(smollm2, "Hello there", sampling_params={"n": 2}, **more):
        got = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in got] == [entry[1] for entry in whole["input_token_logprobs"]]
    few = {"max_new_tokens": 4}
    body = {"text": ["Hello", "there"], "return_logprob": [True, False], "sampling_params": few}
    first, second = smollm2.post("/generate", json=body).json()
    assert "output_token_logprobs" in first["meta_info"]
    assert "output_token_logprobs" not in second["meta_info"]
