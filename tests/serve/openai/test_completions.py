"""Completions and chats of the OpenAI interface, used by OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.eventually import eventually
from tests.present import present
from tests.serve.openai.calls import GREEDY, HI, usage_of
from tests.serve.server import serving

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
    with (
        serving("--model", "witness", "--keys", str(keys)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):

        def closed_again() -> bool:
            try:
                return len(texts(client, n=3)) == 3
            except openai.RateLimitError:
                return False

        for _ in range(2):
            eventually(closed_again)
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
    counts = [present(each.usage).model_dump(exclude={"completion_tokens_details"}) for each in (usage, whole)]
    assert counts[0] == counts[1]  # how many tokens were guessed depends on what was said before


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
