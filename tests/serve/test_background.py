"""Responses in the background, their events, and the input items of responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.eventually import eventually
from tests.serve.server import Server

CLOCK: Any = {"type": "function", "name": "clock"}


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with client_of(witness) as client:
        yield client


@pytest.fixture(scope="module")
def slow(slow_witness: Server) -> Iterator[OpenAI]:
    with client_of(slow_witness) as client:
        yield client


WITHOUT_END = {"ignore_eos": True}
"""Options of an answer that ends only when it has all the tokens it may have."""


def ask(client: OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": "default", "input": "hi", "max_output_tokens": 20, **options})


def ended(client: OpenAI, name: str) -> Any:
    """Returns a response once it has ended."""
    eventually(lambda: client.responses.retrieve(name).status not in ("queued", "in_progress"))
    return client.responses.retrieve(name)


def test_a_response_in_the_background_is_read_later_and_continued(client: OpenAI) -> None:
    begun = ask(client, background=True, temperature=0)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    done = ended(client, begun.id)
    assert (done.status, done.output_text) == ("incomplete", ask(client, temperature=0).output_text)
    more = ask(client, previous_response_id=begun.id, input="and?", max_output_tokens=1)
    assert more.usage.input_tokens_details.cached_tokens >= done.usage.input_tokens


def test_the_events_of_a_response_are_streamed_again(client: OpenAI) -> None:
    for options in ({}, {"background": True}, {"tools": [CLOCK], "tool_choice": "required"}):
        events = [event.to_dict() for event in ask(client, stream=True, **options)]
        name: Any = events[0]["response"]
        again = client.responses.retrieve(name["id"], stream=True)
        assert [event.to_dict() for event in again] == events
        later = client.responses.retrieve(name["id"], stream=True, starting_after=3)
        assert [event.to_dict() for event in later] == events[4:]
        assert list(client.responses.retrieve(name["id"], stream=True, starting_after=1000)) == []


def test_a_client_that_leaves_a_stream_returns_to_it(slow: OpenAI) -> None:
    with ask(slow, stream=True, background=True, max_output_tokens=100, extra_body=WITHOUT_END) as stream:
        first = [next(stream).to_dict() for _ in range(8)]
    name = first[0]["response"]["id"]
    rest = [event.to_dict() for event in slow.responses.retrieve(name, stream=True, starting_after=7)]
    assert [event["sequence_number"] for event in first + rest] == list(range(len(first) + len(rest)))
    done = rest[-1]["response"]
    said = "".join(event["delta"] for event in first + rest if event["type"] == "response.output_text.delta")
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("incomplete", said)
    assert slow.responses.retrieve(name).to_dict() == done


def test_a_response_in_the_background_is_cancelled(slow: OpenAI) -> None:
    name = slow.conversations.create().id
    options: dict[str, Any] = {"background": True, "max_output_tokens": 3000, "extra_body": WITHOUT_END}
    begun = ask(slow, conversation=name, **options)
    with pytest.raises(openai.ConflictError, match="not complete"):
        ask(slow, previous_response_id=begun.id)
    cancelled = slow.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.error) == ("cancelled", None)
    assert slow.responses.cancel(begun.id) == slow.responses.retrieve(begun.id) == cancelled
    *_, last = slow.responses.retrieve(begun.id, stream=True)
    assert last.type == "response.failed"
    assert list(slow.conversations.items.list(name)) == []
    assert ask(slow, conversation=name, max_output_tokens=1).status == "incomplete"
    with pytest.raises(openai.NotFoundError):  # its session is closed soon after it
        eventually(lambda: not ask(slow, previous_response_id=begun.id, max_output_tokens=1))


def test_a_response_that_is_deleted_while_it_is_written_stays_deleted(slow: OpenAI) -> None:
    begun = ask(slow, background=True, max_output_tokens=3000, extra_body=WITHOUT_END)
    slow.responses.delete(begun.id)
    for _ in range(3):
        with pytest.raises(openai.NotFoundError):
            slow.responses.retrieve(begun.id)


def test_a_response_that_failed_says_why(client: OpenAI) -> None:
    begun = ask(client, background=True, max_output_tokens=4000, extra_body={"timeout": 0.05, "ignore_eos": True})
    failed = ended(client, begun.id)
    assert (failed.status, failed.error.code) == ("failed", "deadline_passed")


def test_only_responses_in_the_background_are_cancelled(client: OpenAI) -> None:
    response = ask(client, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_x")
    with pytest.raises(openai.BadRequestError, match="starting_after without stream"):
        client.responses.retrieve(response.id, starting_after=1)


def test_the_input_items_of_a_response_are_listed_in_pages(client: OpenAI) -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    sent: list[Any] = [{"role": "user", "content": f"{number}"} for number in range(25)]
    response = ask(client, input=[*sent, call, result], max_output_tokens=1)
    items: list[Any] = list(client.responses.input_items.list(response.id, order="asc"))
    assert [item.content[0].text for item in items[:25]] == [f"{number}" for number in range(25)]
    assert [item.type for item in items[25:]] == ["function_call", "function_call_output"]
    newest = client.responses.input_items.list(response.id, limit=1)
    assert (newest.data, newest.has_more) == ([items[-1]], True)
    text = ask(client, max_output_tokens=1, instructions="Be brief.")
    (only,) = client.responses.input_items.list(text.id)
    assert (only.type, only.to_dict()["role"]) == ("message", "user")
    with pytest.raises(openai.NotFoundError):
        list(client.responses.input_items.list("resp_x"))
