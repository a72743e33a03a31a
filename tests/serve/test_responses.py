"""OpenAI's Responses, used by OpenAI's own client: every stored response can be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tenuto.base.views import ModelView
from tenuto.base.wire.link import Link
from tenuto.serve.openai.kept_responses import KeptResponses
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.kept import MAX_BYTES, MAX_KEPT
from tenuto.serve.shared.settings import ServeSettings
from tests.eventually import eventually
from tests.serve.server import Server, serving

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "description": "x", "parameters": SCHEMA, "strict": True}
NAMED: Any = {"type": "function", "name": "weather"}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, given: Any = "hi", **options: Any) -> Any:
    return client.responses.create(model="witness", input=given, **{"max_output_tokens": 200, **options})


def test_input_is_answered(client: OpenAI) -> None:
    response = ask(client, max_output_tokens=9, metadata={"a": "b"})
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[0].type, response.usage.output_tokens, response.metadata) == ("message", 9, {"a": "b"})
    assert client.responses.retrieve(response.id).output_text == response.output_text


def test_a_stream_has_the_text_of_the_whole_response(client: OpenAI) -> None:
    options: dict[str, Any] = {"max_output_tokens": 20, "temperature": 0}
    whole = ask(client, **options)
    events = list(ask(client, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.incomplete",
    ]
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text == events[-1].response.output_text
    with client.responses.stream(model="witness", input="hi", text_format=Pet) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Pet)


def test_continuing_a_response_computes_only_the_new_tokens(client: OpenAI) -> None:
    first = ask(client, "a question of some length, to begin with", max_output_tokens=16, instructions="Be brief.")
    before = first.usage.input_tokens + first.usage.output_tokens
    branches = [
        ask(client, text, previous_response_id=first.id, max_output_tokens=8, instructions="Be brief.")
        for text in ("and?", "or?", "and?")
    ]
    for branch in branches:
        assert branch.usage.input_tokens_details.cached_tokens >= before - 1
        assert branch.usage.input_tokens - before < 40
        assert branch.previous_response_id == first.id
    longer = ask(client, "more", previous_response_id=branches[1].id, max_output_tokens=8)
    assert longer.usage.input_tokens > branches[1].usage.input_tokens


@pytest.mark.parametrize("instructions", [None, "Be long."])
def test_instructions_are_those_of_the_request_alone(client: OpenAI, instructions: str | None) -> None:
    told: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0}
    first = ask(client, "a question", instructions="Be brief.", **told)
    given = told if instructions is None else {**told, "instructions": instructions}
    second = ask(client, "and?", previous_response_id=first.id, **given)
    whole: list[Any] = [
        {"role": "user", "content": "a question"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": "and?"},
    ]
    alone = ask(client, whole, store=False, **given)
    assert (second.output_text, second.usage.input_tokens) == (alone.output_text, alone.usage.input_tokens)
    counted = client.responses.input_tokens.count(
        model="witness", input="and?", previous_response_id=first.id, instructions=instructions or openai.omit
    )
    assert counted.input_tokens == second.usage.input_tokens
    third = ask(client, "or?", previous_response_id=second.id, **given)
    before = second.usage.input_tokens + second.usage.output_tokens
    assert third.usage.input_tokens_details.cached_tokens >= before - 1


def test_calls_and_results_alternate(client: OpenAI) -> None:
    tools: dict[str, Any] = {"tools": [WEATHER], "tool_choice": NAMED}
    first = ask(client, "Rome?", **tools)
    (call,) = first.output
    assert (call.type, call.name, set(json.loads(call.arguments))) == ("function_call", "weather", {"city"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    second = ask(client, [result], previous_response_id=first.id, tools=[WEATHER], max_output_tokens=8)
    assert second.usage.input_tokens_details.cached_tokens > 0
    stateless = ask(
        client,
        [{"role": "user", "content": "Rome?"}, call.model_dump(exclude_none=True), result],
        tools=[WEATHER],
        max_output_tokens=8,
        store=False,
    )
    assert stateless.usage.input_tokens > 0
    events = list(ask(client, "Rome?", stream=True, **tools))
    assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == next(
        e.arguments for e in events if e.type == "response.function_call_arguments.done"
    )


@pytest.mark.parametrize("store", [True, False])
def test_a_response_may_continue_with_other_tools(client: OpenAI, witness_server: Server, store: bool) -> None:
    handoff = {**WEATHER, "name": "handoff"}
    first = ask(client, "Rome?", tools=[WEATHER], tool_choice=NAMED, instructions="Be brief.")
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    second = ask(client, [result], previous_response_id=first.id, tools=[WEATHER], max_output_tokens=8)
    other: dict[str, Any] = {
        "instructions": "Be long.",
        "tools": [WEATHER, handoff],
        "max_output_tokens": 8,
        "temperature": 0,
    }
    changed = ask(client, "And Oslo?", previous_response_id=second.id, store=store, **other)
    assert changed.previous_response_id == second.id
    whole: list[Any] = [{"role": "user", "content": "Rome?"}]
    whole += [
        call.model_dump(exclude_none=True),
        result,
        *(item.model_dump(exclude_none=True) for item in second.output),
    ]
    whole += [{"role": "user", "content": "And Oslo?"}]
    expected = ask(client, whole, store=False, **other)
    assert changed.usage.input_tokens == expected.usage.input_tokens
    assert changed.output_text == expected.output_text
    if store:
        later = ask(client, "And Bonn?", previous_response_id=changed.id, **other)
        assert later.usage.input_tokens_details.cached_tokens >= changed.usage.total_tokens - 1
    witness_server.audit()


def test_other_tools_are_refused_where_the_conversation_is_not_kept(client: OpenAI) -> None:
    first = ask(client, "Rome?", tools=[WEATHER], max_output_tokens=4)
    second = ask(client, "more", previous_response_id=first.id, max_output_tokens=4, store=False)
    assert second.status
    branch = ask(client, "more", previous_response_id=first.id, max_output_tokens=4)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "Oslo?", previous_response_id=branch.id, tools=[{**WEATHER, "name": "other"}])
    assert refused.value.param == "tools"


def test_openais_client_parses_its_requested_schema(client: OpenAI) -> None:
    parsed = client.responses.parse(model="witness", input="hi", text_format=Pet)
    assert isinstance(parsed.output_parsed, Pet)


@pytest.mark.parametrize(
    "metadata",
    [{f"k{n}": "v" for n in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}],
    ids=["entries", "key", "value"],
)
def test_metadata_is_limited_as_openais_is(client: OpenAI, metadata: dict[str, str]) -> None:
    with pytest.raises(openai.BadRequestError, match=r"metadata.*should have at most (16|64|512)"):
        ask(client, metadata=metadata)


def test_a_tenants_responses_are_evicted_oldest_first_by_number_and_size() -> None:
    edge = Edge(cast("Link", None), cast("ModelView", SimpleNamespace(model="m", adapters=())), ServeSettings())
    kept, others = edge.part(KeptResponses, tenant="tenant"), edge.part(KeptResponses, tenant="other")
    others.keep("first", b"{}")
    for number in range(MAX_KEPT + 2):
        kept.keep(f"r{number}", b"{}")
    assert [kept.find(f"r{number}") for number in range(3)] == [None, None, b"{}"]
    kept.keep("large", b" " * (MAX_BYTES - 10))
    assert [kept.find(f"r{number}") for number in range(MAX_KEPT - 4, MAX_KEPT + 2)] == [None] + [b"{}"] * 5
    kept.forget("large")
    kept.keep("larger", b" " * (MAX_BYTES - 8))
    kept.keep("too large", b" " * (MAX_BYTES + 1))
    assert kept.find("larger") is not None
    assert kept.find("too large") is None
    assert others.find("first") == b"{}"
    assert kept.find("first") is None


def test_deleted_and_unstored_responses_are_not_found(client: OpenAI, witness: Server) -> None:
    kept, lost = ask(client, max_output_tokens=3), ask(client, max_output_tokens=3, store=False)
    client.responses.delete(kept.id)
    for response in (kept, lost):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError) as refused:
            ask(client, previous_response_id=response.id)
        assert refused.value.param == "previous_response_id"


def test_an_unstored_response_that_continues_another_is_not_found(client: OpenAI) -> None:
    first = ask(client, max_output_tokens=3)
    lost = ask(client, "more", previous_response_id=first.id, max_output_tokens=3, store=False)

    def not_found() -> bool:
        try:
            ask(client, "and", previous_response_id=lost.id, max_output_tokens=3, store=False)
        except openai.NotFoundError:
            return True
        return False

    eventually(not_found)  # it is closed just after it is answered


def test_a_refused_response_leaves_no_session(client: OpenAI, witness: Server) -> None:
    def sessions() -> set[str]:
        return {each["id"] for each in httpx.get(f"{witness.url}/v1/sessions", timeout=60).json()["data"]}

    before = sessions()
    with pytest.raises(openai.BadRequestError):
        ask(client, "x" * 100_000)
    eventually(lambda: sessions() == before)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "a b"}, "previous_response_id"),
    ],
    ids=str,
)
def test_an_impossible_request_is_refused_by_its_field(witness: Server, options: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{witness.url}/v1/responses", json={"model": "witness", "input": "hi", **options}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_response_can_be_continued_after_a_restart_with_a_journal(tmp_path: Path) -> None:
    arguments = ("--model", "witness", "--context-length", "1024", "--journal", str(tmp_path / "journal"))
    told: dict[str, Any] = {"instructions": "Be brief.", "max_output_tokens": 5, "temperature": 0}
    with serving(*arguments) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        first = ask(client, **told)
        before = ask(client, "more", previous_response_id=first.id, **told)
        changed = ask(client, "more", previous_response_id=first.id, **{**told, "instructions": "Be long."})
        known = [
            ask(client, "more", previous_response_id=changed.id, **{**told, "instructions": f"Be {size}."})
            for size in ("brief", "long")
        ]
    with serving(*arguments) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        again = ask(client, "more", previous_response_id=first.id, **told)
        assert (again.output_text, again.usage.input_tokens) == (before.output_text, before.usage.input_tokens)
        other = ask(client, "more", previous_response_id=first.id, **{**told, "instructions": "Be long."})
        assert other.usage.input_tokens > again.usage.input_tokens
        other, same = (
            ask(client, "more", previous_response_id=changed.id, **{**told, "instructions": f"Be {size}."})
            for size in ("brief", "long")
        )
        assert same.usage.input_tokens == known[1].usage.input_tokens
        assert other.usage.input_tokens > known[0].usage.input_tokens  # the earlier ones stay: the items are lost
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        server.audit()
