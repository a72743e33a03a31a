"""OpenAI's conversations, used by OpenAI's own client and agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import agents
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIConversationsSession, OpenAIResponsesModel, Runner
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tenuto.base.errors import LimitReached, NotFound
from tenuto.serve.openai import conversations
from tenuto.serve.shared.local_objects import LocalObjects
from tenuto.serve.shared.tenant_objects import TenantObjects
from tests.serve.server import Server

agents.set_tracing_disabled(disabled=True)  # it would be sent to OpenAI


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def said(client: OpenAI, name: str, **options: Any) -> list[tuple[str, str]]:
    """Returns the roles and texts of a conversation's messages, by default the oldest first."""
    items: Any = client.conversations.items.list(name, **{"order": "asc", **options})
    return [(item.role, item.content[0].text) for item in items]


class Mood(BaseModel):
    good: bool


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def test_a_conversation_is_opened_read_changed_and_deleted(client: OpenAI) -> None:
    opened = client.conversations.create(items=[user("a")], metadata={"topic": "x"})
    assert (opened.object, client.conversations.retrieve(opened.id)) == ("conversation", opened)
    assert client.conversations.update(opened.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert client.conversations.delete(opened.id).deleted
    for ask in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            ask(opened.id)


def test_items_are_listed_in_pages_in_either_order_and_deleted(client: OpenAI) -> None:
    name = client.conversations.create().id
    for start in (0, 20):
        client.conversations.items.create(name, items=[user(str(number)) for number in range(start, start + 20)])
    texts = [text for _, text in said(client, name, limit=7)]  # the client requests one page after another
    assert texts == [str(number) for number in range(40)]
    newest: Any = client.conversations.items.list(name, limit=1).data[0]
    assert newest.content[0].text == "39"
    assert client.conversations.items.retrieve(newest.id, conversation_id=name) == newest
    client.conversations.items.delete(newest.id, conversation_id=name)
    assert said(client, name, order="desc", limit=100)[0] == ("user", "38")
    with pytest.raises(openai.NotFoundError, match="no item"):
        client.conversations.items.delete(newest.id, conversation_id=name)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_a_conversation_and_is_added_to_it(client: OpenAI, stream: bool) -> None:
    name = client.conversations.create(items=[user("one two three")]).id
    options: dict[str, Any] = {"model": "witness", "max_output_tokens": 5, "temperature": 0}
    given: Any = client.responses.create(input="four", conversation=name, stream=stream, **options)
    response = list(given)[-1].response if stream else given
    alone = client.responses.create(input=[user("one two three"), user("four")], **options)
    assert response.output_text == alone.output_text
    assert (response.conversation.id, response.usage.input_tokens) == (name, alone.usage.input_tokens)
    expected = [("user", "one two three"), ("user", "four"), ("assistant", alone.output_text)]
    assert said(client, name) == expected


def test_a_conversation_is_free_again_after_a_refused_response(client: OpenAI) -> None:
    name = client.conversations.create().id
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="witness", input="a" * 9000, conversation=name)
    client.responses.create(model="witness", input="a", conversation=name, max_output_tokens=1)
    assert [role for role, _ in said(client, name)] == ["user", "assistant"]


def test_only_one_response_at_a_time_continues_a_conversation(slow_witness: Server) -> None:
    with OpenAI(base_url=f"{slow_witness.url}/v1", api_key="none", max_retries=0) as client:
        name = client.conversations.create().id
        options: dict[str, Any] = {"model": "witness", "input": "a", "conversation": name}
        with client.responses.create(**options, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.ConflictError, match="not complete"):
                client.responses.create(**options)
            with pytest.raises(openai.ConflictError, match="not complete"):
                client.conversations.items.create(name, items=[user("b")])
        while True:  # until the server has noticed that the stream has no reader
            try:
                client.conversations.items.create(name, items=[user("b")])
                break
            except openai.ConflictError:
                continue
        assert said(client, name) == [("user", "b")]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, "conversation"),
        ({"conversation": 5}, "conversation"),
    ],
)
def test_contradictory_requests_are_refused(client: OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="witness", input="a", **options)
    assert refused.value.param == param


def test_a_tenants_conversations_are_limited_and_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 2)
    monkeypatch.setattr(conversations, "MAX_BYTES", 1000)
    ask = LocalObjects().ask

    def of(tenant: str) -> conversations.Conversations:
        return conversations.Conversations(TenantObjects(ask, tenant, conversations.Conversations.KIND, 0), no_fate)

    async def run() -> None:
        held, others = of("a"), of("b")
        first = await held.open([], {"k": "v" * 500})
        await held.open([], {"k": "v" * 500})
        with pytest.raises(LimitReached, match="conversations exist"):
            await held.open([], {})
        with pytest.raises(LimitReached, match="bytes"):
            await held.go_on(first.id, [], "resp_1")
        await others.open([], {})
        with pytest.raises(NotFound):
            await others.find(first.id)
        assert await of("a").find(first.id) == first
        await held.describe(first.id, {})
        await held.close(first.id)
        await held.open([], {})
        with pytest.raises(LimitReached, match="conversations exist"):
            await held.open([], {})

    asyncio.run(run())


async def no_fate(_: str) -> None:
    return None


def test_openais_agents_keep_their_items_in_a_conversation(witness: Server) -> None:
    async def talk() -> list[str]:
        async with AsyncOpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
            model = OpenAIResponsesModel(model="witness", openai_client=client)
            settings = ModelSettings(temperature=0)
            agent = Agent(name="a", model=model, model_settings=settings, output_type=Mood)  # so that answers end
            session = OpenAIConversationsSession(openai_client=client)
            for question in ("one", "two"):
                await Runner.run(agent, question, session=session)
            assert await session.pop_item() is not None
            items: list[Any] = await session.get_items()
            name = session.session_id
            await Runner.run(agent, "three", conversation_id=name)
            items += (await session.get_items())[len(items) :]
            await session.clear_session()
            return [item["role"] for item in items]

    assert asyncio.run(talk()) == ["user", "assistant", "user", "user", "assistant"]
