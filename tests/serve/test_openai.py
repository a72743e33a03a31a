"""The OpenAI interface, used by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.present import present
from tests.serve.server import Server, serving

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": "witness", "temperature": 0}


def client_of(server: Server, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def witness() -> Iterator[Server]:
    """A server without the prefix cache: memory of closed sessions would hide leaks."""
    with serving("--model", "witness", "--context-length", "4096", "--no-prefix-cache") as server:
        yield server
        server.audit()


@pytest.fixture
def client(witness: Server) -> Iterator[OpenAI]:
    before = held(witness)
    with client_of(witness) as client:
        yield client
    is_left(witness, before)


@pytest.fixture(scope="module")
def real(smollm2_server: Server) -> Iterator[OpenAI]:
    flush = f"{smollm2_server.url}/flush_cache"  # memory of closed sessions
    httpx.post(flush, timeout=60).raise_for_status()
    before = held(smollm2_server)
    with client_of(smollm2_server) as client:
        yield client
    httpx.post(flush, timeout=60).raise_for_status()
    is_left(smollm2_server, before)


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A server on which turns outlast the tests that end them: 4,000 tokens take 20 seconds."""
    named = ("--served-model-name", "witness")
    with serving("--model", "witness:0.005", "--context-length", "4096", "--no-prefix-cache", *named) as server:
        yield server
        server.audit()


def held(server: Server) -> dict[str, int]:
    """Returns the units held by turns and sessions, including hidden ones."""
    pools = httpx.get(f"{server.url}/audit", timeout=60).raise_for_status().json()["pools"]
    return {holder: units for pool in pools for holder, units in pool["by_holder"].items() if units}


def is_left(server: Server, before: dict[str, int]) -> None:
    """Checks that the same units are held again: every turn has ended and every hidden session is closed."""
    for _ in range(200):
        if held(server) == before:
            return
        time.sleep(0.02)
    pytest.fail(f"{held(server)} is held, not {before}")


def close(server: Server, session: str) -> None:
    httpx.delete(f"{server.url}/v1/sessions/{session}").raise_for_status()


# -- models


def test_the_model_is_listed_and_shown(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.model_extra and model.model_extra["max_model_len"]) == (
        "witness",
        "model",
        4096,
    )
    assert client.models.retrieve("witness") == client.models.retrieve("default") == model
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("org/other")
    assert refused.value.code == "model_not_found"


# -- completions


def test_a_text_is_continued_by_16_tokens_by_default(client: OpenAI) -> None:
    done = client.completions.create(prompt="hello", **GREEDY)
    assert (done.object, done.model, done.id[:5]) == ("text_completion", "witness", "cmpl-")
    assert done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (
        5,
        16,
        21,
    )


def test_a_stream_has_the_text_of_the_whole_answer(client: OpenAI) -> None:
    whole = client.completions.create(prompt="hello", max_tokens=9, logprobs=2, **GREEDY)
    chunks = list(
        client.completions.create(
            prompt="hello", max_tokens=9, logprobs=2, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *said, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in said) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in said] == [None] * (len(said) - 1) + ["length"]
    assert (usage.choices, usage.usage and usage.usage.completion_tokens) == ([], 9)
    assert {chunk.id for chunk in chunks} == {usage.id}
    expected, parts = whole.choices[0].logprobs, [chunk.choices[0].logprobs for chunk in said]
    assert expected is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts if part for entry in getattr(part, name)] == getattr(expected, name)


def test_prompts_may_be_token_ids_and_batches(client: OpenAI) -> None:
    one = client.completions.create(prompt=[7, 8, 9], **GREEDY).choices[0].text
    batch = client.completions.create(prompt=[[7, 8, 9], [5]], n=2, **GREEDY)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in batch.choices[:2]] == [one, one]
    assert batch.choices[2].text == batch.choices[3].text != one
    assert (batch.usage.prompt_tokens, batch.usage.completion_tokens) == (4, 64)
    texts = client.completions.create(prompt=["a", "b"], stream=True, **GREEDY)
    said = {0: "", 1: ""}
    for chunk in texts:
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert list(said.values()) == [client.completions.create(prompt=p, **GREEDY).choices[0].text for p in "ab"]


