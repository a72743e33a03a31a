"""OpenAI's Responses over a WebSocket, by OpenAI's own client and by clients that misbehave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.connection import Connection

from tenuto.serve.shared.sockets import MAX_WAITING
from tests.eventually import eventually
from tests.serve import sockets
from tests.serve.server import Server, serving

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture(scope="module")
def client(witness: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{witness.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def opened(server: Server, **options: Any) -> Connection:
    return sockets.opened(server, "/v1/responses", **options)


def send(socket: Connection, given: str = "hi", **fields: Any) -> None:
    event = {"type": "response.create", "model": "witness", "input": given, "max_output_tokens": 8, "temperature": 0}
    socket.send(json.dumps({**event, **fields}))


def status(server: Server, session: str) -> int:
    return httpx.get(f"{server.url}/v1/sessions/{session}", timeout=60).status_code


def answer(socket: Connection) -> list[dict[str, Any]]:
    """Returns the events up to the end of an answer."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(socket.recv(timeout=60)))
    return events


def response(socket: Connection, given: str = "hi", **fields: Any) -> dict[str, Any]:
    send(socket, given, **fields)
    found: dict[str, Any] = answer(socket)[-1]["response"]
    return found


def test_openais_client_continues_an_answer_that_is_not_stored(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "witness", "max_output_tokens": 8, "store": False, "temperature": 0}
    with client.responses.connect() as connection:
        connection.response.create(input="one", **options)
        first = next(event.response for event in connection if event.type == "response.incomplete")
        connection.response.create(input="two", previous_response_id=first.id, **options)
        second = next(event.response for event in connection if event.type == "response.incomplete")
    assert first.output_text == client.responses.create(input="one", **options).output_text
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens


def test_the_events_are_those_of_a_stream(witness: Server, client: OpenAI) -> None:
    with opened(witness) as socket:
        send(socket)
        events = answer(socket)
    streamed = client.responses.create(model="witness", input="hi", max_output_tokens=8, temperature=0, stream=True)
    assert list(dict.fromkeys(event["type"] for event in events)) == list(dict.fromkeys(e.type for e in streamed))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ("no JSON", 400, "JSON object"),
        ("[1]", 400, "JSON object"),
        ("[" * 100_000, 413, "deep"),
        ('{"type": "response.steer"}', 400, "response.create"),
        ('{"type": "response.create", "model": "witness", "input": 1}', 400, "input"),
        ('{"type": "response.create", "input": "a", "previous_response_id": "resp_none"}', 404, "resp_none"),
    ],
)
def test_a_refused_message_gets_an_error_and_the_next_an_answer(
    witness: Server, sent: str, status: int, said: str
) -> None:
    with opened(witness) as socket:
        socket.send(sent)
        [error] = answer(socket)
        assert (error["type"], error["status"]) == ("error", status)
        assert said in error["error"]["message"]
        assert response(socket)["status"] == "incomplete"


def test_answers_come_in_the_order_of_requests(witness: Server) -> None:
    with opened(witness) as socket:
        for number in range(5):
            send(socket, f"number {number}", metadata={"number": str(number)})
        got = [answer(socket)[-1]["response"]["metadata"]["number"] for _ in range(5)]
    assert got == list("01234")


def test_only_the_latest_answer_that_is_not_stored_can_be_continued(witness: Server) -> None:
    with opened(witness) as socket:
        first = response(socket, store=False)
        latest = response(socket, store=False, previous_response_id=first["id"])
        send(socket, previous_response_id=first["id"])
        assert answer(socket)[-1]["status"] == 404
        assert response(socket, previous_response_id=latest["id"])["store"] is True
    eventually(lambda: status(witness, latest["id"]) == 404)


def test_a_client_that_leaves_rolls_its_turn_back(witness: Server) -> None:
    with opened(witness) as socket:
        send(socket, max_output_tokens=100_000, store=False)
        name = json.loads(socket.recv(timeout=60))["response"]["id"]
        assert status(witness, name) == 200
    eventually(lambda: status(witness, name) == 404)


def test_a_client_that_sends_too_far_ahead_is_disconnected(witness: Server) -> None:
    with opened(witness) as socket:
        send(socket, max_output_tokens=100_000)
        with pytest.raises(ConnectionClosed) as closed:  # noqa: PT012 - which call notices depends on the moment
            for _ in range(MAX_WAITING + 20):
                send(socket)
            while True:
                socket.recv(timeout=60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008


def test_a_page_of_another_origin_gets_no_socket(witness: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(witness, origin="https://elsewhere.example")
    assert refused.value.response.status_code == 403
    with opened(witness, origin=witness.url) as socket:
        assert response(socket)["status"] == "incomplete"


def test_a_socket_needs_a_key_where_requests_do() -> None:
    with serving("--model", "witness", "--api-key", "secret") as server:
        with pytest.raises(InvalidStatus) as refused:
            opened(server)
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body or b"")["error"]["code"] == "unauthorized"
        with opened(server, additional_headers={"authorization": "Bearer secret"}) as socket:
            assert response(socket)["status"] == "incomplete"


def test_other_paths_have_no_sockets(witness: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        sockets.opened(witness, "/v1/chat/completions")
    assert refused.value.response.status_code == 403
