"""OpenAI's Realtime for text, by OpenAI's own client and by clients that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.connection import Connection

from tests.eventually import eventually
from tests.serve import sockets
from tests.serve.server import Server, serving
from tests.serve.test_tools import WEATHER as WRAPPED

WEATHER: dict[str, Any] = {"type": "function", **WRAPPED["function"]}
BRIEF: dict[str, Any] = {"type": "realtime", "max_output_tokens": 12, "temperature": 0}


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with client_of(witness) as client:
        yield client


@pytest.fixture(scope="module")
def slow_client(slow_witness: Server) -> Iterator[OpenAI]:
    with client_of(slow_witness) as client:
        yield client


def said(text: str, role: str = "user", **more: Any) -> Any:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **more}


def until(connection: Any, *kinds: str) -> list[Any]:
    """Returns the events up to the first of these types."""
    events: list[Any] = []
    for event in connection:
        events.append(event)
        assert event.type != "error" or "error" in kinds, event
        if event.type in kinds:
            return events
    raise AssertionError("the connection ended")


def begun(connection: Any, **settings: Any) -> str:
    """Sets a session up; returns its id."""
    connection.session.update(session={**BRIEF, **settings})
    created = until(connection, "session.updated")[0]
    assert created.type == "session.created"
    name: str = created.session.id
    return name


def ask(connection: Any, text: str, **response: Any) -> list[Any]:
    """Adds a user's message and returns the events of the response to it."""
    connection.conversation.item.create(item=said(text))
    connection.response.create(response=response or None) if response else connection.response.create()
    return until(connection, "response.done")