def test_an_echo_begins_with_the_prompt(client: OpenAI) -> None:
    plain = client.completions.create(prompt="hello", max_tokens=4, **GREEDY).choices[0].text
    assert client.completions.create(prompt="hello", max_tokens=4, echo=True, **GREEDY).choices[0].text == (
        "hello" + plain
    )
    streamed = client.completions.create(prompt="hello", max_tokens=4, echo=True, n=2, stream=True, **GREEDY)
    said = ["", ""]
    for chunk in streamed:
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert said == ["hello" + plain] * 2


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_can_be_scored_without_an_answer(client: OpenAI, n: int) -> None:
    done = client.completions.create(prompt="hello", max_tokens=0, echo=True, logprobs=1, n=n, **GREEDY)
    assert [choice.text for choice in done.choices] == ["hello"] * n
    for choice in done.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs.tokens == list("hello")
        assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
        scores = choice.logprobs.token_logprobs
        assert scores[0] is None
        assert all(score <= 0 for score in scores[1:])
        assert choice.logprobs.top_logprobs[0] is None


def test_an_answer_stops_at_a_stop_string(client: OpenAI) -> None:
    text = client.completions.create(prompt="hello", max_tokens=12, **GREEDY).choices[0].text
    stop = text[3:6]
    stopped = client.completions.create(prompt="hello", max_tokens=12, stop=[stop, "\x00"], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    options: dict[str, Any] = {"max_tokens": 12, "stop": [stop], "extra_body": {"include_stop_str_in_output": True}}
    kept = client.completions.create(prompt="hello", **options, **GREEDY).choices[0]
    assert (kept.text, kept.finish_reason) == (text[: text.index(stop)] + stop, "stop")


def test_a_biased_token_is_sampled(real: OpenAI) -> None:
    done = real.completions.create(model="smollm2", prompt="Hello", max_tokens=3, logit_bias={"42": 100}, logprobs=0)
    assert len(set(present(present(done.choices[0].logprobs).tokens))) == 1


def test_streamed_samples_are_scored_with_their_prompt(client: OpenAI) -> None:
    options: dict[str, Any] = {"prompt": "hello", "echo": True, "logprobs": 1, "n": 2, "max_tokens": 0, **GREEDY}
    whole = client.completions.create(**options)
    said = list(client.completions.create(stream=True, **options))
    for choice in whole.choices:
        chunks = [chunk.choices[0] for chunk in said if chunk.choices[0].index == choice.index]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        assert [chunk.logprobs for chunk in chunks if chunk.logprobs] == [choice.logprobs]


# -- seeds and samples


def usage_of(answer: Completion | ChatCompletion) -> CompletionUsage:
    return present(answer.usage)


def texts(client: OpenAI, **options: Any) -> list[str]:
    done = client.chat.completions.create(**{"model": "witness", "messages": HI, "max_tokens": 8, **options})
    return [choice.message.content or "" for choice in done.choices]


def test_a_seed_repeats_an_answer_and_n_samples_use_successive_seeds(client: OpenAI) -> None:
    first = texts(client, seed=5, n=3)
    assert texts(client, seed=5, n=3) == first
    assert [texts(client, seed=5 + i)[0] for i in range(3)] == first
    assert texts(client, seed=-1) == texts(client, seed=2**63 - 1)


def test_without_a_seed_answers_differ(real: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 12,
        "temperature": 2,
    }  # equal ones are next to impossible
    first, second = texts(real, **options), texts(real, **options)
    assert first != second
    assert texts(real, seed=3, **options) == texts(real, seed=3, **options)


def test_the_prompt_of_n_samples_is_computed_and_counted_once(client: OpenAI) -> None:
    history: list[ChatCompletionMessageParam] = [{"role": "user", "content": "x" * 500}]
    one = client.chat.completions.create(messages=history, max_tokens=5, **GREEDY)
    many = client.chat.completions.create(messages=history, max_tokens=5, n=8, **GREEDY)
    assert {choice.message.content for choice in many.choices} == {one.choices[0].message.content}
    assert usage_of(one).prompt_tokens == usage_of(many).prompt_tokens
    assert usage_of(many).completion_tokens == 40


def test_n_samples_count_as_sessions_of_their_tenant(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\ntenant = "small"\nkey = "k"\nadmin = true\nlimits = { sessions = 3 }\n')
    with serving("--model", "witness", "--keys", str(keys)) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)

        def closed_again() -> bool:
            try:
                return len(texts(client, n=3)) == 3
            except openai.RateLimitError:
                return False

        for _ in range(2):
            for _ in range(100):
                if closed_again():
                    break
                time.sleep(0.02)
            else:
                pytest.fail("the samples' sessions stay open")
            with pytest.raises(openai.RateLimitError) as refused:
                texts(client, n=4)
            assert refused.value.code == "limit_reached"


# -- chat


def test_a_chat_stream_starts_with_the_role_and_ends_with_the_reason(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=HI, max_tokens=6, n=2, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=HI,
            max_completion_tokens=6,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert whole.object == "chat.completion"
    *said, usage = chunks
    for choice in whole.choices:
        deltas = [chunk.choices[0] for chunk in said if chunk.choices[0].index == choice.index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(delta.delta.content or "" for delta in deltas) == choice.message.content
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [choice.finish_reason]
    assert usage.usage == whole.usage


def test_content_may_be_in_parts_and_answers_can_be_sent_back(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=HI, max_tokens=4, **GREEDY).choices[0].message
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    later = [*HI, answer.model_dump(), {"role": "user", "content": parts, "name": "me"}]
    plain = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "a\nb"}]
    assert texts(client, messages=later, temperature=0) == texts(client, messages=plain, temperature=0)
    system = [{"role": "system", "content": "be brief"}, *HI]
    developer = [{"role": "developer", "content": "be brief"}, *HI]
    assert texts(client, messages=system, temperature=0) == texts(client, messages=developer, temperature=0)


def test_logprobs_of_a_chat_are_those_of_its_tokens(real: OpenAI) -> None:
    done = real.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Say something with an emoji."}],
        max_tokens=10,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    choice = done.choices[0]
    scored = present(present(choice.logprobs).content)
    assert len(scored) == usage_of(done).completion_tokens
    said = b"".join(bytes(entry.bytes or ()) for entry in scored)
    assert said.decode(errors="replace").startswith(choice.message.content or "")
    for entry in scored:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert entry.top_logprobs[0].token == entry.token


def test_an_echo_has_the_logprobs_of_prompt_and_answer(real: OpenAI) -> None:
    options: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 2, "logprobs": 2}
    prompt = "The capital of France is"
    done = real.completions.create(prompt=prompt, echo=True, **options).choices[0]
    offsets = done.logprobs.text_offset
    for token, start, end in zip(done.logprobs.tokens, offsets, [*offsets[1:], len(done.text)], strict=True):
        assert done.text[start:end] == token
    again = real.completions.create(prompt=done.text, echo=True, **{**options, "max_tokens": 0}).choices[0]
    assert again.logprobs.tokens == done.logprobs.tokens
    assert again.logprobs.token_logprobs[0] is None
    assert again.logprobs.token_logprobs[1:] == pytest.approx(
        done.logprobs.token_logprobs[1:], abs=0.05
    )  # other kernels


