"""Sessions and disconnects of OpenAI's own client."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.present import present
from tests.serve.openai.calls import GREEDY, HI, client_of, close, held, is_left, usage_of
from tests.serve.openai.test_completions import texts
from tests.serve.server import Server

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
        assert {"session_id": "talk", "version": number}.items() <= present(kept.model_extra).items()
        usage = usage_of(kept)
        assert usage.prompt_tokens == usage_of(resent).prompt_tokens
        assert present(present(usage.prompt_tokens_details).cached_tokens) >= before - 1
        before = usage.total_tokens
        history.append({"role": "assistant", "content": kept.choices[0].message.content})
    close(smollm2_server, "talk")


def test_a_session_streams_and_continues_raw_text(client: OpenAI, witness: Server) -> None:
    httpx.post(f"{witness.url}/v1/sessions", json={"id": "raw"}, timeout=60).raise_for_status()
    own: dict[str, Any] = {"extra_body": {"session_id": "raw"}, "max_tokens": 4, **GREEDY}
    first = client.completions.create(prompt=[5, 6], **own)
    assert {"session_id": "raw", "version": 1}.items() <= present(first.model_extra).items()
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
    version = httpx.get(f"{witness.url}/v1/sessions/race", timeout=60).json()["version"]
    assert version == told.count(None)
    close(witness, "race")


def test_a_session_whose_first_turn_is_refused_is_not_opened(client: OpenAI, witness: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=[1] * 5000, extra_body={"session_id": "refused"}, **GREEDY)
    assert httpx.get(f"{witness.url}/v1/sessions/refused", timeout=60).status_code == 404


def test_a_repeated_request_to_a_session_takes_one_turn(client: OpenAI, witness: Server) -> None:
    key = {"extra_headers": {"idempotency-key": "once"}, "extra_body": {"session_id": "once"}}
    assert texts(client, **key) == texts(client, **key)
    assert httpx.get(f"{witness.url}/v1/sessions/once", timeout=60).json()["version"] == 1
    close(witness, "once")


def test_a_sessions_answer_may_be_aborted_and_kept_or_not(slow: Server) -> None:
    before = held(slow)

    def abort(keep: str) -> None:
        httpx.post(f"{slow.url}/v1/sessions/broken/abort", json={"keep": keep}, timeout=60).raise_for_status()

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
    assert httpx.get(f"{slow.url}/v1/sessions/broken", timeout=60).json()["version"] == 1
    close(slow, "broken")
    is_left(slow, before)


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
        assert httpx.get(f"{slow.url}/v1/sessions/{session}", timeout=60).json()["version"] == 0
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
