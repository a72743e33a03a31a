"""Anthropic's batches of messages, used by Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from tenuto.base.errors import IllegalTransition, LimitReached, NotFound
from tenuto.serve.anthropic import batch as batch_of
from tenuto.serve.anthropic import batches as batches_of
from tenuto.serve.anthropic.batches import Batches
from tenuto.serve.shared.local_objects import LocalObjects
from tenuto.serve.shared.tenant_objects import TenantObjects
from tests.eventually import eventually
from tests.serve.server import Server, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMS: Any = {"model": "witness", "max_tokens": 4, "messages": HI}


def client_of(server: Server, key: str = "none") -> Anthropic:
    return Anthropic(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[Anthropic]:
    with client_of(witness) as client:
        yield client


def create(client: Anthropic, *params: Any) -> Any:
    requests: Any = [{"custom_id": f"r{number}", "params": each} for number, each in enumerate(params)]
    return client.messages.batches.create(requests=requests)


def ended(client: Anthropic, batch: Any) -> Any:
    """Waits for the end of a batch and returns it."""
    eventually(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    return client.messages.batches.retrieve(batch.id)


def results(client: Anthropic, batch: Any) -> dict[str, Any]:
    return {line.custom_id: line.result for line in client.messages.batches.results(batch.id)}


def test_requests_of_a_batch_are_answered_each_with_its_own_result(client: Anthropic) -> None:
    still = {**PARAMS, "temperature": 0}
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}]
    wrong = [{**PARAMS, "max_tokens": 0}, {**PARAMS, "model": "other"}, {**PARAMS, "stream": True}]
    calling = {**still, "max_tokens": 200, "tools": tools, "tool_choice": {"type": "any"}}
    begun = create(client, still, calling, *wrong)
    assert begun.request_counts.processing + begun.request_counts.succeeded + begun.request_counts.errored == 5
    done = ended(client, begun)
    counts = done.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 2, 3, 0, 0)
    assert done.created_at < done.ended_at < done.expires_at == done.created_at + timedelta(hours=24)
    found = results(client, done)
    assert found["r0"].message.content == client.messages.create(**PARAMS, extra_body={"temperature": 0}).content
    assert found["r1"].message.stop_reason == "tool_use"
    for name, kind, field in (
        ("r2", "invalid_request_error", "max_tokens"),
        ("r3", "not_found_error", "model"),
        ("r4", "invalid_request_error", "stream"),
    ):
        assert (found[name].type, found[name].error.error.type) == ("errored", kind)
        assert field in found[name].error.error.message


def test_many_requests_are_answered_while_others_wait(client: Anthropic) -> None:
    batch = create(client, *[PARAMS] * 100)
    assert client.messages.create(**PARAMS).usage.output_tokens == 4
    found = results(client, ended(client, batch))
    assert Counter(result.type for result in found.values()) == {"succeeded": 100}
    assert set(found) == {f"r{number}" for number in range(100)}


def test_a_cancelled_batch_ends_with_the_results_it_has(slow_witness: Server) -> None:
    with client_of(slow_witness) as client:
        batch = create(client, PARAMS, *[{**PARAMS, "max_tokens": 3000}] * 40)
        with pytest.raises(anthropic.ConflictError, match="in progress"):
            client.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.AnthropicError, match="in_progress"):
            client.messages.batches.results(batch.id)
        read = httpx.get(f"{slow_witness.url}/v1/messages/batches/{batch.id}/results", timeout=60)
        assert (read.status_code, read.json()["type"]) == (409, "error")
        assert client.messages.batches.cancel(batch.id).cancel_initiated_at is not None
        done = ended(client, batch)
        found = Counter(result.type for result in results(client, done).values())
        assert found["canceled"] >= 20  # some may have ended by themselves
        assert found["canceled"] + found["succeeded"] == 41
        assert client.messages.batches.cancel(batch.id).processing_status == "ended"  # nothing happens


def test_batches_are_listed_newest_first_and_deleted(witness: Server, client: Anthropic) -> None:
    made = [create(client, PARAMS) for _ in range(3)][::-1]
    for batch in made:
        ended(client, batch)
    ids = [batch.id for batch in made]
    assert [batch.id for batch in client.messages.batches.list(limit=2).data] == ids[:2]
    assert [batch.id for batch in client.messages.batches.list(limit=1)][:3] == ids
    assert [batch.id for batch in client.messages.batches.list(before_id=ids[1], limit=1).data] == ids[:1]
    assert client.messages.batches.delete(ids[0]).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError, match="no batch"):
        client.messages.batches.retrieve(ids[0])
    with pytest.raises(anthropic.NotFoundError, match="no entry"):
        client.messages.batches.list(after_id=ids[0])


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([], "requests"),
        ([{"custom_id": "a", "params": PARAMS}] * 2, "requests[1].custom_id"),
        ([{"custom_id": "a b", "params": PARAMS}], "requests[0].custom_id"),
        ([{"custom_id": "a"}], "requests[0].params"),
        ([{"custom_id": "a", "params": 5}], "requests[0].params"),
        (5, "requests"),
    ],
    ids=str,
)
def test_an_impossible_batch_is_refused_by_its_field(http: httpx.Client, requests: Any, named: str) -> None:
    answer = http.post("/v1/messages/batches", json={"requests": requests})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert named in answer.json()["error"]["message"]


def test_text_that_is_not_unicode_is_an_error_of_its_request(http: httpx.Client, client: Anthropic) -> None:
    lone = json.dumps({**PARAMS, "messages": [{"role": "user", "content": "\ud800"}]})
    body = b'{"requests": [{"custom_id": "a", "params": %b}]}' % lone.encode()
    batch = http.post("/v1/messages/batches", content=body, headers={"content-type": "application/json"}).json()
    eventually(lambda: http.get(f"/v1/messages/batches/{batch['id']}").json()["processing_status"] == "ended")
    line = json.loads(http.get(f"/v1/messages/batches/{batch['id']}/results").text)
    assert line["result"]["error"]["error"]["type"] == "invalid_request_error"


def test_a_tenants_batches_leave_places_for_its_other_turns(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    limited = "[[keys]]\ntenant = 'alice'\nkey = 'alice-key'\nlimits = { turns = 2 }\n"
    keys.write_text(f"{limited}[[keys]]\ntenant = 'bob'\nkey = 'bob-key'\n")
    with (
        serving("--model", "witness:0.002", "--context-length", "512", "--keys", str(keys)) as server,
        client_of(server, "alice-key") as alice,
        client_of(server, "bob-key") as bob,
    ):
        batch = create(alice, *[{**PARAMS, "max_tokens": 50}] * 6)
        for _ in range(3):
            assert alice.messages.create(**PARAMS).usage.output_tokens == 4
        with pytest.raises(anthropic.NotFoundError):
            bob.messages.batches.retrieve(batch.id)
        assert bob.messages.batches.list().data == []
        assert ended(alice, batch).request_counts.succeeded == 6


def batch_url(server: Server, batch: Any) -> str:
    return f"{server.url}/v1/messages/batches/{batch.id}/results"


def queued(server: Server) -> float:
    """Returns the number of turns that wait for the running batch."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("tenuto_turns_queued "))


