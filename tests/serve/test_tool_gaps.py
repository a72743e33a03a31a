"""While a session waits for its tools, calls are sent as soon as they are complete, results are computed as they come,
and the session's next turn is expected."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
from anthropic import Anthropic
from websockets.sync.client import connect

import tenuto
from tenuto.base.errors import IllegalTransition, InvalidRequest, SessionBusy
from tests.eventually import eventually
from tests.serve.server import Server
from tests.serve.test_native_tools import ASKED, FORCED, WEATHER, events

SEVERAL: Any = {**FORCED, "max_new_tokens": 800, "temperature": 1.0}


@pytest.fixture(params=["here", "server"])
def engine(request: pytest.FixtureRequest, witness: Server) -> Iterator[Any]:
    if request.param == "server":
        with tenuto.connect(witness.url) as remote:
            yield remote
    else:
        with tenuto.Engine("witness", context_length=4096) as local:
            yield local


def several_calls(engine: Any) -> tuple[Any, Any, int]:
    """Returns a session whose first turn has made several calls, that turn, and its seed."""
    for seed in range(40):
        session = engine.session()
        turn = session.turn(ASKED, **SEVERAL, seed=seed)
        turn.result()
        if len(turn.tool_calls) > 1:
            return session, turn, seed
        session.close()
    raise AssertionError("no seed makes several calls")


@pytest.fixture(scope="module")
def seed(witness: Server) -> int:
    """A seed with which the first turn makes several calls."""
    with tenuto.connect(witness.url) as engine:
        return several_calls(engine)[2]


# -- calls


def test_calls_are_told_before_the_turn_ends(slow_witness: Server, seed: int) -> None:
    with tenuto.connect(slow_witness.url) as engine, engine.session() as session:
        turn = session.turn(ASKED, **SEVERAL, seed=seed)
        calls = turn.calls()
        first = next(calls)
        assert session.info.turn == "running"
        later = list(calls)
        assert [first, *later] == turn.tool_calls
        assert len(later) > 0


def test_the_asynchronous_client_tells_calls_too(witness: Server, seed: int) -> None:
    async def main() -> None:
        async with tenuto.connect_async(witness.url) as engine:
            session = await engine.session()
            turn = session.turn(ASKED, **SEVERAL, seed=seed)
            assert [call async for call in turn.calls()] == turn.tool_calls
            results = session.results(turn)
            for call in reversed(turn.tool_calls):
                await results.add(call, "4 degrees")
            assert (await session.info()).turn == "drafting"
            await session.turn(results.messages, max_new_tokens=2).result()
            await session.close()

    asyncio.run(main())


def test_streams_have_an_event_for_each_complete_call(witness: Server, seed: int) -> None:
    body = {"input": ASKED, "tools": [WEATHER], "tool_choice": "required", "seed": seed, "temperature": 1.0}
    with witness.client() as http:
        path = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}"
        with http.stream("POST", f"{path}/turns", json={**body, "max_new_tokens": 800}) as stream:
            turn_id, told = stream.headers["x-turn-id"], list(stream.iter_lines())
        again = http.get(f"{path}/turns/{turn_id}/events")
        names = [name for name, _, _ in events(again)]
        assert [line.removeprefix("event: ") for line in told if line.startswith("event: ")] == names
        assert "delta" in names[names.index("call") :], "the first call comes before the turn's end"
        calls = [data for name, _, data in events(again) if name == "call"]
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        assert events(again)[-1][2]["message"]["tool_calls"] == calls
        for at, (name, number, _) in enumerate(events(again)):  # nothing is lost after any event
            if number and name == "delta":
                rest = events(http.get(f"{path}/turns/{turn_id}/events", headers={"last-event-id": number}))
                assert rest == events(again)[at + 1 :]
        http.delete(path)


def running(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("tenuto_turns_running "))


def responses(server: Server, seed: int) -> Iterator[str]:
    """Yields the types of a streamed response's events."""
    function: Any = {"type": "function", "strict": False, **WEATHER}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client,
        client.responses.create(
            model="default",
            input="What is the weather in Rome?",
            tools=[function],
            tool_choice="required",
            max_output_tokens=800,
            stream=True,
            extra_body={"seed": seed},
        ) as stream,
    ):
        yield from (event.type for event in stream)


