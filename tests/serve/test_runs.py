"""Clients that resend their whole history, and name themselves, continue sessions without knowing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.serve.server import Server, serving

SYSTEM: Any = {"role": "system", "content": "Be brief, and answer in one line."}
HI: Any = {"role": "user", "content": "a question of some length, to begin with"}
MORE: Any = {"role": "user", "content": "and?"}
NAMES: list[dict[str, Any]] = [
    {"extra_headers": {"x-session-affinity": "one"}},
    {"extra_headers": {"x-sgl-routing-key": "two"}},
    {"extra_headers": {"X-Dynamo-Session-Id": "three"}},
    {"extra_headers": {"session_id": "four"}},
    {"prompt_cache_key": "five"},
    {"user": "six"},
]


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    """Returns the headers of the answer, and the answer."""
    given: Any = {"model": "witness", "messages": messages, "max_tokens": 12, **options}
    raw = client.chat.completions.with_raw_response.create(**given)
    return raw.headers, raw.parse()


def said(answer: Any) -> Any:
    return {"role": "assistant", "content": answer.choices[0].message.content}


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_a_resent_history_continues_the_session_in_place(client: OpenAI, witness: Server, name: Any) -> None:
    messages, sessions, earlier = [SYSTEM, HI], set(), 0
    for turn in range(4):
        headers, answer = ask(client, messages, **name)
        sessions.add(headers["x-tenuto-session"])
        assert headers.get("x-tenuto-recomputed") == ("new" if turn == 0 else None)
        if turn:
            assert int(headers["x-tenuto-cached"]) == cached(answer) >= earlier - 1
        earlier = answer.usage.prompt_tokens + answer.usage.completion_tokens
        messages += [said(answer), MORE]
    assert len(sessions) == 1
    with witness.client() as http:
        assert http.get(f"/v1/sessions/{sessions.pop()}").json()["turns"] == 4
    witness.audit()


def test_without_a_name_no_session_is_kept(client: OpenAI) -> None:
    headers, _ = ask(client, [HI])
    assert not [name for name in headers if name.startswith("x-tenuto-")]


def test_a_changed_message_forks_the_session_there(client: OpenAI, witness: Server) -> None:
    name: Any = {"user": "forks"}
    first, one = ask(client, [SYSTEM, HI], **name)
    messages = [SYSTEM, HI, said(one), MORE]
    _, two = ask(client, messages, **name)
    headers, other = ask(client, [*messages[:3], {"role": "user", "content": "something else"}], **name)
    assert headers["x-tenuto-session"] != first["x-tenuto-session"]
    assert headers["x-tenuto-recomputed"] == "diverged at message 4"
    assert cached(other) >= one.usage.prompt_tokens + one.usage.completion_tokens - 1
    headers, _ = ask(client, [*messages, said(two), MORE], **name)  # the first one goes on as if nothing had happened
    assert headers["x-tenuto-session"] == first["x-tenuto-session"]
    headers, _ = ask(client, [{**SYSTEM, "content": "Be long."}, HI], **name)
    assert headers["x-tenuto-recomputed"] == "diverged at message 1"
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    headers, _ = ask(client, [SYSTEM, HI, said(one), MORE], tools=[tool], **name)
    assert headers["x-tenuto-recomputed"] == "tools or options of the template changed"
    witness.audit()


def test_a_stop_that_its_client_never_got_is_not_in_the_prompt(client: OpenAI, witness: Server) -> None:
    name: Any = {"user": "stops"}
    _, whole = ask(client, [SYSTEM, HI], temperature=0)
    stop = whole.choices[0].message.content[5:7]
    _, one = ask(client, [SYSTEM, HI], stop=[stop], temperature=0, **name)
    assert one.choices[0].finish_reason == "stop"
    messages = [SYSTEM, HI, said(one), MORE]
    headers, two = ask(client, messages, temperature=0, **name)
    assert headers["x-tenuto-recomputed"] == "diverged at message 3"
    _, fresh = ask(client, messages, temperature=0)
    assert (two.usage.prompt_tokens, said(two)) == (fresh.usage.prompt_tokens, said(fresh))
    headers, _ = ask(client, [*messages, said(two), MORE], **name)  # from then on it is continued in place
    assert "x-tenuto-recomputed" not in headers
    witness.audit()


def test_a_stop_token_that_its_client_asked_for_is_not_in_the_prompt(client: OpenAI, witness: Server) -> None:
    name: Any = {"user": "stop tokens"}
    _, whole = ask(client, [SYSTEM, HI], temperature=0, extra_body={"return_token_ids": True})
    stop = whole.choices[0].token_ids[3]
    _, one = ask(client, [SYSTEM, HI], temperature=0, extra_body={"stop_token_ids": [stop]}, **name)
    assert one.choices[0].stop_reason == stop
    headers, _ = ask(client, [SYSTEM, HI, said(one), MORE], **name)
    assert headers["x-tenuto-recomputed"] == "diverged at message 3"
    witness.audit()


def test_an_end_that_the_template_writes_is_continued_in_place(client: OpenAI, witness: Server) -> None:
    name: Any = {"user": "ends"}
    long: Any = {"role": "user", "content": "one" * 100}
    _, one = ask(client, [long], seed=1, max_tokens=8, **name)
    assert one.choices[0].finish_reason == "stop"
    headers, two = ask(client, [long, said(one), MORE], **name)
    assert "x-tenuto-recomputed" not in headers
    assert two.usage.prompt_tokens_details.cached_tokens >= one.usage.total_tokens - 1
    witness.audit()


def test_an_end_that_was_ignored_is_not_in_the_prompt(smollm2_server: Server) -> None:
    with OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none", max_retries=0) as client:
        name: Any = {"user": "ignored ends"}
        options: Any = {"model": "default", "temperature": 0, "max_tokens": 80}
        hello: Any = {"role": "user", "content": "Say only hello."}
        _, ended = ask(client, [hello], **options)
        assert ended.choices[0].finish_reason == "stop"
        _, one = ask(client, [hello], extra_body={"ignore_eos": True}, **options, **name)
        messages = [hello, said(one), MORE]
        headers, two = ask(client, messages, **options, **name)
        assert headers["x-tenuto-recomputed"] == "diverged at message 2"
        _, fresh = ask(client, messages, **options)
        assert (two.usage.prompt_tokens, said(two)) == (fresh.usage.prompt_tokens, said(fresh))
    smollm2_server.audit()


def test_parallel_calls_of_a_run_fork_and_are_not_refused(slow_witness: Server) -> None:
    with OpenAI(base_url=f"{slow_witness.url}/v1", api_key="none", max_retries=0) as client:
        name: Any = {"user": "parallel"}
        first, one = ask(client, [HI], **name)
        messages = [HI, said(one), MORE]
        with client.chat.completions.create(
            model="witness", messages=messages, max_tokens=2000, stream=True, **name
        ) as running:
            assert next(iter(running)).choices
            headers, answer = ask(client, messages, **name)
            assert headers["x-tenuto-session"] != first["x-tenuto-session"]
            assert cached(answer) >= one.usage.prompt_tokens + one.usage.completion_tokens - 1
        headers, _ = ask(client, [*messages, said(answer), MORE], **name)
        assert headers["x-tenuto-session"] not in (first["x-tenuto-session"], "")
    slow_witness.audit()


def test_a_name_finds_nothing_of_another_tenant() -> None:
    with serving("--model", "witness", "--api-key", "one", "--admin-api-key", "two") as server:
        found = []
        for key in ("one", "two"):
            with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                _, one = ask(client, [HI], user="same")
                if key == "one":
                    before = one
                headers, _ = ask(client, [HI, said(before), MORE], user="same")
                found.append(headers.get("x-tenuto-recomputed"))
        assert found[0] is None
        assert found[1] is not None


def test_a_session_that_its_client_closed_or_changed_is_not_continued(client: OpenAI, witness: Server) -> None:
    name: Any = {"user": "meddling"}
    for change in ("close", "append"):
        headers, one = ask(client, [HI], **name)
        session = f"/v1/sessions/{headers['x-tenuto-session']}"
        with witness.client() as http:
            if change == "close":
                assert http.delete(session).status_code == 204
            else:
                assert http.post(f"{session}/append", json={"input": [MORE]}).status_code == 200
        again, two = ask(client, [HI, said(one), MORE], **name)
        assert again["x-tenuto-session"] != headers["x-tenuto-session"]
        assert again["x-tenuto-recomputed"] == "the session was closed or changed"
        assert two.usage.prompt_tokens > one.usage.prompt_tokens + one.usage.completion_tokens
        name = {"user": "meddling more"}


def test_a_refused_request_leaves_no_session_and_keeps_the_run(client: OpenAI, witness: Server) -> None:
    name: Any = {"user": "refused"}
    first, one = ask(client, [HI], **name)
    messages = [HI, said(one), MORE]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, [*messages[:2], {"role": "user", "content": "x" * 100_000}], **name)
    headers, _ = ask(client, messages, **name)
    assert headers["x-tenuto-session"] == first["x-tenuto-session"]
    assert "x-tenuto-recomputed" not in headers
    witness.audit()


@pytest.mark.parametrize("stored", [False, True])
def test_responses_that_resend_their_items_reuse_the_state(client: OpenAI, stored: bool) -> None:
    items: list[Any] = [{"role": "user", "content": HI["content"]}]
    name: Any = {"prompt_cache_key": f"responses {stored}", "store": stored, "instructions": SYSTEM["content"]}
    earlier = 0
    for turn in range(3):
        answer: Any = client.responses.create(model="witness", input=items, max_output_tokens=12, **name)
        assert not turn or answer.usage.input_tokens_details.cached_tokens >= earlier - 1
        earlier = answer.usage.input_tokens + answer.usage.output_tokens
        items += [*(item.model_dump(exclude_none=True) for item in answer.output), {"role": "user", "content": "and?"}]
    if stored:  # each response can still be continued by itself
        client.responses.create(model="witness", input="and?", previous_response_id=answer.id, max_output_tokens=4)


def test_a_refused_response_that_would_be_stored_is_refused_for_its_own_reason(client: OpenAI) -> None:
    name: Any = {"model": "witness", "prompt_cache_key": "too long", "max_output_tokens": 4}
    client.responses.create(input="hello", **name)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(input="x" * 100_000, **name)


def test_claude_codes_headers_and_its_changing_first_line_keep_the_session(witness: Server) -> None:
    with Anthropic(base_url=witness.url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [HI]
        earlier = 0
        for turn in range(3):
            line = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn:05x};"
            raw = client.messages.with_raw_response.create(
                model="witness",
                max_tokens=12,
                system=[{"type": "text", "text": line}, {"type": "text", "text": SYSTEM["content"]}],
                messages=messages,
                extra_headers={"x-claude-code-session-id": "abc"},
            )
            answer: Any = raw.parse()
            assert raw.headers["x-tenuto-volatile-lines"] == "1"
            assert not turn or (answer.usage.cache_read_input_tokens or 0) >= earlier - 1
            usage = answer.usage
            earlier = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
            earlier += usage.cache_creation_input_tokens or 0
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            messages += [{"role": "assistant", "content": content}, MORE]
    witness.audit()


def test_volatile_lines_stay_if_asked_and_others_are_left_out_by_expression() -> None:
    kept = ["--keep-volatile-lines", "--volatile-line", "Today is .*", "--volatile-line", "Run [0-9]+"]
    with serving("--model", "witness", *kept) as server, server.client() as http:
        system = "x-anthropic-billing-header: cch=1;\nBe brief.\nRun 7\nStay.\nToday is Monday\nRun 12"
        body = {"max_tokens": 1, "messages": [{"role": "system", "content": system}, HI]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.headers["x-tenuto-volatile-lines"] == "2"
        body["messages"] = [{"role": "system", "content": system.rpartition("\nToday")[0]}, HI]
        other = http.post("/v1/chat/completions", json=body)
        assert "x-tenuto-volatile-lines" not in other.headers
        assert answer.json()["usage"]["prompt_tokens"] == other.json()["usage"]["prompt_tokens"]


def test_runs_can_be_switched_off() -> None:
    with serving("--model", "witness", "--no-find-runs") as server:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": [HI], "user": "a", "max_tokens": 1}, timeout=60
        )
        assert answer.status_code == 200
        assert "x-tenuto-session" not in answer.headers


def test_the_answer_says_why_a_sessions_state_was_lost(client: OpenAI, witness: Server) -> None:
    name: Any = {"user": "lost"}
    first, one = ask(client, [HI], **name)
    with witness.client() as http:
        assert http.post("/flush_cache").status_code == 200
    headers, two = ask(client, [HI, said(one), MORE], **name)
    assert headers["x-tenuto-session"] == first["x-tenuto-session"]
    assert headers["x-tenuto-recomputed"]
    assert int(headers["x-tenuto-cached"]) == cached(two) == 0
