"""Anthropic's `compact_20260112`, used by Anthropic's own client: a summary takes the place of earlier messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, BadRequestError

from tests.serve.server import Server, serving
from tests.serve.test_context_edits import LONG, READ, conversation

BETA = "compact-2026-01-12"
INTRODUCTION = "The conversation before this was summarized:"


@pytest.fixture(scope="module")
def witness() -> Iterator[Server]:
    """A server whose context has room for summaries, which the witness makes long."""
    with serving("--model", "witness", "--context-length", "16384") as server:
        yield server
        server.audit()


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=witness.url, api_key="none", max_retries=0) as client:
        yield client


def compact(trigger: int = 200, **more: Any) -> dict[str, Any]:
    return {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": trigger}, **more}]}


def ask(client: Anthropic, messages: list[Any], management: Any = None, **more: Any) -> Any:
    given = {"model": "witness", "max_tokens": 4, "messages": messages, "tools": [READ], **more}
    if management is not None:
        given["context_management"] = management
    return client.beta.messages.create(**given, betas=[BETA], extra_body={"temperature": 0.0})


def tokens(client: Anthropic, messages: list[Any]) -> int:
    return client.beta.messages.count_tokens(
        model="witness", messages=messages, tools=[READ], betas=[BETA]
    ).input_tokens


def test_long_messages_are_replaced_by_a_summary_and_the_answer_follows(client: Anthropic) -> None:
    messages = conversation(LONG)
    short = ask(client, messages, compact(10**6))
    assert [block.type for block in short.content] == ["text"]
    assert short.usage.iterations is None
    answer = ask(client, messages, compact())
    assert [block.type for block in answer.content] == ["compaction", "text"]
    assert answer.stop_reason == "max_tokens"
    assert answer.context_management.applied_edits == []
    block = answer.content[0]
    assert block.content
    assert [each.type for each in answer.usage.iterations] == ["compaction", "message"]
    spent, told = answer.usage.iterations
    assert spent.input_tokens + spent.cache_read_input_tokens + spent.cache_creation_input_tokens > 300
    assert told.output_tokens == answer.usage.output_tokens == 4
    alone = [{"role": "user", "content": f"{INTRODUCTION}\n\n{block.content}"}]
    used = answer.usage
    prompt = used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens
    assert prompt == tokens(client, alone)
    assert ask(client, alone).content[0].text == answer.content[1].text


def test_a_later_prompt_begins_with_the_summary_and_computes_only_what_is_new(
    client: Anthropic, http: httpx.Client
) -> None:
    messages = conversation(LONG)
    run: Any = {"metadata": {"user_id": "compacted run"}}
    answer = ask(client, messages, compact(), **run)
    said = [block.model_dump(exclude_none=True) for block in answer.content]
    later = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
    first = {"role": "user", "content": f"{INTRODUCTION}\n\n{answer.content[0].content}"}
    replaced = [first, {"role": "assistant", "content": answer.content[1].text}, later[-1]]
    assert tokens(client, later) == tokens(client, replaced)
    body = {"model": "witness", "max_tokens": 4, "messages": later, "tools": [READ], **run}
    again = http.post("/v1/messages", json=body).raise_for_status()
    assert "x-tenuto-recomputed" not in again.headers
    used = answer.usage
    before = used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens
    assert int(again.headers["x-tenuto-cached"]) >= before + used.output_tokens - 1


def test_a_stream_begins_with_the_summary(client: Anthropic) -> None:
    messages = conversation(LONG)
    whole = ask(client, messages, compact())
    with client.beta.messages.stream(
        model="witness",
        max_tokens=4,
        messages=messages,
        tools=[READ],
        extra_body={"temperature": 0.0},
        context_management=compact(),
        betas=[BETA],
    ) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_message()
    assert "compaction" in kinds
    assert [block.type for block in answer.content] == ["compaction", "text"]
    assert [block.to_dict() for block in answer.content] == [block.to_dict() for block in whole.content]
    assert answer.usage.iterations is not None
    assert len(answer.usage.iterations) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_may_pause_after_the_summary(client: Anthropic, *, streams: bool) -> None:
    messages = conversation(LONG)
    management = compact(pause_after_compaction=True, instructions="Sum up.")
    if streams:
        with client.beta.messages.stream(
            model="witness",
            max_tokens=4,
            messages=messages,
            tools=[READ],
            context_management=management,
            betas=[BETA],
        ) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = ask(client, messages, management)
    assert answer.stop_reason == "compaction"
    assert [block.type for block in answer.content] == ["compaction"]
    assert [each.type for each in answer.usage.iterations] == ["compaction"]
    assert answer.usage.output_tokens == 0
    said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}
    later = [*messages, said, {"role": "user", "content": "And now?"}]
    merged = [{"role": "user", "content": f"{INTRODUCTION}\n\n{answer.content[0].content}\nAnd now?"}]
    assert tokens(client, later) == tokens(client, merged)
    assert ask(client, later, compact(10**6)).content[0].type == "text"


def test_a_failed_compaction_has_no_effect(client: Anthropic) -> None:
    messages = conversation(LONG)
    failed = {
        "role": "assistant",
        "content": [{"type": "compaction", "content": None}, {"type": "text", "text": "So."}],
    }
    plain = {"role": "assistant", "content": "So."}
    later = {"role": "user", "content": "And now?"}
    assert tokens(client, [*messages, failed, later]) == tokens(client, [*messages, plain, later])


def test_a_summary_is_asked_for_with_the_given_words(client: Anthropic) -> None:
    messages = conversation(LONG)
    one, other = (ask(client, messages, compact(instructions=each)) for each in ("Sum up.", "Sum up briefly."))
    assert one.content[0].content != other.content[0].content


def test_messages_that_do_not_fit_cannot_be_compacted(client: Anthropic) -> None:
    with pytest.raises(BadRequestError, match="prompt is too long"):
        ask(client, conversation(["x" * 3000] * 99), compact())