def messages(server: Server, seed: int) -> Iterator[str]:
    """Yields the types of a streamed message's events."""
    tool: Any = {"name": "weather", "input_schema": WEATHER["parameters"]}
    with (
        Anthropic(base_url=server.url, api_key="-") as client,
        client.messages.stream(
            model="default",
            max_tokens=800,
            messages=[{"role": "user", "content": f"What is the weather in Rome? {seed}"}],
            tools=[tool],
            tool_choice={"type": "any"},
        ) as stream,
    ):
        yield from (event.type for event in stream)


@pytest.mark.parametrize(
    ("events_of", "name"),
    [(responses, "response.function_call_arguments.done"), (messages, "content_block_stop")],
    ids=["responses", "messages"],
)
def test_responses_and_messages_tell_calls_before_the_turn_ends(
    slow_witness: Server, events_of: Callable[[Server, int], Iterator[str]], name: str
) -> None:
    for seed in range(40):
        eventually(lambda: running(slow_witness) == 0)
        told = [running(slow_witness) for kind in events_of(slow_witness, seed) if kind == name]
        if len(told) > 1 and told[0] == 1:  # on a busy machine the client may see it late
            return
    raise AssertionError("no first call of several is told before the turn ends")


# -- results


def test_results_are_computed_as_they_come_in_the_order_of_the_calls(engine: Any) -> None:
    session, turn, seed = several_calls(engine)
    texts = [f"In place {number} it has {number} degrees. " * 5 for number in range(len(turn.tool_calls))]
    results = session.results(turn)
    before = session.info
    last, *others = reversed(list(zip(turn.tool_calls, texts, strict=True)))
    results.add(*last)
    assert session.info == before, "the results before it are missing"
    with pytest.raises(IllegalTransition, match="no result yet"):
        _ = results.messages
    for call, text in others:
        results.add(call.id, text)
    assert session.info.turn == "drafting"
    assert session.info.version == before.version
    eventually(lambda: sum(session.info.memory.values()) > sum(before.memory.values()) + 1)
    used = session.turn(results.messages, max_new_tokens=3, seed=1).result().usage
    assert used.cached > before.tokens, "most of the results were computed"
    plain = engine.session()
    plain.turn(ASKED, **SEVERAL, seed=seed).result()
    given = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(turn.tool_calls, texts, strict=True)
    ]
    assert plain.turn(given, max_new_tokens=3, seed=1).result().usage.prompt == used.prompt
    assert plain.history == session.history, "as if nothing had been drafted"
    plain.close()
    session.close()


def test_a_result_that_comes_before_the_turn_ends_waits_for_it(slow_witness: Server, seed: int) -> None:
    with tenuto.connect(slow_witness.url) as engine, engine.session() as session:
        turn = session.turn(ASKED, **SEVERAL, seed=seed)
        calls, results = turn.calls(), session.results(turn)
        results.add(next(calls), "4 degrees")
        assert session.info.turn == "running"
        with pytest.raises(IllegalTransition, match="read to its end"):
            _ = results.messages
        for call in calls:
            results.add(call, "5 degrees")
        turn.result()
        others = ["5 degrees"] * (len(turn.tool_calls) - 1)
        assert [message["content"] for message in results.messages] == ["4 degrees", *others]
        session.turn(results.messages, max_new_tokens=1).result()


def test_wrong_results_are_refused(engine: Any) -> None:
    session, turn, _ = several_calls(engine)
    results = session.results(turn)
    with pytest.raises(InvalidRequest, match="made no call"):
        results.add("call_unknown", "4 degrees")
    with pytest.raises(InvalidRequest, match="int"):
        results.add(turn.tool_calls[0], 4)
    results.add(turn.tool_calls[0], "4 degrees")
    with pytest.raises(InvalidRequest, match="already"):
        results.add(turn.tool_calls[0], "5 degrees")
    session.abort()
    session.close()


# -- expectations