# -- sessions


def test_a_session_gives_the_answers_of_a_resent_history_and_computes_less(
    real: OpenAI, smollm2_server: Server
) -> None:
    history: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    questions = ["What is the capital of France?", "And of Italy?", "Which of them is larger?"]
    options: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 24}
    before = 0
    for number, question in enumerate(questions, 1):
        new: ChatCompletionMessageParam = {"role": "user", "content": question}
        sent = [*history, new] if number == 1 else [new]
        history.append(new)
        resent = real.chat.completions.create(messages=history, **options)
        kept = real.chat.completions.create(messages=sent, extra_body={"session_id": "talk"}, **options)
        assert kept.choices == resent.choices
        assert kept.model_extra == {"session_id": "talk", "version": number}
        usage = usage_of(kept)
        assert usage.prompt_tokens == usage_of(resent).prompt_tokens
        assert present(present(usage.prompt_tokens_details).cached_tokens) >= before - 1
        before = usage.total_tokens
        history.append({"role": "assistant", "content": kept.choices[0].message.content})
    close(smollm2_server, "talk")


def test_a_session_streams_and_continues_raw_text(client: OpenAI, witness: Server) -> None:
    httpx.post(f"{witness.url}/v1/sessions", json={"id": "raw"}).raise_for_status()
    own: dict[str, Any] = {"extra_body": {"session_id": "raw"}, "max_tokens": 4, **GREEDY}
    first = client.completions.create(prompt=[5, 6], **own)
    assert first.model_extra == {"session_id": "raw", "version": 1}
    *_, last = client.completions.create(prompt="", stream=True, **own)
    assert last.model_extra == {"session_id": "raw", "version": 2}
    assert (
        client.completions.create(prompt=[5, 6], max_tokens=8, **GREEDY)
        .choices[0]
        .text.startswith(first.choices[0].text)
    )
    with pytest.raises(openai.ConflictError) as refused:
        client.chat.completions.create(messages=HI, extra_body={"session_id": "raw"}, **GREEDY)
    assert refused.value.code == "illegal_transition"
    close(witness, "raw")


