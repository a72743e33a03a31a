"""Tools of native turns: an agent on a session, over HTTP and in Python, in this process and on a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import tenuto
from tenuto.base.errors import InvalidRequest
from tests.serve.server import Server
from tests.serve.test_tools import CLOCK
from tests.serve.test_tools import WEATHER as WRAPPED

WEATHER: Any = WRAPPED["function"]
FORCED: Any = {"tools": [WEATHER], "tool_choice": "required", "max_new_tokens": 400}
DEEP: Any = json.loads('{"a":' * 150 + "1" + "}" * 150)
ASKED: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(params=["here", "server"])
def engine(request: pytest.FixtureRequest, witness: Server) -> Iterator[Any]:
    if request.param == "server":
        with tenuto.connect(witness.url) as remote:
            yield remote
    else:
        with tenuto.Engine("witness", context_length=4096) as local:
            yield local


def results(calls: list[Any]) -> list[Any]:
    return [{"role": "tool", "tool_call_id": call.id, "content": "4 degrees"} for call in calls]


def test_a_result_is_the_next_turn_and_nothing_is_recomputed(engine: Any) -> None:
    session, given = engine.session(), ASKED
    known = several = 0
    for seed in range(24):
        turn = session.turn(given, **FORCED, temperature=1.0, seed=seed)
        assert "".join(turn) == ""  # the answer has only calls
        usage, calls = turn.result().usage, turn.tool_calls
        assert all(call.name == "weather" and json.loads(call.arguments)["days"] < 10 for call in calls)
        assert len({call.id for call in calls}) == len(calls) > 0
        assert usage.cached >= known - 1  # its last token had no successor
        known, several = usage.prompt + usage.generated, max(several, len(calls))
        assert turn.message["content"] is None
        assert [call["id"] for call in turn.message["tool_calls"]] == [call.id for call in calls]
        given = results(calls)
        if several > 1 and seed > 4:
            break
    assert several > 1
    assert session.turn(given, max_new_tokens=2).result().usage.cached >= known - 1
    session.close()


def test_a_conversation_with_calls_can_be_adopted(engine: Any) -> None:
    session = engine.session()
    turn = session.turn(ASKED, **FORCED)
    turn.result()
    for wrapped in (False, True):
        said = dict(turn.message)
        if wrapped:
            said["tool_calls"] = [
                {"type": "function", "id": call["id"], "function": {k: call[k] for k in ("name", "arguments")}}
                for call in said["tool_calls"]
            ]
        other = engine.session()
        later = [*ASKED, said, *results(turn.tool_calls)]
        used = other.turn(later, tools=[WRAPPED], max_new_tokens=1).result().usage
        assert used.prompt > 60
        other.close()
    session.close()


def test_a_session_is_given_tools_before_the_first_question(engine: Any) -> None:
    session = engine.session()
    session.append([{"role": "system", "content": "Be brief."}], tools=[{**WEATHER, "strict": True}])
    turn = session.turn(ASKED, **FORCED)
    turn.result()
    assert turn.tool_calls[0].name == "weather"
    regenerated = session.regenerate(tools=[WEATHER], tool_choice={"name": "weather"}, max_new_tokens=400)
    regenerated.result()
    assert len(regenerated.tool_calls) == 1
    session.close()


def test_parts_add_up_to_the_whole_answer(engine: Any) -> None:
    turn = engine.generate(ASKED, **FORCED)
    parts = list(turn.parts())
    assert [call for part in parts for call in part.calls] == turn.tool_calls
    assert turn.tool_calls
    assert "".join(part.text for part in parts) == (turn.message["content"] or "")
    assert turn.text != ""  # as the model wrote it


def test_without_tools_the_text_is_not_parsed(engine: Any) -> None:
    plain = engine.generate(ASKED, max_new_tokens=8)
    assert "".join(plain) == plain.text == plain.message["content"]
    assert plain.tool_calls == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"name": "clock"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"called": "weather"}}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"tools": [WEATHER, CLOCK, WRAPPED]}, "tools[2].name"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "strict": 1, "more": 2}]}, "tools[0]"),
        ({"tools": [{"name": "f", "parameters": 7}]}, "tools[0].parameters"),
        ({"tools": [{"name": "f", "description": 7}]}, "tools[0].description"),
        ({"tools": WEATHER}, "tools"),
        ({"tools": [{"name": "f", "parameters": DEEP}]}, "tools"),
        ({"tools": [{"name": "f", "parameters": {"type": "x"}}], "tool_choice": "required"}, "tools"),
        ({"tools": [WEATHER], "grammar": {"regex": "[a-z]"}}, "tools"),
    ],
)
def test_invalid_tools_are_refused_by_their_field(engine: Any, options: dict[str, Any], param: str) -> None:
    session = engine.session()
    with pytest.raises(InvalidRequest) as refused:
        session.turn(ASKED, max_new_tokens=8, **options)
    assert refused.value.param == param
    assert session.info.version == 0
    session.close()


def events(response: httpx.Response) -> list[tuple[str, str, Any]]:
    found = []
    for block in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        found.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return found


def test_a_stream_has_all_calls_of_the_turn_even_when_read_from_its_middle(witness: Server) -> None:
    with witness.client() as http:
        http.post("/v1/sessions", json={"id": "streamed"}).raise_for_status()
        two = {"tools": [WRAPPED], "tool_choice": "required", "temperature": 1.0, "max_new_tokens": 800}
        for seed in range(40):
            body = {**two, "input": ASKED, "seed": seed}
            told = events(http.post("/v1/sessions/streamed/turns", json=body))
            calls = [call for name, _, data in told if name == "delta" for call in data.get("tool_calls", ())]
            if len(calls) > 1:
                break
        assert len(calls) > 1
        assert (told[0][0], told[-1][0]) == ("started", "committed")
        assert told[-1][2]["message"] == {"role": "assistant", "content": None, "tool_calls": calls}
        assert all(json.loads(call["arguments"]).keys() == {"city", "days"} for call in calls)
        path = f"/v1/sessions/streamed/turns/{told[0][2]['turn_id']}"
        assert http.get(path).json()["message"]["tool_calls"] == calls
        numbers = [int(number) for _, number, _ in told if number]
        for after in (numbers[0], numbers[len(numbers) // 2]):
            again = events(http.get(f"{path}/events", headers={"last-event-id": str(after)}))
            assert again == told[-len(again) :]
        http.delete("/v1/sessions/streamed").raise_for_status()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"name": "clock"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{**ASKED[0], "tool_calls": [{"id": "x"}]}]}, "input[0].tool_calls[0].name"),
        ({"input": "text", "tools": [WEATHER]}, "tools"),
    ],
)
def test_invalid_tools_are_refused_by_their_field_over_http(witness: Server, body: dict[str, Any], param: str) -> None:
    with witness.client() as http:
        http.post("/v1/sessions", json={"id": "wrong"}).raise_for_status()
        refused = http.post("/v1/sessions/wrong/turns", json={"input": ASKED, "max_new_tokens": 4, **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        http.delete("/v1/sessions/wrong").raise_for_status()


def test_the_asynchronous_client_also_returns_calls(witness: Server) -> None:
    async def main() -> None:
        async with tenuto.connect_async(witness.url) as engine:
            session = await engine.session()
            turn = session.turn(ASKED, **FORCED)
            parts = [part async for part in turn.parts()]
            assert [call for part in parts for call in part.calls] == turn.tool_calls
            assert json.loads(turn.tool_calls[0].arguments).keys() == {"city", "days"}
            after = session.turn(results(turn.tool_calls), max_new_tokens=2)
            assert (await after.result()).usage.cached > 0
            await session.close()

    asyncio.run(main())
