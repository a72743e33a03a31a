"""Generation by the SGLang interface, over HTTP, on real servers of the witness and of the default model."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.eventually import eventually
from tests.serve.server import serving
from tests.serve.sglang.calls import LONG, chunks, generate, opened, refusal, request, tail

# -- one request


def test_an_answer_has_text_tokens_and_sglangs_meta_info(http: httpx.Client) -> None:
    answer = generate(http, "hello", rid="mine")
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 4
    assert answer["text"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "weight_version": "default",
    }


def test_put_is_accepted_and_ids_are_generated(http: httpx.Client) -> None:
    answer = http.put("/generate", json=request([1, 2])).json()
    assert len(answer["meta_info"]["id"]) == 32


def test_without_sampling_params_128_tokens_are_sampled_at_temperature_1(http: httpx.Client) -> None:
    first, second = (http.post("/generate", json={"input_ids": [1, 2]}).json()["output_ids"] for _ in range(2))
    assert len(first) == len(second) == 128
    greedy = generate(http, [1, 2], sampling_params={"max_new_tokens": 128})["output_ids"]
    assert greedy == generate(http, [1, 2], sampling_params={"max_new_tokens": 128})["output_ids"]


def test_null_is_the_default_and_a_null_max_new_tokens_is_as_many_as_fit(http: httpx.Client) -> None:
    params = dict.fromkeys(
        ("top_p", "top_k", "min_p", "stop", "stop_regex", "stop_token_ids", "ignore_eos", "n", "regex")
    )
    assert len(generate(http, [1], sampling_params=params)["output_ids"]) == 4
    full = generate(http, [1] * 4000, sampling_params={"max_new_tokens": None, "ignore_eos": True})
    assert full["meta_info"]["finish_reason"] == {"type": "length", "length": 96}


def test_a_stop_token_ends_the_text_but_remains_among_the_tokens(http: httpx.Client) -> None:
    plain = generate(http, [5, 6, 7])
    third = plain["output_ids"][2]
    stopped = generate(http, [5, 6, 7], sampling_params={"stop_token_ids": [third]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}
    assert stopped["output_ids"] == plain["output_ids"][:3]
    assert plain["text"].startswith(stopped["text"])
    untrimmed = generate(http, [5, 6, 7], sampling_params={"stop_token_ids": [third], "no_stop_trim": True})
    assert len(untrimmed["text"]) > len(stopped["text"])


def test_a_stop_string_ends_the_text_before_or_after_it(smollm2: httpx.Client) -> None:
    plain = generate(smollm2, "One, two, three, four,", sampling_params={"max_new_tokens": 12})["text"]
    assert " six" in plain
    params = {"max_new_tokens": 12, "stop": [" six"]}
    answer = generate(smollm2, "One, two, three, four,", sampling_params=params)
    assert answer["text"] == plain.split(" six")[0]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": " six"}
    behind = generate(smollm2, "One, two, three, four,", sampling_params={**params, "no_stop_trim": True})
    assert behind["text"].startswith(answer["text"] + " six")


def test_a_stop_regex_ends_the_text_before_its_match_and_no_stream_shows_more(http: httpx.Client) -> None:
    plain = generate(http, [5, 6, 7], sampling_params={"max_new_tokens": 12})["text"]
    numbers = plain.split(" w")
    kept, cut = " w".join(numbers[:3]), " w" + numbers[3]
    params: dict[str, Any] = {"max_new_tokens": 12, "stop_regex": [rf"\sw{numbers[3][:-1]}\d\b", "never"]}
    answer = generate(http, [5, 6, 7], sampling_params=params)
    assert answer["text"] == kept
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": params["stop_regex"][0]}
    special = generate(http, [5, 6, 7], sampling_params={**params, "skip_special_tokens": False})
    assert special["text"] == kept
    behind = generate(http, [5, 6, 7], sampling_params={**params, "no_stop_trim": True})
    assert behind["text"] == kept + cut
    with http.stream("POST", "/generate", json=request([5, 6, 7], sampling_params=params, stream=True)) as stream:
        assert all(kept.startswith(chunk["text"]) for chunk in chunks(stream))
    session = http.post("/v1/sessions", json={}).json()["id"]
    others: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"model": "default", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 12}),
        (f"/v1/sessions/{session}/turns", {"input": [5, 6, 7], "max_new_tokens": 12, "stream": False}),
    ]
    for path, body in others:
        ended = http.post(path, json={**body, "stop_regex": params["stop_regex"]}).json()
        assert (ended["choices"][0] if "choices" in ended else ended)["text"] == kept
        refused = http.post(path, json={**body, "stop_regex": "("})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex")
    assert http.delete(f"/v1/sessions/{session}").is_success
    refused = http.post("/generate", json=request([1], sampling_params={"stop_regex": "("}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling_params.stop_regex")


def test_seeds_are_reproducible_and_differ(smollm2: httpx.Client) -> None:
    def drawn(**more: Any) -> tuple[int, ...]:
        params = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True, **more}
        return tuple(generate(smollm2, "Once upon a time", sampling_params=params)["output_ids"])

    assert drawn(sampling_seed=1) == drawn(sampling_seed=1)
    assert len({drawn(sampling_seed=seed) for seed in (0, 1, -3, 2**70)}) > 1
    assert drawn(sampling_seed=-3) == drawn(sampling_seed=-3)
    assert len({drawn() for _ in range(4)}) > 1
    greedy = {"temperature": 1e-7, "sampling_seed": 1}
    assert drawn(**greedy) == drawn(temperature=0) == drawn(temperature=1.0, top_k=1)


def test_biases_and_penalties_change_the_output(smollm2: httpx.Client) -> None:
    def said(**params: Any) -> list[int]:
        drawn = {"max_new_tokens": 48, "temperature": 1.0, "sampling_seed": 1}
        return generate(smollm2, "One, two, three,", sampling_params={**drawn, **params})["output_ids"]

    plain = said()
    assert said(logit_bias={str(plain[0]): -100})[0] != plain[0]
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2}):
        assert said(**penalty) != plain


def test_text_is_raw_with_control_tokens_as_markup(smollm2: httpx.Client) -> None:
    words = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    answer = generate(smollm2, words, sampling_params={"max_new_tokens": 40})
    assert answer["meta_info"]["prompt_tokens"] < 16
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert "<|im_end|>" not in answer["text"]
    params = {"max_new_tokens": 40, "skip_special_tokens": False, "no_stop_trim": True}
    shown = generate(smollm2, words, sampling_params=params)
    assert shown["text"] == answer["text"] + "<|im_end|>"
    trimmed = generate(smollm2, words, sampling_params={**params, "no_stop_trim": False})
    assert trimmed["text"] == answer["text"]


def test_several_samples_of_a_prompt_are_a_list(http: httpx.Client) -> None:
    params = {"n": 3, "temperature": 1.0, "sampling_seed": 5}
    answers = generate(http, [1] * 40, sampling_params=params, rid="three")
    assert [answer["meta_info"]["id"] for answer in answers] == ["three_0", "three_1", "three_2"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [40] * 3
    assert answers[1]["meta_info"]["cached_tokens"] == 39
    streamed = http.post("/generate", json=request([1] * 40, sampling_params=params, stream=True))
    last = {chunk["index"]: chunk for chunk in chunks(streamed)}
    assert [last[i]["output_ids"] for i in range(3)] == [answer["output_ids"] for answer in answers]


# -- batches


def test_a_batch_is_answered_in_order(http: httpx.Client) -> None:
    prompts = [[1, 2], [3], [4, 5, 6]]
    params = [{"temperature": 0, "max_new_tokens": n} for n in (2, 3, 4)]
    answers = http.post("/generate", json={"input_ids": prompts, "sampling_params": params, "rid": "b"}).json()
    assert [len(answer["output_ids"]) for answer in answers] == [2, 3, 4]
    assert [answer["meta_info"]["id"] for answer in answers] == ["b_0", "b_1", "b_2"]
    single = generate(http, [4, 5, 6])
    assert answers[2]["output_ids"] == single["output_ids"]


def test_a_batch_of_one_is_a_list_and_a_single_text_is_not(http: httpx.Client) -> None:
    body = {"text": ["hello"], "sampling_params": {"max_new_tokens": 2}, "rid": ["x"]}
    [answer] = http.post("/generate", json=body).json()
    assert answer["meta_info"]["id"] == "x"


def test_a_streamed_batch_names_the_prompt_of_each_chunk(http: httpx.Client) -> None:
    body = {"input_ids": [[1], [2, 2]], "sampling_params": {"temperature": 0, "max_new_tokens": 6}, "stream": True}
    last = {chunk["index"]: chunk for chunk in chunks(http.post("/generate", json=body))}
    for index, ids in enumerate([[1], [2, 2]]):
        whole = generate(http, ids, sampling_params={"max_new_tokens": 6})
        assert (last[index]["text"], last[index]["output_ids"]) == (whole["text"], whole["output_ids"])


def test_if_one_of_a_batch_cannot_start_none_remains(http: httpx.Client) -> None:
    body = {"input_ids": [[1], [2] * 5000], "sampling_params": LONG, "rid": ["left", "right"]}
    assert http.post("/generate", json=body).status_code == 400
    eventually(lambda: http.post("/generate", json=request([1], rid="left")).status_code == 200)


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [], "text": "a"},
        {},
        {"text": []},
        {"input_ids": []},
        {"text": ["a", "b"], "rid": ["x"]},
        {"text": ["a", "b"], "rid": ["x", "x"]},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"input_ids": [[1], 2]},
        {"input_ids": ["a"]},
        {"input_ids": [1.5]},
        {"input_ids": [-1]},
        {"input_ids": [10**6]},
        {"input_ids": [2**40]},
        {"input_ids": [True]},
        {"text": 7},
        {"text": "a", "rid": 7},
        {"text": "a", "rid": ""},
        {"text": "a", "stream": "yes"},
        {"text": "a", "sampling_params": 5},
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        {"text": "a", "sampling_params": {"max_new_tokens": "4"}},
        {"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 4}},
        {"text": "a", "sampling_params": {"temperature": -1}},
        {"text": "a", "sampling_params": {"top_k": 0}},
        {"text": "a", "sampling_params": {"top_p": 0}},
        {"text": "a", "sampling_params": {"min_p": 2}},
        {"text": "a", "sampling_params": {"frequency_penalty": 3}},
        {"text": "a", "sampling_params": {"repetition_penalty": 0}},
        {"text": "a", "sampling_params": {"stop": 5}},
        {"text": "a", "sampling_params": {"stop_token_ids": ["x"]}},
        {"text": "a", "sampling_params": {"n": 0}},
        {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}},
        {"text": "a", "return_logprob": "all"},
        {"text": "a", "return_logprob": True, "top_logprobs_num": 1000},
        {"text": "a", "return_logprob": True, "logprob_start_len": -2},
        {"text": "a", "session_params": "s"},
        {"text": "a", "session_params": {"id": 5}},
        {"text": "a", "session_params": {"id": "s", "offset": "x"}},
        {"text": "a", "session_params": {"id": "no/such session"}},
        {"text": "a", "session_params": {"id": "s" * 65}},
        {"text": "a", "priority": "high"},
        {"text": "\ud800"},
        [],
        None,
    ],
)
def test_malformed_requests_are_refused(http: httpx.Client, body: Any) -> None:
    status, _ = refusal(http.post("/generate", content=json.dumps(body), headers={"content-type": "application/json"}))
    assert status == 400


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("structural_tag", {"sampling_params": {"structural_tag": "{}"}}),
        ("stop_regex", {"sampling_params": {"stop_regex": "a(?=b)"}}),
        ("custom_params", {"sampling_params": {"custom_params": {"a": 1}}}),
        ("temprature", {"sampling_params": {"temprature": 1}}),
        ("image_data", {"image_data": ["x"]}),
        ("return_hidden_states", {"return_hidden_states": True}),
        ("n is 2", {"sampling_params": {"n": 2}, "session_params": {"id": "any"}}),
    ],
)
def test_unsupported_fields_are_refused_by_name(http: httpx.Client, name: str, body: dict[str, Any]) -> None:
    status, message = refusal(http.post("/generate", json={"input_ids": [1], **body}))
    assert status == 400
    assert name in message


def test_fields_without_effect_are_accepted(http: httpx.Client) -> None:
    assert generate(http, [1], image_data=None, return_hidden_states=False, log_metrics=False, lora_path=None)


def test_a_prompt_longer_than_the_context_is_refused_with_the_length_allowed(http: httpx.Client) -> None:
    status, message = refusal(http.post("/generate", json=request([1] * 4096)))
    assert status == 400
    assert "longer than the model's context length (4096 tokens)" in message
    assert "allowed: 4095" in message
    assert refusal(http.post("/generate", json=request([1] * 4096, stream=True)))[0] == 400


# -- streams


def test_each_chunk_has_all_the_text_so_far(http: httpx.Client) -> None:
    with http.stream(
        "POST", "/generate", json=request([1, 2, 3], stream=True, sampling_params=LONG | {"max_new_tokens": 40})
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        told = list(chunks(response))
    for earlier, later in itertools.pairwise(told):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
        assert "index" not in earlier
    whole = generate(http, [1, 2, 3], sampling_params={"max_new_tokens": 40, "ignore_eos": True})
    assert (told[-1]["text"], told[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert told[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert told[-1]["meta_info"]["completion_tokens"] == 40


def test_a_disconnect_ends_the_request_and_frees_its_id(slow_http: httpx.Client, slow_streaming: str) -> None:
    first = generate(slow_http, [1, 2, 3], session=slow_streaming)
    body = request([4], session=slow_streaming, sampling_params=LONG, stream=True, rid="gone")
    with slow_http.stream("POST", "/generate", json=body) as response:
        next(chunks(response))
    eventually(lambda: slow_http.get(f"/v1/sessions/{slow_streaming}").json()["turn"] is None)
    second = generate(slow_http, [5], session=slow_streaming, rid="gone")
    assert second["meta_info"]["prompt_tokens"] == 3 + len(first["output_ids"]) + 1


def test_a_client_that_disconnects_before_the_whole_answer_ends_the_request(
    slow_http: httpx.Client, slow_streaming: str
) -> None:
    body = request([4], session=slow_streaming, sampling_params=LONG)
    with pytest.raises(httpx.ReadTimeout):
        slow_http.post("/generate", json=body, timeout=httpx.Timeout(60, read=0.1))
    eventually(lambda: slow_http.get(f"/v1/sessions/{slow_streaming}").json()["turn"] is None)
    assert slow_http.get(f"/v1/sessions/{slow_streaming}").json()["tokens"] == 0


# -- abort


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_request_answers_with_its_output_so_far(
    slow_http: httpx.Client, slow_streaming: str, stream: bool
) -> None:
    generate(slow_http, [1] * 10, session=slow_streaming)
    rid = uuid4().hex
    body = request([2], session=slow_streaming, sampling_params=LONG, rid=rid, stream=stream)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(slow_http.post, "/generate", json=body)
        eventually(lambda: slow_http.get(f"/v1/sessions/{slow_streaming}").json()["turn"] == "running")
        assert slow_http.post("/abort_request", json={"rid": rid}).status_code == 200
        answer = pending.result()
    assert answer.status_code == 200
    whole = list(chunks(answer))[-1] if stream else answer.json()
    assert whole["meta_info"]["finish_reason"]["type"] == "abort"
    assert whole["meta_info"]["finish_reason"]["message"]
    assert len(whole["output_ids"]) == whole["meta_info"]["completion_tokens"] < 3000
    assert tail(generate(slow_http, [3], session=slow_streaming)) == (15, 2)


def test_a_batch_is_aborted_by_its_one_id_and_everything_by_abort_all(slow_http: httpx.Client) -> None:
    def aborted(*, rid: str, abort: dict[str, Any]) -> None:
        body = {"input_ids": [[1], [2]], "sampling_params": LONG, "rid": rid, "stream": True}
        with slow_http.stream("POST", "/generate", json=body) as response:
            told = chunks(response)
            next(told)
            assert slow_http.post("/abort_request", json=abort).status_code == 200
            last = {chunk["index"]: chunk for chunk in told}
        assert [last[i]["meta_info"]["finish_reason"]["type"] for i in range(2)] == ["abort"] * 2

    aborted(rid="one", abort={"rid": "one"})
    aborted(rid="two", abort={"abort_all": True})


def test_aborting_an_unknown_id_changes_nothing(http: httpx.Client) -> None:
    assert http.post("/abort_request", json={"rid": "nobody"}).status_code == 200
    assert http.post("/abort_request", json={"abort_all": True}).status_code == 200
    for body in ({}, {"rid": 5}, {"abort_all": "yes"}):
        assert refusal(http.post("/abort_request", json=body))[0] == 400


def test_an_id_in_use_is_refused_and_its_request_continues(slow_http: httpx.Client) -> None:
    body = request([1], rid="same", sampling_params=LONG | {"max_new_tokens": 400}, stream=True)
    with slow_http.stream("POST", "/generate", json=body) as response:
        told = chunks(response)
        next(told)
        status, message = refusal(slow_http.post("/generate", json=request([2], rid="same")))
        assert (status, "same" in message) == (400, True)
        *_, last = told
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    generate(slow_http, [2], rid="same")


# -- the server


def test_health_needs_an_engine_that_generates(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/health_generate").status_code == 200


def test_model_and_server_are_described(smollm2: httpx.Client) -> None:
    for path in ("/get_model_info", "/model_info"):
        model = smollm2.get(path).json()
        assert model["is_generation"] is True
        assert model["model_path"] == model["tokenizer_path"] != ""
    for path in ("/get_server_info", "/server_info"):
        server = smollm2.get(path).json()
        assert (server["context_length"], server["max_req_input_len"]) == (2048, 2047)
        assert server["served_model_name"] == "smollm2"
        assert server["internal_states"][0]["steps"] >= 0


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flushed_state_is_computed_again(http: httpx.Client, streaming: str, method: str) -> None:
    first = generate(http, [1] * 50, session=streaming)
    assert http.request(method, "/flush_cache").status_code == 200
    again = generate(http, [2], session=streaming)
    assert tail(again) == (55, 55)
    assert again["output_ids"] == generate(http, [1] * 50 + first["output_ids"] + [2])["output_ids"]


def test_tenants_do_not_see_each_others_sessions_and_requests(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\ntenant = "a"\nkey = "ka"\n[[keys]]\ntenant = "b"\nkey = "kb"\n'
        '[[keys]]\ntenant = "root"\nkey = "kr"\nadmin = true\n'
    )
    with serving("--model", "witness", "--keys", str(keys)) as server:
        a, b, root = (server.client(headers={"authorization": f"Bearer k{name}"}) for name in "abr")
        for http in (a, b):
            opened(http, session_id="same")
        generate(a, [1], session="same", rid="r")
        assert refusal(b.post("/generate", json=request([1], session="same", after="r")))[0] == 400
        done = threading.Event()
        with a.stream("POST", "/generate", json=request([1], rid="r", sampling_params=LONG, stream=True)) as response:
            told = chunks(response)
            next(told)
            generate(b, [1], rid="r")
            b.post("/abort_request", json={"rid": "r"})
            b.post("/abort_request", json={"abort_all": True})
            *_, last = told
            done.set()
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        assert b.get("/flush_cache").status_code == 403
        assert root.get("/flush_cache").status_code == 200
        with server.client() as nobody:
            assert nobody.get("/health").status_code == 200
            assert nobody.get("/health_generate").status_code == 200
            for path in ("/generate", "/open_session", "/close_session", "/abort_request"):
                assert nobody.post(path, json={}).status_code in (400, 401)
            assert nobody.get("/get_server_info").status_code == 401
        assert root.get("/audit").json()["clean"] is True
        for http in (a, b, root):
            http.close()