def test_simultaneous_requests_that_open_a_session_open_it_once(client: OpenAI, witness: Server) -> None:
    def ask(_: int) -> int | None:
        try:
            texts(client, max_tokens=200, extra_body={"session_id": "race", "ignore_eos": True})
        except openai.ConflictError as error:
            return error.status_code
        return None

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(ask, range(8)))
    assert None in told
    assert set(told) <= {None, 409}
    version = httpx.get(f"{witness.url}/v1/sessions/race").json()["version"]
    assert version == told.count(None)
    close(witness, "race")


def test_a_session_whose_first_turn_is_refused_is_not_opened(client: OpenAI, witness: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=[1] * 5000, extra_body={"session_id": "refused"}, **GREEDY)
    assert httpx.get(f"{witness.url}/v1/sessions/refused").status_code == 404


def test_a_repeated_request_to_a_session_takes_one_turn(client: OpenAI, witness: Server) -> None:
    key = {"extra_headers": {"idempotency-key": "once"}, "extra_body": {"session_id": "once"}}
    assert texts(client, **key) == texts(client, **key)
    assert httpx.get(f"{witness.url}/v1/sessions/once").json()["version"] == 1
    close(witness, "once")


def test_a_sessions_answer_may_be_aborted_and_kept_or_not(slow: Server) -> None:
    before = held(slow)

    def abort(keep: str) -> None:
        httpx.post(f"{slow.url}/v1/sessions/broken/abort", json={"keep": keep}).raise_for_status()

    with client_of(slow) as client:

        def asked() -> openai.Stream[Any]:
            body = {"session_id": "broken", "ignore_eos": True}
            stream = client.chat.completions.create(
                messages=HI, max_tokens=4000, stream=True, extra_body=body, **GREEDY
            )
            for _ in range(3):
                next(stream)
            return stream

        stream = asked()
        abort("delivered")
        *_, last = stream
        assert (last.choices[0].finish_reason, last.model_extra["version"]) == ("stop", 1)
        stream = asked()
        abort("none")
        with pytest.raises(openai.APIError, match="aborted"):
            list(stream)
    assert httpx.get(f"{slow.url}/v1/sessions/broken").json()["version"] == 1
    close(slow, "broken")
    is_left(slow, before)


# -- refusals


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"bad_words": ["x"]}}, "bad_words"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "function", "content": "x"}]}, "function"),
    ],
)
def test_unsupported_fields_are_refused_by_name(client: OpenAI, options: dict[str, Any], name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=name) as refused:
        client.chat.completions.create(**{**GREEDY, "messages": HI, **options})
    assert refused.value.code == "unsupported"


