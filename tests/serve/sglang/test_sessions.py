"""Sessions of the SGLang interface: those that are only appended to, and those whose requests can all be continued."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any

import httpx
import pytest

from tests.eventually import eventually
from tests.serve.server import Server
from tests.serve.sglang.calls import LONG, chunks, closed, generate, opened, refusal, request, tail


def sessions(http: httpx.Client) -> int:
    return http.get("/get_server_info").json()["internal_states"][0]["sessions"]


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
    before, after = sessions(http), None
    for n in range(6):
        generate(http, [n + 1], session=regular, rid=f"r{n}", after=after)
        after = f"r{n}"
    assert sessions(http) == before + 1
    assert http.get("/v1/sessions", params={"after": regular[:-1]}).json()["data"] == []
    closed(http, regular)
    eventually(lambda: sessions(http) == before)


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

    with witness.client() as http:
        before = sessions(http)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(client, range(4)))
        eventually(lambda: sessions(http) <= before)
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
