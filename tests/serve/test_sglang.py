"""The SGLang interface, over HTTP, on real servers of the witness and of the default model."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.serve.server import Server, serving

LONG = {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def smollm2(smollm2_server: Server) -> Iterator[httpx.Client]:
    with smollm2_server.client() as client:
        yield client


@pytest.fixture
def streaming(http: httpx.Client) -> Iterator[str]:
    """A session that is only appended to."""
    name = opened(http, streaming=True)
    yield name
    closed(http, name)


@pytest.fixture
def slow_streaming(slow_http: httpx.Client) -> Iterator[str]:
    name = opened(slow_http, streaming=True)
    yield name
    closed(slow_http, name)


@pytest.fixture
def slow_regular(slow_http: httpx.Client) -> Iterator[str]:
    name = opened(slow_http)
    yield name
    closed(slow_http, name)


@pytest.fixture
def regular(http: httpx.Client) -> Iterator[str]:
    """A session whose requests can all be continued."""
    name = opened(http)
    yield name
    closed(http, name)


def opened(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/open_session", json={"capacity_of_str_len": 1000, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def closed(http: httpx.Client, name: str) -> None:
    assert http.post("/close_session", json={"session_id": name}).status_code == 200


def generate(http: httpx.Client, ids: list[int] | str, **body: Any) -> Any:
    """Generates for one prompt, greedily, 4 tokens unless the body says otherwise; returns the answer, or a list of
    `n`."""
    answer = http.post("/generate", json=request(ids, **body))
    assert answer.status_code == 200, answer.text
    return answer.json()


def request(ids: list[int] | str, *, session: str | None = None, **body: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 4, **body.pop("sampling_params", {})}
    names = ("offset", "replace", "drop_previous_output", "after")
    place: dict[str, Any] = {name: body.pop(name) for name in names if name in body}
    if "after" in place:
        place["rid"] = place.pop("after")
    where = {"session_params": {"id": session, **place}} if session is not None else {}
    return {"text" if isinstance(ids, str) else "input_ids": ids, "sampling_params": params, **where, **body}


def chunks(response: httpx.Response) -> Iterator[Any]:
    """Yields the chunks of a stream, and checks that it ends properly."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    pytest.fail("the stream has no end")


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def eventually(holds: Any) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.02)
    pytest.fail("the condition never held")