def test_requests_of_clients_that_wait_are_answered_before_those_of_batches() -> None:
    options = ("--model", "witness:0.005", "--context-length", "4096", "--max-running", "1")
    with serving(*options) as server, client_of(server) as client:
        batch = create(client, *[{**PARAMS, "max_tokens": 1000}] * 16)
        eventually(lambda: queued(server) >= 10)
        assert client.messages.create(**PARAMS).usage.output_tokens == 4
        client.messages.batches.cancel(batch.id)
        assert ended(client, batch).request_counts.succeeded < 12  # in order of arrival, it would be 15


def test_requests_that_wait_for_a_place_are_edited_once_and_continue_their_threads(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[[keys]]\ntenant = 'alice'\nkey = 'alice-key'\nlimits = { turns = 1 }\n")
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "long " * 50}
    calling = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    clear = {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 0},
             "trigger": {"type": "input_tokens", "value": 1}}  # fmt: skip
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
    edited = {**PARAMS, "messages": calling, "tools": tools, "context_management": {"edits": [clear]}}
    with (
        serving("--model", "witness:0.005", "--context-length", "2048", "--keys", str(keys)) as server,
        client_of(server, "alice-key") as alice,
    ):
        opened = alice.messages.create(**PARAMS, tools=tools, extra_body={"thread": {"type": "create"}})
        continued = {**PARAMS, "thread": {"type": "continue", "previous_message_id": opened.id}}
        with alice.messages.stream(**{**PARAMS, "max_tokens": 200}) as stream:
            next(iter(stream))  # it has the only place
            batch = create(alice, edited, continued)
            stream.until_done()
        ended(alice, batch)
        lines = httpx.get(batch_url(server, batch), headers={"x-api-key": "alice-key"}, timeout=60).text.splitlines()
        found = {line["custom_id"]: line["result"] for line in map(json.loads, lines)}
        assert found["r0"]["message"]["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 1
        assert found["r1"]["type"] == "succeeded", found["r1"]


# -- bounds


async def answered(_: bytes) -> dict[str, Any]:
    return {"type": "succeeded", "message": "m" * 100}


def batches() -> Batches:
    return Batches(TenantObjects(LocalObjects().ask, "a", Batches.KIND, 0))


async def opened(of: Batches, *requests: tuple[str, bytes]) -> str:
    return (await of.open(batches_of.new_name(), requests)).id


def test_the_oldest_ended_batches_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_of, "MAX_BATCHES", 2)

    async def run() -> None:
        held = batches()
        first, second = await opened(held, ("a", b"{}")), await opened(held, ("a", b"{}"))
        with pytest.raises(LimitReached, match="2 batches"):
            await opened(held, ("a", b"{}"))
        with pytest.raises(IllegalTransition):
            await held.delete(first)
        await held.run(second, answered, 1)
        third = await opened(held, ("a", b"{}"))
        assert [batch.id for batch in await held.newest()] == [third, first]
        with pytest.raises(NotFound):
            await held.find(second)

    asyncio.run(run())


def test_requests_and_results_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_of, "MAX_BYTES", 560)

    async def run() -> None:
        held = batches()
        with pytest.raises(LimitReached, match="561 bytes"):
            await opened(held, ("a", b"x" * 561))
        name = await opened(held, *[(f"r{number}", b"{}") for number in range(5)])
        await held.run(name, answered, 2)
        assert (await held.find(name)).head.counts == {"succeeded": 3, "errored": 2}
        assert b"allowed: 560" in (await held.results(name)).splitlines()[-1]
        await opened(held, ("a", b"x" * 560))  # room is made
        with pytest.raises(NotFound):
            await held.find(name)

    asyncio.run(run())


def test_requests_that_are_not_done_in_time_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_of, "LIFETIME", timedelta(milliseconds=10))

    async def never(_: bytes) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def run() -> None:
        held = batches()
        name = await opened(held, *[(f"r{number}", b"{}") for number in range(5)])
        await held.run(name, never, 2)
        assert (await held.find(name)).head.counts == {"expired": 5}

    asyncio.run(run())