def written(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def usage(events: list[Any]) -> Any:
    return events[-1].response.usage


def shown(server: Server, name: str) -> Any:
    with server.client() as http:
        return http.get(f"/v1/sessions/{name}").json()


def test_a_conversation_is_one_session_and_nothing_is_computed_twice(witness: Server, client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        name = begun(connection, instructions="Be brief.")
        known = 0
        for number in range(4):
            events = ask(connection, f"question {number}")
            assert usage(events).input_token_details.cached_tokens >= known - 1
            known = usage(events).total_tokens
            assert shown(witness, name)["version"] == number + 1
        assert shown(witness, name)["tokens"] == known
    eventually(lambda: "error" in shown(witness, name))


def test_a_response_has_the_events_of_openai_in_their_order(client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        begun(connection)
        events = ask(connection, "hello")
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.done",
    ]
    by_kind = {event.type: event for event in events}
    done = events[-1].response
    assert done.status == "incomplete"
    assert done.status_details.reason == "max_output_tokens"
    assert done.usage.output_tokens == 12
    [item] = done.output
    text = written(events)
    assert item.content[0].text == by_kind["response.output_text.done"].text == text != ""
    user, assistant = [event for event in events if event.type == "conversation.item.added"]
    assert assistant.previous_item_id == user.item.id
    assert len({event.event_id for event in events}) == len(events)


def test_the_asynchronous_client_gets_the_same_answer(witness: Server, client: OpenAI) -> None:
    async def converse() -> str:
        async with AsyncOpenAI(base_url=f"{witness.url}/v1", api_key="none") as other:  # noqa: SIM117 - two kinds
            async with other.realtime.connect(model="witness") as connection:
                await connection.session.update(session=BRIEF)
                await connection.conversation.item.create(item=said("hello"))
                await connection.response.create()
                text = ""
                async for event in connection:
                    if event.type == "response.output_text.delta":
                        text += event.delta
                    elif event.type == "response.done":
                        return text
        raise AssertionError("the connection ended")

    with client.realtime.connect(model="witness") as connection:
        begun(connection)
        assert asyncio.run(converse()) == written(ask(connection, "hello"))


def test_calls_are_items_and_their_results_go_on(client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        begun(connection, tools=[WEATHER], tool_choice="required", max_output_tokens=400)
        events = ask(connection, "What is the weather in Rome?")
        calls = [item for item in events[-1].response.output if item.type == "function_call"]
        assert calls
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == [call.arguments for call in calls]
        assert all(call.name == "weather" and "days" in json.loads(call.arguments) for call in calls)
        known = usage(events).total_tokens
        for call in calls:
            connection.conversation.item.create(
                item={"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
            )
        connection.response.create(response={"tool_choice": "none", "max_output_tokens": 5})
        assert usage(until(connection, "response.done")).input_token_details.cached_tokens >= known - 1


def test_a_cancelled_response_keeps_what_was_written(slow_witness: Server, slow_client: OpenAI) -> None:
    with slow_client.realtime.connect(model="witness") as connection:
        name = begun(connection, max_output_tokens="inf")
        connection.conversation.item.create(item=said("tell me all"))
        connection.response.create()
        until(connection, "response.output_text.delta")
        connection.response.cancel()
        events = until(connection, "response.done")
        assert events[-1].response.status == "cancelled"
        assert events[-1].response.status_details.reason == "client_cancelled"
        assert events[-1].response.output[0].status == "incomplete"
        known = shown(slow_witness, name)
        assert known["turns"] == 1
        events = ask(connection, "go on", max_output_tokens=3)
        assert usage(events).input_token_details.cached_tokens >= known["tokens"] - 1


def test_a_truncation_while_the_assistant_speaks_commits_what_was_heard(
    slow_witness: Server, slow_client: OpenAI
) -> None:
    with slow_client.realtime.connect(model="witness") as connection:
        name = begun(connection, max_output_tokens="inf")
        connection.conversation.item.create(item=said("tell me all"))
        connection.response.create()
        pieces, item = list[str](), ""
        while len(pieces) < 6:
            event = until(connection, "response.output_text.delta")[-1]
            pieces, item = [*pieces, event.delta], event.item_id
        text, whole = "".join(pieces), "".join(pieces[:4])
        heard = text[: len(whole) + 1]
        connection.send(truncation(item, len(heard)))
        events = until(connection, "conversation.item.truncated")
        done = next(event.response for event in events if event.type == "response.done")
        assert done.status == "cancelled"
        assert done.output[0].content[0].text == heard
        connection.conversation.item.retrieve(item_id=item)
        assert until(connection, "conversation.item.retrieved")[-1].item.content[0].text == heard
        with slow_witness.client() as http:
            [turn] = http.get(f"/v1/sessions/{name}/turns").json()["data"]
        assert heard.startswith(turn["output_text"])
        assert turn["output_text"].startswith(whole)
        events = ask(connection, "go on", max_output_tokens=3)
        known = len(turn["input_tokens"]) + len(turn["output_tokens"])
        assert usage(events).input_token_details.cached_tokens >= known - 1


def truncation(item: str, end: int, **more: Any) -> Any:
    place = {"item_id": item, "content_index": 0, "audio_end_ms": 1, "text_end": end, **more}
    return {"type": "conversation.item.truncate", **place}


def test_an_answer_is_truncated_after_its_end(witness: Server, client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        name = begun(connection)
        events = ask(connection, "hello")
        item, text = events[-1].response.output[0].id, written(events)
        connection.send(truncation(item, 8))
        until(connection, "conversation.item.truncated")
        with witness.client() as http:
            [turn] = http.get(f"/v1/sessions/{name}/turns").json()["data"]
        assert text[:8].startswith(turn["output_text"])
        assert 0 < len(turn["output_tokens"]) < 12
        events = ask(connection, "and then")
        assert (
            usage(events).input_token_details.cached_tokens
            >= len(turn["input_tokens"]) + len(turn["output_tokens"]) - 1
        )
        connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=0)
        until(connection, "conversation.item.truncated")
        assert shown(witness, name)["tokens"] == len(turn["input_tokens"])


def test_an_answer_replaced_by_its_beginning_keeps_the_state(client: OpenAI) -> None:
    """As clients do that have no truncation of text: they remove the item and create one with what was heard."""
    with client.realtime.connect(model="witness") as connection:
        begun(connection)
        events = ask(connection, "hello")
        item, text = events[-1].response.output[0], written(events)
        known = usage(events).input_tokens
        user = next(event.item.id for event in events if event.type == "conversation.item.added")
        connection.conversation.item.delete(item_id=item.id)
        connection.conversation.item.create(item=said(text[:9], "assistant"), previous_item_id=user)
        events = ask(connection, "and then")
        assert usage(events).input_token_details.cached_tokens >= known


def test_items_can_be_edited_anywhere(client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        begun(connection)
        for text in ("one", "two", "three"):
            ask(connection, text)
        connection.conversation.item.create(item=said("zero", id="first"), previous_item_id="root")
        [added, _] = until(connection, "conversation.item.done")
        assert (added.item.id, added.previous_item_id) == ("first", None)
        whole = usage(ask(connection, "four")).input_tokens
        connection.conversation.item.delete(item_id="first")
        until(connection, "conversation.item.deleted")
        assert usage(ask(connection, "five")).input_tokens > whole
        connection.conversation.item.retrieve(item_id="first")
        assert until(connection, "error")[-1].error.code == "not_found"


def test_a_history_is_filled_in_and_answered(client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        begun(connection)
        for number in range(20):
            connection.conversation.item.create(item=said(f"{number}", "assistant" if number % 2 else "user"))
        events = ask(connection, "and now")
        assert usage(events).input_tokens > 20
        assert events[-1].response.status == "incomplete"


def test_new_instructions_hold_from_the_next_response_on(witness: Server, client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        name = begun(connection)
        before = usage(ask(connection, "one")).total_tokens
        connection.session.update(session={"type": "realtime", "instructions": "Speak like a pirate, always."})
        session = until(connection, "session.updated")[-1].session
        assert (session.instructions, session.max_output_tokens) == ("Speak like a pirate, always.", 12)
        assert usage(ask(connection, "two")).input_tokens > before + 10
        assert shown(witness, name)["turns"] == 1


def test_a_response_apart_leaves_the_conversation_as_it_is(witness: Server, client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        name = begun(connection)
        known = usage(ask(connection, "one")).total_tokens
        before = shown(witness, name)
        connection.response.create(response={"conversation": "none", "metadata": {"topic": "moderation"}})
        events = until(connection, "response.done")
        done = events[-1].response
        assert (done.conversation_id, done.metadata) == (None, {"topic": "moderation"})
        assert done.usage.input_token_details.cached_tokens >= known - 1  # a fork
        assert not [event for event in events if event.type.startswith("conversation.")]
        connection.response.create(response={"conversation": "none", "input": [said("only this")]})
        assert usage(until(connection, "response.done")).input_tokens < known
        after = shown(witness, name)
        assert (after["version"], after["tokens"]) == (before["version"], before["tokens"])
        with witness.client() as http:
            eventually(lambda: [each["id"] for each in http.get("/v1/sessions").json()["data"]] == [name])


def test_a_session_that_others_close_is_opened_again(witness: Server, client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        name = begun(connection)
        known = usage(ask(connection, "one")).total_tokens
        with witness.client() as http:
            assert http.delete(f"/v1/sessions/{name}").status_code == 204
        assert usage(ask(connection, "two")).input_tokens > known
        assert shown(witness, name)["turns"] == 1


def test_an_answer_is_truncated_although_others_have_closed_its_session(witness: Server, client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        name = begun(connection)
        events = ask(connection, "hello")
        item, text = events[-1].response.output[0].id, written(events)
        with witness.client() as http:
            http.delete(f"/v1/sessions/{name}").raise_for_status()
        connection.send(truncation(item, 8))
        until(connection, "conversation.item.truncated")
        ask(connection, "and then")
        with witness.client() as http:
            [turn] = http.get(f"/v1/sessions/{name}/turns").json()["data"]
        assert text[:8] in turn["input_text"]
        assert text not in turn["input_text"]


def test_an_edit_waits_while_others_use_the_session(slow_witness: Server, slow_client: OpenAI) -> None:
    with slow_client.realtime.connect(model="witness") as connection, slow_witness.client() as http:
        name = begun(connection)
        events = ask(connection, "hello")
        turn = {"input": "others", "max_new_tokens": 2000, "ignore_eos": True}
        with http.stream("POST", f"/v1/sessions/{name}/turns", json=turn) as stream:
            lines = stream.iter_lines()  # the turn ends with its last reader
            next(lines)
            connection.conversation.item.delete(item_id=events[-1].response.output[0].id)
            connection.response.create()
            assert until(connection, "error")[-1].error.code == "session_busy"
            http.post(f"/v1/sessions/{name}/abort", json={}).raise_for_status()
        connection.response.create()
        until(connection, "response.done")
        assert shown(slow_witness, name)["turns"] == 1


def test_a_second_response_at_once_is_refused(slow_client: OpenAI) -> None:
    with slow_client.realtime.connect(model="witness") as connection:
        begun(connection, max_output_tokens="inf")
        connection.conversation.item.create(item=said("tell me all"))
        connection.response.create()
        until(connection, "response.created")
        connection.response.create(event_id="again")
        error = until(connection, "error")[-1].error
        assert (error.code, error.event_id) == ("conversation_already_has_active_response", "again")
        connection.response.cancel(response_id="resp_none")
        assert until(connection, "error")[-1].error.param == "response_id"
        connection.response.cancel()
        assert until(connection, "response.done")[-1].response.status == "cancelled"


UPDATE, RESPOND, CREATE = "session.update", "response.create", "conversation.item.create"
SOUND = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": ""}]}
RESULT = {"type": "function_call_output", "output": ""}
REFERENCE = {"type": "item_reference", "id": "x"}


@pytest.mark.parametrize(
    ("kind", "fields", "code", "param"),
    [
        (UPDATE, {"session": {"output_modalities": ["audio"]}}, "unsupported", "session.output_modalities"),
        (UPDATE, {"session": {"audio": {"output": {"voice": "cedar"}}}}, "unsupported", "session.audio"),
        (UPDATE, {"session": {"type": "transcription"}}, "invalid_request", "session.type"),
        (UPDATE, {"session": {"model": "other"}}, "model_not_found", "model"),
        (UPDATE, {"session": {"temperature": -1}}, "invalid_request", "session.temperature"),
        ("input_audio_buffer.append", {"audio": "AAAA"}, "unsupported", "type"),
        (RESPOND, {"response": {"output_modalities": ["audio"]}}, "unsupported", "response.output_modalities"),
        (RESPOND, {"response": {"input": [REFERENCE]}}, "not_found", "response.input"),
        (RESPOND, {"response": {"tool_choice": "required"}}, "invalid_request", "tool_choice"),
        (RESPOND, {}, "invalid_request", None),
        ("response.cancel", {}, "illegal_transition", "response_id"),
        (CREATE, {"item": said("x", more=1)}, "invalid_request", "item.more"),
        (CREATE, {"previous_item_id": "x", "item": said("x")}, "not_found", "previous_item_id"),
        (CREATE, {"item": RESULT}, "invalid_request", "item.call_id"),
        (CREATE, {"item": SOUND}, "unsupported", "item.content[0].type"),
        ("conversation.item.delete", {"item_id": "x"}, "not_found", "item_id"),
        ("conversation.item.truncate", {"item_id": "x"}, "not_found", "item_id"),
        ("conversation.item.steer", {}, "invalid_request", "type"),
        (7, {}, "invalid_request", "type"),
    ],
)
def test_a_refused_message_gets_an_error_and_changes_nothing(
    witness: Server, kind: Any, fields: dict[str, Any], code: str, param: str | None
) -> None:
    with sockets.opened(witness, "/v1/realtime?model=witness") as socket:
        assert sockets.received(socket)["type"] == "session.created"
        socket.send(json.dumps({"type": kind, **fields, "event_id": "mine"}))
        told = sockets.received(socket)
        assert told["type"] == "error", told
        assert (told["error"]["code"], told["error"]["param"], told["error"]["event_id"]) == (code, param, "mine")
        assert told["error"]["type"] in ("invalid_request_error", "not_found_error", "conflict_error")
        finish(socket)


def finish(socket: Connection) -> None:
    """Holds a short conversation."""
    socket.send(json.dumps({"type": "conversation.item.create", "item": said("hello")}))
    socket.send(json.dumps({"type": "response.create", "response": {"max_output_tokens": 2, "temperature": 0}}))
    while (event := sockets.received(socket))["type"] != "response.done":
        assert event["type"] != "error", event
    assert event["response"]["status"] == "incomplete"


def test_a_truncation_that_cannot_be_is_refused(client: OpenAI) -> None:
    with client.realtime.connect(model="witness") as connection:
        begun(connection)
        events = ask(connection, "hello")
        user = next(event.item.id for event in events if event.type == "conversation.item.added")
        item = events[-1].response.output[0].id
        for sent, param in (
            (truncation(item, 10_000), "text_end"),
            (truncation(user, 1), "item_id"),
            (truncation(item, 3, content_index=1), "content_index"),
        ):
            connection.send(sent)
            assert until(connection, "error")[-1].error.param == param
        connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=1500)
        assert until(connection, "error")[-1].error.param == "audio_end_ms"
        connection.conversation.item.retrieve(item_id=item)
        assert until(connection, "conversation.item.retrieved")[-1].item.content[0].text == written(events)


def test_a_client_that_leaves_ends_its_session(slow_witness: Server, slow_client: OpenAI) -> None:
    with slow_client.realtime.connect(model="witness") as connection:
        name = begun(connection, max_output_tokens="inf")
        connection.conversation.item.create(item=said("tell me all"))
        connection.response.create()
        until(connection, "response.output_text.delta")
    eventually(lambda: "error" in shown(slow_witness, name))


def test_a_client_that_sends_too_far_ahead_is_disconnected(slow_witness: Server) -> None:
    with sockets.opened(slow_witness, "/v1/realtime") as socket:
        socket.send(json.dumps({"type": "conversation.item.create", "item": said("x")}))
        with pytest.raises(ConnectionClosed):  # noqa: PT012 - which call notices depends on the moment
            for _ in range(5000):
                socket.send(json.dumps({"type": "conversation.item.create", "item": said("x" * 1000)}))
            while True:
                socket.recv(timeout=60)


def test_an_unknown_model_gets_no_socket(witness: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        sockets.opened(witness, "/v1/realtime?model=gpt-realtime")
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "model_not_found"


def test_responses_keep_to_the_limits_of_a_tenant() -> None:
    with serving("--model", "witness", "--api-key", "secret", "--max-sessions", "1") as server:
        with pytest.raises(InvalidStatus) as refused:
            sockets.opened(server, "/v1/realtime")
        assert refused.value.response.status_code == 401
        headers = {"authorization": "Bearer secret"}
        with sockets.opened(server, "/v1/realtime", additional_headers=headers) as socket:
            assert sockets.received(socket)["type"] == "session.created"
            with server.client(headers=headers) as http:
                http.post("/v1/sessions", json={"id": "only"})
                socket.send(json.dumps({"type": "conversation.item.create", "item": said("hello")}))
                socket.send(json.dumps({"type": "response.create"}))
                while (event := sockets.received(socket))["type"] != "error":
                    pass
                assert event["error"]["code"] == "overloaded"
                http.delete("/v1/sessions/only")
            finish(socket)