def test_fields_without_effect_are_accepted(client: OpenAI) -> None:
    assert texts(
        client,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        parallel_tool_calls=True,
        prompt_cache_key="k",
        tool_choice="none",
        tools=[],
        response_format={"type": "text"},
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [3],
            "request_id": "x",
            "rid": "y",
            "separate_reasoning": True,
            "length_penalty": 1.0,
            "use_beam_search": False,
            "lora_path": None,
        },
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": "hi"}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}),
        ("chat/completions", {"messages": HI, "unknown_field": 1}),
        ("chat/completions", {"messages": HI, "max_tokens": 0}),
        ("chat/completions", {"messages": HI, "top_logprobs": 2}),
        ("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 21}),
        ("chat/completions", {"messages": HI, "n": 129}),
        ("chat/completions", {"messages": HI, "n": 2, "session_id": "x"}),
        ("chat/completions", {"messages": HI, "session_id": "a/b"}),
        ("chat/completions", {"messages": HI, "session_id": "~n"}),
        ("chat/completions", {"messages": HI, "stream_options": {"include_usage": True}}),
        ("chat/completions", {"messages": HI, "logit_bias": {"a": 1}}),
        ("chat/completions", {"messages": HI, "logit_bias": {"99999": 1}}),
        ("chat/completions", {"messages": HI, "logit_bias": {"1": 101}}),
        ("chat/completions", {"messages": HI, "temperature": "hot"}),
        ("completions", {}),
        ("completions", {"prompt": None}),
        ("completions", {"prompt": []}),
        ("completions", {"prompt": [1, "a"]}),
        ("completions", {"prompt": [-1]}),
        ("completions", {"prompt": [2**70]}),
        ("completions", {"prompt": [5000]}),
        ("completions", {"prompt": "x", "n": 3, "best_of": 4}),
        ("completions", {"prompt": "x", "suffix": "y"}),
        ("completions", {"prompt": "x", "logprobs": 6}),
        ("completions", {"prompt": "x", "stop": [""]}),
        ("completions", {"prompt": "x", "max_tokens": 2**70}),
        ("completions", {"prompt": ["x"] * 2, "session_id": "x"}),
        ("completions", {"prompt": ["x"] * 1025}),
        ("completions", {"prompt": "\ud800"}),
        ("completions", {"prompt": "x", "\ud800": 1}),
        ("completions", {"prompt": "x", "stop": "\ud800"}),
    ],
)
def test_a_malformed_request_names_the_wrong_field(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    content = json.dumps({"model": "witness", **body})
    answer = http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_the_model_name_default_means_the_served_model(client: OpenAI, http: httpx.Client) -> None:
    done = client.completions.create(prompt="a", max_tokens=1, **{**GREEDY, "model": "default"})
    assert done.model == "witness"
    answered = client.chat.completions.create(messages=HI, max_tokens=1, **{**GREEDY, "model": "default"})
    assert answered.model == "witness"
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    for name, status in (("default", 200), ("witness", 200), ("gpt", 404)):
        assert http.post("/generate", json={**body, "model": name}).status_code == status


def test_another_model_and_a_prompt_that_is_too_long_are_refused_with_openais_codes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        texts(client, model="gpt")
    assert unknown.value.code == "model_not_found"
    for n in (1, 2):
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(prompt=[1] * 5000, n=n, **GREEDY)
        assert long.value.code == "context_length_exceeded"


def test_a_turn_that_ends_too_late_is_an_error(client: OpenAI) -> None:
    late: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"timeout": 0.05, "ignore_eos": True}}
    for n in (1, 3):
        with pytest.raises(openai.InternalServerError) as passed:
            texts(client, n=n, **late)
        assert (passed.value.status_code, passed.value.code) == (504, "deadline_passed")
    with pytest.raises(openai.APIError, match="deadline"):
        list(client.completions.create(prompt="x", stream=True, **late, **GREEDY))


# -- disconnecting clients


@pytest.mark.parametrize(("n", "session"), [(1, None), (4, None), (1, "left")])
def test_a_cancelled_stream_leaves_no_turn_behind(slow: Server, n: int, session: str | None) -> None:
    before = held(slow)

    async def leave() -> None:
        async with AsyncOpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
            started = asyncio.Event()

            async def read() -> None:
                stream = await client.completions.create(
                    prompt="hello",
                    n=n,
                    max_tokens=4000,
                    stream=True,
                    extra_body={"ignore_eos": True, **({"session_id": session} if session else {})},
                    **GREEDY,
                )
                async for _ in stream:
                    started.set()

            reading = asyncio.ensure_future(read())
            await started.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    asyncio.run(leave())
    is_left(slow, before)
    if session is not None:
        assert httpx.get(f"{slow.url}/v1/sessions/{session}").json()["version"] == 0
        close(slow, session)


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_disconnects_before_the_whole_answer_leaves_no_turn_behind(slow: Server, n: int) -> None:
    before = held(slow)
    for seconds in (0.01, 0.03, 0.1):
        with client_of(slow, timeout=seconds) as client, pytest.raises(openai.APITimeoutError):
            client.completions.create(
                prompt=["hello"] * 2, n=n, max_tokens=4000, extra_body={"ignore_eos": True}, **GREEDY
            )
        is_left(slow, before)
