"""A native session over one WebSocket, by clients that behave and clients that do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.connection import Connection

from tenuto.serve.shared.sockets import MAX_WAITING
from tests.eventually import eventually
from tests.serve.server import Server, serving
from tests.serve.sockets import opened, received

ENDS = ("committed", "aborted", "error", "answer")


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    name = http.post("/v1/sessions", json={}).json()["id"]
    yield name
    http.delete(f"/v1/sessions/{name}")


@pytest.fixture
def slow_session(slow_http: httpx.Client) -> Iterator[str]:
    name = slow_http.post("/v1/sessions", json={}).json()["id"]
    yield name
    slow_http.delete(f"/v1/sessions/{name}")


def joined(server: Server, session: str, **options: Any) -> Connection:
    return opened(server, f"/v1/sessions/{session}/socket", **options)


def send(socket: Connection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def answer(socket: Connection) -> list[dict[str, Any]]:
    """Returns the messages up to the end of an answer."""
    found: list[dict[str, Any]] = []
    while not found or found[-1]["event"] not in ENDS:
        found.append(received(socket))
    return found


def test_turns_follow_each_other_and_compute_only_what_is_new(witness: Server, session: str) -> None:
    with joined(witness, session) as socket:
        for number in range(5):
            send(socket, "turn", input=f"number {number}", max_new_tokens=8, request_id=f"ask-{number}")
        ends = []
        for number in range(5):
            events = answer(socket)
            assert {event["request_id"] for event in events} == {f"ask-{number}"}
            ends.append(events[-1]["data"])
    assert [end["version"] for end in ends] == [1, 2, 3, 4, 5]
    for earlier, later in pairwise(ends):
        known = earlier["usage"]["prompt_tokens"] + earlier["usage"]["completion_tokens"]
        assert later["usage"]["cached_tokens"] >= known - 1


def test_events_are_those_of_a_stream(witness: Server, session: str, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"input": "hello", "max_new_tokens": 6}
    with joined(witness, session) as socket:
        send(socket, "turn", **asked)
        events = answer(socket)
    other = http.post("/v1/sessions", json={}).json()["id"]
    streamed = http.post(f"/v1/sessions/{other}/turns", json=asked).text.strip().split("\n\n")
    http.delete(f"/v1/sessions/{other}")
    parts = [dict(line.split(": ", 1) for line in event.split("\n")) for event in streamed]
    assert "".join(e["data"].get("text", "") for e in events) == "".join(
        json.loads(part["data"]).get("text", "") for part in parts
    )
    for event in (events[0], events[-1]):
        [part] = [part for part in parts if part["event"] == event["event"]]
        assert event["data"].keys() == json.loads(part["data"]).keys()
        assert ("id" in event) == ("id" in part)


def test_an_abort_keeps_what_was_delivered_and_the_next_turn_goes_on(slow_witness: Server, slow_session: str) -> None:
    with joined(slow_witness, slow_session) as socket:
        send(socket, "turn", input="tell me all", max_new_tokens=4000)
        tokens = 0
        while tokens < 5:
            event = received(socket)
            tokens += len(event["data"].get("tokens", ()))
        send(socket, "abort", keep=3, request_id="stop")
        seen: list[dict[str, Any]] = []
        while {"committed", "answer"} - {event["event"] for event in seen}:
            seen.append(received(socket))
        [end] = [event for event in seen if event["event"] == "committed"]
        [told] = [event for event in seen if event["event"] == "answer"]
        assert (end["data"]["reason"], end["data"]["kept"]) == ("abort", 3)
        assert (told["request_id"], told["data"]["kept"]) == ("stop", 3)
        send(socket, "turn", input="and now", max_new_tokens=2)
        assert answer(socket)[-1]["data"]["version"] == 2


def test_an_abort_sent_right_behind_its_turn_ends_it(slow_witness: Server, slow_session: str) -> None:
    with joined(slow_witness, slow_session) as socket:
        for _ in range(10):
            send(socket, "turn", input="tell me all", max_new_tokens=3000)
            send(socket, "abort")
            ends: dict[str, Any] = {}
            while ends.keys() != {"aborted", "answer"}:
                event = received(socket)
                if event["event"] in ENDS:
                    ends[event["event"]] = event["data"]
            assert ends["aborted"]["reason"] == "abort"


def test_drafts_appends_rewinds_and_forks(witness: Server, session: str, http: httpx.Client) -> None:
    with joined(witness, session) as socket:
        send(socket, "append", input=list(range(5, 45)))
        assert answer(socket)[-1]["data"]["reason"] == "appended"
        send(socket, "draft", input=list(range(5, 65)))
        assert answer(socket)[-1]["data"]["turn"] == "drafting"
        send(socket, "turn", input=list(range(5, 70)), max_new_tokens=2, if_match='"1"')
        assert answer(socket)[-1]["data"]["usage"]["prompt_tokens"] == 105
        send(socket, "rewind", turn=1)
        assert answer(socket)[-1]["data"]["tokens"] == 40
        send(socket, "fork")
        child = answer(socket)[-1]["data"]["id"]
        send(socket, "show")
        assert answer(socket)[-1]["data"]["id"] == session
        send(socket, "turn", input="x", if_match='"77"')
        [error] = answer(socket)
        assert (error["status"], error["data"]["error"]["code"]) == (412, "version_mismatch")
    assert http.delete(f"/v1/sessions/{child}").status_code == 204


def test_a_repeated_message_gets_the_first_result(witness: Server, session: str) -> None:
    with joined(witness, session) as socket:
        for _ in range(2):
            send(socket, "turn", input="once", max_new_tokens=4, idempotency_key="one")
        first, second = (answer(socket)[-1]["data"] for _ in range(2))
    assert first["version"] == second["version"] == 1


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ("no JSON", 400, "JSON object"),
        ("[1]", 400, "JSON object"),
        ("[" * 1000, 413, "deep"),
        ("{}", 400, "type"),
        ('{"type": 7}', 400, "turn"),
        ('{"type": "close"}', 400, "turn"),
        ('{"type": "turn", "input": 1.5}', 400, "input"),
        ('{"type": "turn", "more": 1}', 400, "more"),
        ('{"type": "turn", "if_match": "x"}', 400, "if-match"),
        ('{"type": "append", "if_match": 7}', 400, "if_match is empty or not text"),
        ('{"type": "append", "idempotency_key": 7}', 400, "idempotency_key is empty or not text"),
        ('{"type": "append", "request_id": 7}', 400, "visible ASCII"),
        ('{"type": "append", "request_id": "a b"}', 400, "visible ASCII"),
        ('{"type": "rewind", "turn": 9}', 400, "9"),
        ('{"type": "abort"}', 409, "no open turn"),
    ],
)
def test_a_refused_message_changes_nothing(witness: Server, session: str, sent: str, status: int, said: str) -> None:
    with joined(witness, session) as socket:
        socket.send(sent)
        [error] = answer(socket)
        assert (error["event"], error["status"]) == ("error", status)
        assert said in json.dumps(error["data"])
        send(socket, "show")
        assert answer(socket)[-1]["data"]["version"] == 0


def test_a_client_that_leaves_rolls_its_turn_back(slow_witness: Server, slow_session: str) -> None:
    with joined(slow_witness, slow_session) as socket:
        send(socket, "turn", input="tell me all", max_new_tokens=4000)
        assert received(socket)["event"] == "started"
    with slow_witness.client() as http:
        eventually(lambda: http.get(f"/v1/sessions/{slow_session}").json()["turn"] is None)
        assert http.get(f"/v1/sessions/{slow_session}").json()["version"] == 0


def test_a_turn_that_continues_outlives_its_socket(witness: Server, session: str, http: httpx.Client) -> None:
    with joined(witness, session) as socket:
        send(socket, "turn", input="go on", max_new_tokens=300, on_disconnect="continue")
        assert received(socket)["event"] == "started"
    eventually(lambda: http.get(f"/v1/sessions/{session}").json()["version"] == 1)


def test_a_client_that_sends_too_far_ahead_is_disconnected(slow_witness: Server, slow_session: str) -> None:
    with joined(slow_witness, slow_session) as socket, pytest.raises(ConnectionClosed) as closed:  # noqa: PT012 - which call notices depends on the moment
        for _ in range(MAX_WAITING + 20):
            send(socket, "turn", input="x", max_new_tokens=4000)
        while True:
            socket.recv(timeout=60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008


def test_a_session_that_does_not_exist_has_no_socket(witness: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        joined(witness, "nobody")
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "not_found"


def test_a_socket_needs_the_key_of_its_session() -> None:
    with serving("--model", "witness", "--api-key", "secret") as server:
        headers = {"authorization": "Bearer secret"}
        with server.client(headers=headers) as http:
            name = http.post("/v1/sessions", json={}).json()["id"]
        with pytest.raises(InvalidStatus) as refused:
            joined(server, name)
        assert refused.value.response.status_code == 401
        with joined(server, name, additional_headers=headers) as socket:
            send(socket, "turn", input="hello", max_new_tokens=2)
            assert answer(socket)[-1]["event"] == "committed"


def test_a_silent_socket_stays_open() -> None:
    with serving("--model", "witness", "--header-seconds", "1", "--keep-alive-seconds", "1") as server:
        with server.client() as http:
            name = http.post("/v1/sessions", json={}).json()["id"]
        with joined(server, name) as socket:
            with pytest.raises(TimeoutError):
                socket.recv(timeout=2.5)  # longer than an open connection may go without a request
            send(socket, "turn", input="hello", max_new_tokens=2)
            assert answer(socket)[-1]["event"] == "committed"