def tail(answer: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of tokens in the prompt, and how many of them were computed."""
    meta = answer["meta_info"]
    return meta["prompt_tokens"], meta["prompt_tokens"] - meta["cached_tokens"]


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
    assert len({drawn(sampling_seed=seed) for seed in range(4)}) > 1
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
        {"text": "a", "sampling_params": {"sampling_seed": -1}},
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
        ("lora_path", {"lora_path": "x"}),
        ("token_ids_logprob", {"token_ids_logprob": [1]}),
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
    with pytest.raises(httpx.ReadTimeout):
        slow_http.post("/generate", json=request([4], session=slow_streaming, sampling_params=LONG), timeout=0.1)
    eventually(lambda: slow_http.get(f"/v1/sessions/{slow_streaming}").json()["turn"] is None)
    assert slow_http.get(f"/v1/sessions/{slow_streaming}").json()["tokens"] == 0


# -- log-probabilities


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
    body = {"text": ["Hello", "there"], "return_logprob": [True, False]}
    first, second = smollm2.post("/generate", json=body).json()
    assert "output_token_logprobs" in first["meta_info"]
    assert "output_token_logprobs" not in second["meta_info"]


# -- sessions that are only appended to


def test_a_streaming_session_computes_only_new_tokens(http: httpx.Client, streaming: str) -> None:
    length = 0
    for turn in range(5):
        answer = generate(http, [turn + 701] * 20, session=streaming)
        length += 20
        assert tail(answer) == (length, 20 + (turn > 0))
        length += len(answer["output_ids"])
    shown = http.get(f"/v1/sessions/{streaming}").json()
    assert (shown["tokens"], shown["turns"]) == (length, 5)
    assert shown["metadata"] == {"capacity_of_str_len": "1000"}


def test_a_streaming_session_generates_the_output_of_all_its_tokens(http: httpx.Client, streaming: str) -> None:
    history: list[int] = []
    for ids in ([1, 2, 3], [4], [], [5, 6]):
        answer = generate(http, ids, session=streaming)
        history += ids
        assert answer["output_ids"] == generate(http, history)["output_ids"]
        history += answer["output_ids"]


def test_a_streaming_session_continues_whatever_rid_is_given(http: httpx.Client, streaming: str) -> None:
    generate(http, [1] * 10, session=streaming, rid="first")
    assert generate(http, [2], session=streaming, after="nobody")["meta_info"]["prompt_tokens"] == 15


@pytest.mark.parametrize("asked", [{"replace": True}, {"offset": 3}, {"drop_previous_output": True}])
def test_a_streaming_session_is_never_cut(http: httpx.Client, streaming: str, asked: dict[str, Any]) -> None:
    generate(http, [1, 2, 3], session=streaming)
    status, message = refusal(http.post("/generate", json=request([4], session=streaming, **asked)))
    assert status == 400
    assert next(iter(asked)) in message
    nothing = {"replace": False, "offset": None, "drop_previous_output": False}
    assert generate(http, [4], session=streaming, **nothing)["meta_info"]["prompt_tokens"] == 8


def test_a_streaming_session_ignores_where_prompt_logprobs_should_start(http: httpx.Client, streaming: str) -> None:
    for _ in range(2):
        meta = generate(http, [1, 2], session=streaming, return_logprob=True, logprob_start_len=0)["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert len(meta["output_token_logprobs"]) == 4


def test_a_busy_streaming_session_refuses_a_request_and_continues_its_own(
    slow_http: httpx.Client, slow_streaming: str
) -> None:
    body = request([1], session=slow_streaming, sampling_params=LONG | {"max_new_tokens": 400}, stream=True)
    with slow_http.stream("POST", "/generate", json={**body, "rid": "first"}) as response:
        told = chunks(response)
        next(told)
        status, message = refusal(slow_http.post("/generate", json=request([2], session=slow_streaming)))
        assert status in (400, 409)
        assert "'first'" in message
        assert "/abort_request" in message
        assert "if_busy" not in message
        *_, last = told
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
    assert slow_http.get(f"/v1/sessions/{slow_streaming}").json()["tokens"] == 401


def test_a_request_that_is_too_long_leaves_the_session_at_its_last_turn(http: httpx.Client, streaming: str) -> None:
    generate(http, [1] * 10, session=streaming)
    status, message = refusal(http.post("/generate", json=request([2] * 4090, session=streaming)))
    assert status == 400
    assert "4095" in message
    assert tail(generate(http, [3], session=streaming)) == (15, 2)


def test_a_natively_opened_session_is_a_streaming_session(http: httpx.Client) -> None:
    http.post("/v1/sessions", json={"id": "native"})
    assert generate(http, [1, 2], session="native")["meta_info"]["prompt_tokens"] == 2
    assert refusal(http.post("/open_session", json={"capacity_of_str_len": 0, "session_id": "native"}))[0] == 400
    closed(http, "native")
    assert http.get("/v1/sessions/native").status_code == 404


# -- sessions whose requests can all be continued


def test_branches_continue_the_same_request(http: httpx.Client, regular: str) -> None:
    root = generate(http, [1] * 30, session=regular, rid="root")
    base = [1] * 30 + root["output_ids"]
    for rid, ids in (("left", [2, 2]), ("right", [3]), ("middle", [4, 4, 4])):
        answer = generate(http, ids, session=regular, after="root", rid=rid)
        assert tail(answer) == (34 + len(ids), 1 + len(ids))
        assert answer["output_ids"] == generate(http, base + ids)["output_ids"]
    left = generate(http, [5], session=regular, after="left")
    assert tail(left) == (34 + 2 + 4 + 1, 2)


def test_a_request_without_a_rid_starts_over(http: httpx.Client, regular: str) -> None:
    generate(http, [1] * 30, session=regular, rid="a")
    assert generate(http, [1], session=regular, rid="b")["meta_info"]["prompt_tokens"] == 1
    assert generate(http, [1], session=regular, after="a")["meta_info"]["prompt_tokens"] == 35


def test_an_offset_or_a_dropped_output_cuts_the_continued_history(http: httpx.Client, regular: str) -> None:
    first = generate(http, list(range(1, 31)), session=regular, rid="a")
    every = [*range(1, 31), *first["output_ids"]]
    for more, kept in (
        ({"offset": 10}, every[:10]),
        ({"offset": 33}, every[:33]),
        ({"offset": 1000}, every),
        ({"offset": 0}, every),
        ({"offset": -2}, every[:-2]),
        ({"drop_previous_output": True}, every[:30]),
        ({"drop_previous_output": True, "offset": 31}, every[:30]),
        ({"offset": -1000}, []),
    ):
        answer = generate(http, [7, 8], session=regular, after="a", **more)
        assert answer["meta_info"]["prompt_tokens"] == len(kept) + 2
        assert answer["output_ids"] == generate(http, [*kept, 7, 8])["output_ids"]


def test_a_replacing_request_drops_the_requests_that_followed(http: httpx.Client, regular: str) -> None:
    for rid, after in (("a", None), ("b", "a"), ("c", "b"), ("other", None)):
        generate(http, [1], session=regular, rid=rid, after=after)
    generate(http, [2], session=regular, rid="d", after="a", replace=True)
    for rid in ("b", "c"):
        assert refusal(http.post("/generate", json=request([1], session=regular, after=rid)))[0] == 400
    for rid in ("a", "d", "other"):
        generate(http, [1], session=regular, after=rid)
    generate(http, [3], session=regular, rid="new", replace=True)
    for rid in ("a", "d", "other"):
        assert refusal(http.post("/generate", json=request([1], session=regular, after=rid)))[0] == 400
    generate(http, [1], session=regular, after="new")


def test_a_replacing_request_that_fails_drops_nothing(http: httpx.Client, regular: str) -> None:
    generate(http, [1], session=regular, rid="a")
    generate(http, [1], session=regular, rid="b", after="a")
    assert http.post("/generate", json=request([1] * 4096, session=regular, after="a", replace=True)).status_code == 400
    generate(http, [1], session=regular, after="b")


def test_a_running_request_can_only_be_continued_by_replacing_it(slow_http: httpx.Client, slow_regular: str) -> None:
    body = request([1] * 9, session=slow_regular, rid="long", sampling_params=LONG, stream=True)
    with slow_http.stream("POST", "/generate", json=body) as response:
        told = chunks(response)
        next(told)
        status, message = refusal(slow_http.post("/generate", json=request([2], session=slow_regular, after="long")))
        assert (status, "has not ended" in message) == (400, True)
        answer = generate(slow_http, [2], session=slow_regular, after="long", replace=True)
        *_, last = told
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["prompt_tokens"] == 9 + len(last["output_ids"]) + 1


def test_replacing_requests_end_running_ones_that_follow(slow_http: httpx.Client, slow_regular: str) -> None:
    generate(slow_http, [1], session=slow_regular, rid="a")
    body = request([1], session=slow_regular, after="a", rid="long", sampling_params=LONG, stream=True)
    with slow_http.stream("POST", "/generate", json=body) as response:
        told = chunks(response)
        next(told)
        generate(slow_http, [2], session=slow_regular, after="a", replace=True)
        *_, last = told
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


def test_branches_run_at_once(http: httpx.Client, regular: str, witness: Server) -> None:
    root = generate(http, [1] * 20, session=regular, rid="root")
    base = [1] * 20 + root["output_ids"]
    prompts = [[2 + n] for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda ids: generate(http, ids, session=regular, after="root"), prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer["output_ids"] == generate(http, base + ids)["output_ids"]
    batch = http.post("/generate", json=request(prompts, session=regular, after="root")).json()  # type: ignore[arg-type]
    assert [answer["output_ids"] for answer in batch] == [answer["output_ids"] for answer in answers]
    witness.audit()


def test_a_rolled_back_request_cannot_be_continued_but_the_one_before_can(
    slow_http: httpx.Client, slow_regular: str
) -> None:
    generate(slow_http, [1] * 20, session=slow_regular, rid="a")
    body = request([2], session=slow_regular, after="a", rid="b", sampling_params=LONG, stream=True)
    with slow_http.stream("POST", "/generate", json=body) as response:
        told = chunks(response)
        next(told)
        slow_http.post("/abort_request", json={"rid": "b"})
        list(told)
    status, message = refusal(slow_http.post("/generate", json=request([3], session=slow_regular, after="b")))
    assert (status, "rolled back" in message) == (400, True)
    assert tail(generate(slow_http, [3], session=slow_regular, after="a")) == (25, 2)


def test_a_chain_of_requests_needs_one_hidden_session(http: httpx.Client, regular: str) -> None:
    sessions = lambda: http.get("/get_server_info").json()["internal_states"][0]["sessions"]  # noqa: E731
    before, after = sessions(), None
    for n in range(6):
        generate(http, [n + 1], session=regular, rid=f"r{n}", after=after)
        after = f"r{n}"
    assert sessions() == before + 1
    assert http.get("/v1/sessions", params={"after": regular[:-1]}).json()["data"] == []
    closed(http, regular)
    eventually(lambda: sessions() == before)


def test_prompt_logprobs_of_a_branch_start_at_its_own_tokens(smollm2: httpx.Client) -> None:
    name = opened(smollm2)
    first = generate(smollm2, "The capital of France", session=name, rid="a")
    length = first["meta_info"]["prompt_tokens"] + 4
    body = request(" and so on", session=name, after="a", return_logprob=True, logprob_start_len=0)
    status, message = refusal(smollm2.post("/generate", json=body))
    assert (status, str(length) in message) == (400, True)
    body["logprob_start_len"] = length
    meta = smollm2.post("/generate", json=body).json()["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] - length
    closed(smollm2, name)


@pytest.mark.parametrize("seed", range(4))
def test_any_requests_to_a_session_see_the_tokens_they_continue(witness: Server, seed: int) -> None:
    """Compared with a naive model: the tokens of each answered request."""

    def client(number: int) -> None:
        random = Random(f"{seed} {number}")
        known: dict[str, tuple[list[int], int]] = {}
        timers: list[threading.Timer] = []
        with witness.client() as http:
            name = opened(http, timeout=60)
            for step in range(25):
                rid, ids = f"{name}-{step}", [random.randrange(900) for _ in range(random.randrange(1, 40))]
                # an abort may come late, and the output grow until then
                short = [earlier for earlier, (tokens, _) in known.items() if len(tokens) < 2000]
                after = random.choice([*short, None])
                more: dict[str, Any] = {"offset": random.choice([None, None, 0, 7, -3])}
                more["drop_previous_output"] = random.random() < 0.2
                base, input_end = known.get(after or "", ([], 0))
                base = base[:input_end] if more["drop_previous_output"] else base
                base = base[: more["offset"]] if more["offset"] and after else base
                params = {"max_new_tokens": random.choice([0, 1, 5, 1500]), "ignore_eos": True}
                body = request(ids, session=name, after=after, rid=rid, sampling_params=params, **more)
                if random.random() < 0.3:  # it may be committed or not
                    with suppress(httpx.TimeoutException):
                        http.post("/generate", json=body, timeout=random.choice([0.004, 0.02]))
                    continue
                if params["max_new_tokens"] > 5:
                    later = threading.Timer(0.02, httpx.post, [f"{witness.url}/abort_request"], {"json": {"rid": rid}})
                    later.start()
                    timers.append(later)
                answer = http.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                whole = answer.json()
                assert whole["meta_info"]["prompt_tokens"] == len(base) + len(ids)
                if whole["meta_info"]["finish_reason"]["type"] == "abort":
                    continue
                known[rid] = [*base, *ids, *whole["output_ids"]], len(base) + len(ids)
                if whole["output_ids"]:
                    said = generate(http, [*base, *ids], sampling_params={"max_new_tokens": 1})["output_ids"]
                    assert said == whole["output_ids"][:1]
            for timer in timers:
                timer.join()
            closed(http, name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, range(4)))
    with witness.client() as http:
        eventually(lambda: http.get("/get_server_info").json()["internal_states"][0]["sessions"] == 0)
    witness.audit()


# -- both kinds


@pytest.mark.parametrize("kind", [True, False])
def test_a_session_is_opened_once_and_closed(http: httpx.Client, kind: bool) -> None:
    assert opened(http, session_id="named", streaming=kind) == "named"
    for again in (True, False):
        body = {"capacity_of_str_len": 1, "session_id": "named", "streaming": again}
        status, message = refusal(http.post("/open_session", json=body))
        assert (status, "named" in message) == (400, True)
    generate(http, [1], session="named")
    closed(http, "named")
    status, message = refusal(http.post("/generate", json=request([1], session="named")))
    assert (status, "named" in message) == (400, True)
    closed(http, "named")


@pytest.mark.parametrize("kind", [True, False])
def test_an_idle_session_closes_itself_after_its_timeout(http: httpx.Client, kind: bool) -> None:
    name = opened(http, timeout=0.3, streaming=kind)
    generate(http, [1], session=name)
    eventually(lambda: http.post("/open_session", json={"session_id": name}).status_code == 200)
    closed(http, name)


@pytest.mark.parametrize(
    "body",
    [
        {"session_id": ""},
        {"session_id": "a/b"},
        {"session_id": "a~b"},
        {"session_id": "x" * 65},
        {"session_id": 5},
        {"timeout": 0},
        {"timeout": "1"},
        {"streaming": "yes"},
        {"capacity_of_str_len": "many"},
        {"unheard_of": 1},
    ],
)
def test_malformed_sessions_are_refused(http: httpx.Client, body: dict[str, Any]) -> None:
    assert refusal(http.post("/open_session", json=body))[0] == 400


@pytest.mark.parametrize("kind", [True, False])
def test_a_bos_token_is_kept_unless_the_tokenizer_adds_one(smollm2: httpx.Client, kind: bool) -> None:
    name = opened(smollm2, streaming=kind)
    bos = smollm2.get("/v1/engine").json()
    assert bos["adds_bos"] is False
    first = generate(smollm2, [bos["bos_id"], 100], session=name, rid="a")
    second = generate(smollm2, [bos["bos_id"], 100], session=name, after="a")
    assert second["meta_info"]["prompt_tokens"] == 2 + len(first["output_ids"]) + 2
    closed(smollm2, name)


@pytest.mark.parametrize("kind", [True, False])
def test_turns_of_the_real_model_generate_what_the_whole_text_would(smollm2: httpx.Client, kind: bool) -> None:
    name, after = opened(smollm2, streaming=kind), None
    ids: list[int] = []
    for n, part in enumerate(([504, 3575, 282, 4649, 314], [30, 378], [28])):
        answer = generate(smollm2, part, session=name, after=after, rid=f"{name}-{n}")
        ids, after = ids + part, f"{name}-{n}"
        assert answer["output_ids"] == generate(smollm2, ids)["output_ids"]
        assert tail(answer) == (len(ids), len(part) + (n > 0))
        ids += answer["output_ids"]
    closed(smollm2, name)


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
