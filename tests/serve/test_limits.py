"""Requests that are too large, too many, or never end: each is limited, and refused in the form of its interface, over
real connections to a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from tenuto.engine.thread.views import first_page
from tests.eventually import eventually
from tests.serve.raw import Raw
from tests.serve.server import Server, serving
from tests.serve.test_native import refusal, turn

CONNECTIONS = 8


@pytest.fixture(scope="module")
def hurried() -> Iterator[Server]:
    """A server with short timeouts and few connections."""
    options = {
        "--header-seconds": 0.5,
        "--body-seconds": 0.5,
        "--keep-alive-seconds": 1,
        "--max-connections": CONNECTIONS,
        "--max-bodies-bytes": 1_000_000,
    }
    arguments = [str(part) for option in options.items() for part in option]
    with serving("--model", "witness", "--context-length", "4096", *arguments) as server:
        yield server
        server.audit()


START = b"GET /health HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


JSON = {"content-type": "application/json"}


# -- headers


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (START + b"x: ", b"y" * 8192),
        (START, b"x: y\r\n" * 2000),
        (START + b"x", b"x" * 8192),
        (b"GET /", b"y" * 8192),
        (START, b"x: " + b"y" * 500 + b"\r\n"),
    ],
    ids=["a value", "many", "a name", "a path", "many long ones"],
)
def test_endless_headers_are_refused(witness: Server, start: bytes, part: bytes) -> None:
    with Raw(witness) as connection:
        status, code = connection.send_until_answered(start, part)
    assert (status, code) in ((431, "headers_too_large"), (400, "invalid_request"))
    assert status == 431 or start.endswith(b"\nx")


def test_half_a_million_headers_are_refused_and_a_usual_number_is_not(witness: Server) -> None:
    with Raw(witness) as connection:
        assert connection.send_until_answered(START, b"a:b\r\n" * 10_000) == (431, "headers_too_large")
    many = b"".join(b"x-%d: %s\r\n" % (n, b"y" * 100) for n in range(200))
    with Raw(witness) as connection:
        connection.send(START + many + b"Connection: close\r\n\r\n")
        assert connection.answer()[0] == 200


def test_trailers_and_extensions_of_chunked_bodies_are_limited_like_headers(witness: Server) -> None:
    start = POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    for part in (b"x: " + b"y" * 500 + b"\r\n", b"y" * 8192):
        with Raw(witness) as connection:
            connection.send_until_answered(start + (b"" if part.startswith(b"x") else b"x: "), part)
    with Raw(witness) as connection:
        connection.send_until_answered(POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"y" * 8192)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"2\r\n{}\r\nno size\r\n", (400, "invalid_request")),
        (b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 300 + b"\r\n", (431, "headers_too_large")),
    ],
    ids=["no chunk", "what follows"],
)
def test_a_malformed_chunked_body_is_answered(witness: Server, body: bytes, answer: tuple[int, str]) -> None:
    start = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    with Raw(witness) as connection:  # before the application waits for it
        connection.send(start + body)
        assert connection.answer() == answer
    with Raw(witness) as connection:  # and when it does
        connection.send(start)
        time.sleep(0.2)
        connection.send(body)
        assert connection.answer() == answer


def test_headers_that_never_end_time_out(hurried: Server) -> None:
    for sent in (START, b"G", b"\r\n", b"GET / HTTP/1.1\r\nx: "):
        with Raw(hurried) as connection:
            connection.send(sent)
            assert connection.answer() == (408, "request_timeout")
    with Raw(hurried) as connection:  # also if they keep coming
        assert connection.send_until_answered(START, b"x: y\r\n") in (
            (408, "request_timeout"),
            (431, "headers_too_large"),
        )
    with Raw(hurried) as connection:  # also those of a second request
        connection.send(START + b"\r\n")
        first = connection.answer_of(20)
        connection.send(START)
        assert b" 200 " in first
        assert b" 408 " in b"".join(iter(lambda: connection.answer_of(2**12), b""))


def test_a_connection_without_requests_is_closed(hurried: Server) -> None:
    with Raw(hurried) as connection:
        assert connection.answer() == (0, None)
    with Raw(hurried) as connection:
        connection.send(START + b"\r\n")
        assert connection.answer()[0] == 200  # and then it is closed


# -- bodies


def test_a_body_that_does_not_arrive_times_out(hurried: Server) -> None:
    for framing in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"):
        with Raw(hurried) as connection:
            connection.send(POST + framing)
            assert connection.answer() == (408, "request_timeout")


def test_a_body_that_trickles_in_times_out(hurried: Server) -> None:
    with Raw(hurried) as connection:
        connection.send(POST + b"Content-Length: 100000\r\n\r\n")
        with suppress(ConnectionError):
            for _ in range(2000):
                connection.send(b" ")
                time.sleep(0.01)
        # the answer may be lost with the connection
        assert connection.answer() in ((408, "request_timeout"), (0, None))
    eventually(lambda: any('"status": 408' in line or "status=408" in line for line in hurried.lines))


def test_a_slow_body_that_keeps_coming_is_accepted(hurried: Server) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"id": "slow", "system": null'
        for _ in range(4):
            time.sleep(0.3)
            yield b" " * 4096
        yield b"}"

    with hurried.client() as http:
        answer = http.post("/v1/sessions", content=parts(), headers={"content-type": "application/json"})
        assert answer.status_code == 201
        assert turn(http, "/v1/sessions/slow", input=[1])["version"] == 1


def test_a_client_that_keeps_sending_a_refused_body_is_cut_off(hurried: Server) -> None:
    with Raw(hurried) as connection:
        status, _ = connection.send_until_answered(
            b"POST /v1/nothing HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"400\r\n" + b" " * 1024 + b"\r\n",
        )
        assert status in (404, 413)


def test_the_bodies_of_all_requests_together_are_limited(hurried: Server) -> None:
    start = POST + b"Content-Length: 900000\r\n\r\n"
    refused = False
    while not refused:  # either may be complete before much of the other has arrived
        with Raw(hurried) as first, Raw(hurried) as second:
            for connection in (first, second):
                connection.send(start + b" " * 800_000)
            for connection in (first, second):
                with suppress(ConnectionError):  # refused, and no longer read
                    connection.send(b"{" + b" " * 99_999)
            answers = {first.answer(), second.answer()}
            assert answers <= {(429, "overloaded"), (400, "invalid_request"), (0, None)}
            refused = (429, "overloaded") in answers
    with hurried.client() as http:
        large = b" " * 900_000 + b"{}"
        eventually(lambda: _status(lambda: http.post("/v1/sessions", content=large, headers=JSON)) == 201)


# -- connections


def test_the_number_of_open_connections_is_limited(hurried: Server) -> None:
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            connection = stack.enter_context(Raw(hurried))
            connection.send(POST + b"Content-Length: 9\r\n\r\n" + b" " * 8)
        with Raw(hurried) as one_more:
            assert one_more.answer() == (503, "server_full")
    with hurried.client() as http:
        eventually(lambda: _status(lambda: http.get("/health")) == 200)


def _status(ask: Callable[[], httpx.Response]) -> int | None:
    """Returns the status of an answer; `None` if the server does not answer."""
    with suppress(httpx.TransportError):
        return ask().status_code
    return None


# -- metadata and listings of sessions


@pytest.mark.parametrize(
    "metadata",
    [
        {f"k{n}": "v" for n in range(17)},
        {"k" * 65: "v"},
        {"k": "v" * 513},
        {f"k{n}": 1 for n in range(100_000)},
        {"k": "v" * 20_000_000},
    ],
    ids=["entries", "key", "value", "many wrong ones", "a large one"],
)
def test_metadata_is_limited(http: httpx.Client, metadata: dict[str, Any]) -> None:
    answer = http.post("/v1/sessions", json={"id": "noted", "metadata": metadata})
    assert refusal(answer) == (400, "invalid_request")
    assert "metadata" in answer.json()["error"]["message"]
    assert len(answer.content) < 2000
    assert refusal(http.get("/v1/sessions/noted")) == (404, "not_found")


def test_a_large_listing_ends_its_page_early_and_continues_on_the_next(http: httpx.Client) -> None:
    metadata = {f"{n:064}": "ж" * 512 for n in range(16)}
    names = [f"large-{n:03}" for n in range(120)]
    for name in names:
        assert http.post("/v1/sessions", json={"id": name, "metadata": metadata}).status_code == 201
    found: list[str] = []
    after: str | None = "large-"
    pages = 0
    while after is not None and after.startswith("large-"):
        answer = http.get("/v1/sessions", params={"limit": 1000, "after": after})
        assert len(answer.content) < 2**21
        found += [entry["id"] for entry in answer.json()["data"] if entry["id"].startswith("large-")]
        after, pages = answer.json()["next"], pages + 1
    assert found == names
    assert pages > 1
    for name in names:
        http.delete(f"/v1/sessions/{name}")


def test_a_page_has_at_least_one_entry_and_no_more_than_fit() -> None:
    assert first_page([900, 1, 1], 10, 100, int) == [900]
    assert first_page([50, 50, 1], 10, 100, int) == [50, 50]
    assert first_page([1, 1, 1], 2, 100, int) == [1, 1]
    assert first_page([], 2, 100, int) == []


# -- many things in one request


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sessions/s/turns", {"input": [{}] * 200_000}),
        ("/v1/sessions/s/turns", {"input": [1] * 200_000 + ["x"]}),
        ("/v1/sessions/s/turns", {"input": [{"role": "user", "content": ""}] * 10_001}),
        ("/v1/sessions/s/turns", {f"field{n}": 1 for n in range(100_000)}),
        ("/v1/sessions/s/turns", {"input": "x", "logit_bias": {str(n): "x" for n in range(100_000)}}),
        ("/v1/chat/completions", {"model": "witness", "messages": [{}] * 200_000}),
        (
            "/v1/chat/completions",
            {
                "model": "witness",
                "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 9_000}] * 9,
            },
        ),
        ("/v1/completions", {"model": "witness", "prompt": [[]] * 200_000}),
        ("/generate", {"text": "x", "sampling_params": [{}] * 200_000}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(list(value)[:3]),
)
def test_only_a_few_of_a_hundred_thousand_mistakes_are_reported(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_request", "context_exceeded")
    assert len(answer.content) < 3000


def test_a_message_that_cannot_fit_is_refused_by_every_interface(http: httpx.Client) -> None:
    text = "x" * 1_000_000
    http.post("/v1/sessions", json={"id": "whole"})
    before = turn(http, "/v1/sessions/whole", input=[{"role": "user", "content": "x"}])
    chat = {"model": "witness", "messages": [{"role": "user", "content": text}]}
    said = [{"role": "user", "content": text}]
    for path, body, code in (
        ("/v1/sessions/whole/turns", {"input": text}, "context_exceeded"),
        ("/v1/sessions/whole/turns", {"input": said}, "context_exceeded"),
        ("/v1/sessions/whole/append", {"input": said}, "context_exceeded"),
        ("/v1/chat/completions", chat, "context_length_exceeded"),
        ("/v1/chat/completions", {**chat, "stream": True}, "context_length_exceeded"),
        ("/v1/chat/completions", {**chat, "session_id": "fresh"}, "context_length_exceeded"),
        ("/v1/completions", {"model": "witness", "prompt": text}, "context_length_exceeded"),
        ("/generate", {"text": text}, "context_length_exceeded"),
    ):
        assert refusal(http.post(path, json=body)) == (400, code), path
    assert refusal(http.put("/v1/sessions/whole/draft", json={"input": text})) == (400, "context_exceeded")
    assert refusal(http.post("/v1/sessions", json={"system": text})) == (400, "context_exceeded")
    assert refusal(http.get("/v1/sessions/fresh")) == (404, "not_found")
    after = turn(http, "/v1/sessions/whole", input=[{"role": "user", "content": "y"}])
    assert after["version"] == before["version"] + 1