def test_a_turn_and_a_request_say_when_the_next_turn_comes(engine: Any) -> None:
    session = engine.session()
    session.turn(ASKED, max_new_tokens=2, expect_within=30.0).result()
    assert 20 < session.info.expected_in <= 30
    assert 90 < session.expect(100.0).expected_in <= 100
    assert session.expect(None).expected_in is None
    for wrong in (0, -1, float("nan"), "soon"):
        with pytest.raises(InvalidRequest, match="within"):
            session.expect(wrong)
        with pytest.raises(InvalidRequest, match="expect_within"):
            session.turn(ASKED, max_new_tokens=2, expect_within=wrong)
    session.turn(ASKED, max_new_tokens=2).result()
    assert session.info.expected_in is None, "a turn has come"
    session.close()


def test_tools_are_expected_to_take_as_long_as_before(engine: Any) -> None:
    tool = {**WEATHER, "name": f"weather_{uuid4().hex}"}  # of which no other test knows anything
    forced: Any = {**FORCED, "tools": [tool]}
    session = engine.session()
    turn = session.turn(ASKED, **forced)
    turn.result()
    time.sleep(0.05)
    assert session.info.expected_in is None
    for _ in range(2):
        results = session.results(turn)
        time.sleep(0.5)  # as a tool would take, so that the next turn is still expected when the test looks
        for call in turn.tool_calls:
            results.add(call, "4 degrees")
        turn = session.turn(results.messages, **forced)
        turn.result()
    eventually(lambda: session.info.expected_in is not None)
    session.close()


def test_expectations_over_http(witness: Server) -> None:
    with witness.client() as http:
        path = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}"
        http.post(f"{path}/append", json={"input": ASKED}).raise_for_status()
        version = http.get(path).json()["version"]
        answer = http.post(f"{path}/expect", json={"within": 50.0}, headers={"if-match": f'"{version}"'})
        assert answer.headers["etag"] == f'"{version}"'
        assert 40 < answer.json()["expected_in"] <= 50
        assert http.post(f"{path}/expect", json={"within": 5}, headers={"if-match": '"9"'}).status_code == 412
        assert 10 < http.get(path).json()["expected_in"] <= 50
        for body in ({}, {"within": 0}, {"within": -1}, {"within": 2e9}, {"within": "x"}, {"within": 1, "more": 1}):
            refused = http.post(f"{path}/expect", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
        assert http.post("/v1/sessions/nobody/expect", json={"within": 5}).status_code == 404
        assert http.post(f"{path}/expect", json={"within": None}).json()["expected_in"] is None
        with connect(f"{witness.url}{path}/socket".replace("http", "ws", 1)) as socket:
            socket.send(json.dumps({"type": "expect", "within": 7}))
            told = json.loads(socket.recv())
            assert (told["event"], told["status"]) == ("answer", 200)
            assert 5 < told["data"]["expected_in"] <= 7
        http.delete(path)


def test_a_session_with_an_open_turn_expects_nothing(slow_witness: Server) -> None:
    with tenuto.connect(slow_witness.url) as engine, engine.session() as session:
        turn = session.turn(ASKED, max_new_tokens=2000, ignore_eos=True)
        with pytest.raises(SessionBusy):
            session.expect(5.0)
        turn.abort()


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_other_interfaces_say_when_the_next_turn_comes(witness: Server, api: str) -> None:
    name = {"x-session-id": f"expects {api}"}
    body: dict[str, Any] = {"model": "default", "expect_within": 40.0}
    asked = [{"role": "user", "content": "Name a river."}]
    with witness.client() as http:
        match api:
            case "chat":
                body |= {"messages": asked, "max_tokens": 3}
                answer = http.post("/v1/chat/completions", json=body, headers=name)
            case "responses":
                body |= {"input": asked, "max_output_tokens": 3, "store": False}
                answer = http.post("/v1/responses", json=body, headers=name)
            case _:
                body |= {"messages": asked, "max_tokens": 3}
                answer = http.post("/v1/messages", json=body, headers=name)
        session = answer.raise_for_status().headers["x-tenuto-session"]
        assert 30 < http.get(f"/v1/sessions/{session}").raise_for_status().json()["expected_in"] <= 40
