"""Conversations, stored chats and batches work through any replica of a fleet, and outlive those that made them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.eventually import eventually
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.test_background import WITHOUT_END, ended
from tests.serve.test_batches import HI, PARAMS, create, results
from tests.serve.test_batches import client_of as anthropic_of
from tests.serve.test_batches import ended as batch_ended
from tests.serve.test_conversations import said, user

ASKED: Any = {"model": "witness", "input": "more", "temperature": 0, "max_output_tokens": 5, "extra_body": WITHOUT_END}
BACKGROUND: Any = {**ASKED, "background": True, "max_output_tokens": 300}


@pytest.fixture(scope="module")
def lasting() -> Iterator[Replicas]:
    """Replicas that no test ends."""
    with replicas(database(), 2, "--model", "witness", "--context-length", "4096", lease=4) as servers:
        yield servers


@pytest.fixture
def mortal() -> Iterator[Replicas]:
    options = ("--model", "witness:0.01", "--context-length", "8192", "--drain-seconds", "60")
    with replicas(database(), 3, *options) as servers:
        yield servers


def clients(fleet: Replicas, closing: ExitStack) -> list[OpenAI]:
    """Returns a client of each replica, which waits as long as others may need to take over."""
    made = [OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) for server in fleet.servers]
    return [closing.enter_context(each) for each in made]


def anthropics(fleet: Replicas, closing: ExitStack) -> list[Anthropic]:
    return [closing.enter_context(anthropic_of(server)) for server in fleet.servers]


def test_a_conversation_is_opened_read_changed_and_deleted_through_any_replica(lasting: Replicas) -> None:
    with ExitStack() as closing:
        one, two = clients(lasting, closing)
        name = one.conversations.create(items=[user("a")], metadata={"topic": "x"}).id
        assert two.conversations.retrieve(name) == one.conversations.retrieve(name)
        assert two.conversations.update(name, metadata={"topic": "y"}).metadata == {"topic": "y"}
        assert one.conversations.retrieve(name).metadata == {"topic": "y"}
        two.conversations.items.create(name, items=[user(str(number)) for number in range(20)])
        assert said(one, name, limit=7) == [("user", "a"), *(("user", str(number)) for number in range(20))]
        last: Any = one.conversations.items.list(name, limit=1).data[0]
        assert two.conversations.items.retrieve(last.id, conversation_id=name) == last
        two.conversations.items.delete(last.id, conversation_id=name)
        with pytest.raises(openai.NotFoundError, match="no item"):
            one.conversations.items.retrieve(last.id, conversation_id=name)
        assert one.conversations.delete(name).deleted
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            two.conversations.retrieve(name)


def test_responses_of_different_replicas_take_turns_in_a_conversation(lasting: Replicas) -> None:
    with ExitStack() as closing:
        one, two = clients(lasting, closing)
        name = one.conversations.create(items=[user("one two")]).id
        first = one.responses.create(**ASKED, conversation=name)
        second = list(two.responses.create(**ASKED, conversation=name, stream=True))[-1].response
        third = one.responses.create(**ASKED, conversation=name, store=False)
        expected = [("user", "one two")]
        for response in (first, second, third):
            expected += [("user", "more"), ("assistant", response.output_text)]
        assert said(two, name, limit=100) == expected
        items = [{"type": "message", "role": role, "content": text} for role, text in expected[:-2]]
        alone = two.responses.create(**{**ASKED, "input": [*items, user("more")]})
        assert alone.output_text == third.output_text


def test_only_one_response_in_a_fleet_continues_a_conversation(lasting: Replicas) -> None:
    with ExitStack() as closing:
        one, two = clients(lasting, closing)
        name = one.conversations.create().id
        with one.responses.create(**{**ASKED, "max_output_tokens": 3000}, conversation=name, stream=True) as stream:
            next(iter(stream))
            for client in (one, two):
                with pytest.raises(openai.ConflictError, match="not complete"):
                    client.responses.create(**ASKED, conversation=name)
                with pytest.raises(openai.ConflictError, match="not complete"):
                    client.conversations.items.create(name, items=[user("b")])

        def is_free() -> bool:  # once the replica has noticed that its client is gone
            try:
                two.conversations.items.create(name, items=[user("b")])
            except openai.ConflictError:
                return False
            return True

        eventually(is_free)
        assert said(one, name) == [("user", "b")]


def test_a_stored_chat_is_read_listed_described_and_deleted_through_any_replica(lasting: Replicas) -> None:
    with ExitStack() as closing:
        one, two = clients(lasting, closing)
        asked: Any = {"model": "witness", "messages": [user_message("hi")], "max_tokens": 4, "store": True}
        made = [one.chat.completions.create(**asked, metadata={"n": "1"}), two.chat.completions.create(**asked)]
        for client in (one, two):
            ids = [chat.id for chat in client.chat.completions.list(limit=100)]
            assert [each for each in ids if each in {chat.id for chat in made}] == [chat.id for chat in made]
            assert client.chat.completions.retrieve(made[0].id).choices == made[0].choices
            (message,) = client.chat.completions.messages.list(made[0].id).data
            assert message.content == "hi"
        two.chat.completions.update(made[0].id, metadata={"n": "2"})
        assert [chat.id for chat in one.chat.completions.list(metadata={"n": "2"})] == [made[0].id]
        assert two.chat.completions.delete(made[0].id).deleted
        with pytest.raises(openai.NotFoundError, match="no stored chat"):
            one.chat.completions.retrieve(made[0].id)


def user_message(text: str) -> Any:
    return {"role": "user", "content": text}


def test_a_batch_is_read_listed_cancelled_and_deleted_through_any_replica(mortal: Replicas) -> None:
    long: Any = {"model": "witness", "max_tokens": 3000, "messages": HI}
    with ExitStack() as closing:
        one, two, _ = anthropics(mortal, closing)
        batch = create(one, {**long, "max_tokens": 4}, *[long] * 20)
        assert two.messages.batches.retrieve(batch.id).processing_status == "in_progress"
        assert [each.id for each in two.messages.batches.list()] == [batch.id]
        assert two.messages.batches.cancel(batch.id).cancel_initiated_at is not None
        done = batch_ended(two, batch)
        counts = Counter(result.type for result in results(one, done).values())
        assert counts["canceled"] >= 4
        assert counts["canceled"] + counts["succeeded"] == 21
        assert two.messages.batches.delete(batch.id).type == "message_batch_deleted"
        assert list(one.messages.batches.list()) == []


def test_a_batch_continues_threads_of_other_replicas_with_their_tools(lasting: Replicas) -> None:
    tools: Any = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
    with ExitStack() as closing:
        one, two = anthropics(lasting, closing)
        opened = one.messages.create(**PARAMS, tools=tools, extra_body={"thread": {"type": "create"}})
        batch = create(two, {**PARAMS, "thread": {"type": "continue", "previous_message_id": opened.id}})
        assert batch_ended(one, batch).request_counts.succeeded == 1
        (result,) = json_results(lasting, batch)
        again = one.messages.create(
            **PARAMS, extra_body={"thread": {"type": "continue", "previous_message_id": result["message"]["id"]}}
        )
        assert again.usage.output_tokens == 4


def json_results(fleet: Replicas, batch: Any) -> list[dict[str, Any]]:
    with fleet.servers[0].client() as http:
        lines = http.get(f"/v1/messages/batches/{batch.id}/results").text.splitlines()
    return [json.loads(line)["result"] for line in lines]


@pytest.mark.parametrize("in_order", [True, False], ids=["ends", "is killed"])
def test_a_batch_goes_on_when_its_replica(mortal: Replicas, in_order: bool) -> None:
    params: Any = {"model": "witness", "max_tokens": 100, "messages": HI, "temperature": 0}
    with ExitStack() as closing:
        one, two, three = anthropics(mortal, closing)
        batch = create(one, *[params] * 60)
        if in_order:
            assert mortal.servers[0].stop() == 0
        else:
            mortal.servers[0].kill_all()
        assert batch_ended(two, batch).request_counts.succeeded == 60
        found = results(three, batch)
        assert set(found) == {f"r{number}" for number in range(60)}
        (text,) = {result.message.content[0].text for result in found.values()}
        alone: Any = two.messages.create(**{**PARAMS, "max_tokens": 100}, extra_body={"temperature": 0})
        assert text == alone.content[0].text


def test_what_is_kept_outlives_the_fleet(mortal: Replicas) -> None:
    with ExitStack() as closing:
        one, *_ = clients(mortal, closing)
        name = one.conversations.create(items=[user("a")]).id
        chat: Any = one.chat.completions.create(
            model="witness", messages=[user_message("hi")], max_tokens=4, store=True, temperature=0
        )
        mortal.kill_all()
        mortal.restart(0)
        (again,) = clients(mortal, closing)[:1]
        assert said(again, name) == [("user", "a")]
        assert again.chat.completions.retrieve(chat.id).choices == chat.choices


def test_a_response_in_the_background_is_added_to_its_conversation_although_its_replica_was_killed(
    mortal: Replicas,
) -> None:
    with ExitStack() as closing:
        one, two, three = clients(mortal, closing)
        name = one.conversations.create(items=[user("a")]).id
        begun = one.responses.create(**BACKGROUND, conversation=name)
        mortal.servers[0].kill_all()
        done = ended(two, begun.id)
        expected = [("user", "a"), ("user", "more"), ("assistant", done.output_text)]
        assert said(three, name) == expected
        more = three.responses.create(**ASKED, conversation=name)
        assert said(two, name) == [*expected, ("user", "more"), ("assistant", more.output_text)]


def test_a_conversation_is_free_again_once_the_replica_of_a_response_without_store_is_gone(mortal: Replicas) -> None:
    with ExitStack() as closing:
        one, two, _ = clients(mortal, closing)
        name = one.conversations.create(items=[user("a")]).id
        asked = {**ASKED, "max_output_tokens": 3000}
        with one.responses.create(**asked, conversation=name, store=False, stream=True) as stream:
            next(iter(stream))
            mortal.servers[0].kill_all()
        eventually(lambda: is_free(two, name))
        assert said(two, name) == [("user", "a"), ("user", "b")]


def is_free(client: OpenAI, name: str) -> bool:
    """Adds an item, unless a response in the conversation is not complete."""
    try:
        client.conversations.items.create(name, items=[user("b")])
    except openai.ConflictError:
        return False
    return True
