"""Requests no client should send, and requests the OpenAPI description allows, against a real server of the witness."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.server import Server, serving

SECONDS = 60
"""The longest an answer may take. A turn in the small context ends well before."""
BOUNDED = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def witness() -> Iterator[Server]:
    """A server on which turns end soon. It must pass an audit when the module's tests are done."""
    with serving("--model", "witness", "--context-length", "256", "--session-ttl", "30") as server:
        yield server
        server.audit()
        assert not [line for line in server.lines if '"error"' in line or "Traceback" in line]


@pytest.fixture(scope="module")
def fuzzed(witness: Server) -> Iterator[httpx.Client]:
    """A client that fails when nothing arrives for a while."""
    with witness.client(timeout=SECONDS) as http:
        http.post("/v1/sessions", json={"id": "fuzzed"})
        yield http


HALTING = {"/pause_generation": "/continue_generation", "/release_memory_occupation": "/resume_memory_occupation"}
"""Routes that pause all turns, with those that resume them."""
WAITING = ("/init_weights_update_group", "/trace")
"""Routes whose requests, if they are valid, wait: minutes for other processes, or for as long as they say."""


def acceptable(response: httpx.Response) -> None:
    """Checks that the server did not fail and that a refusal has the right form."""
    status = response.status_code
    assert status < 500 or (status == 503 and "retry-after" in response.headers), response.text
    if status >= 400 and response.content and response.headers.get("content-type") == "application/json":
        error = response.json()["error"]
        assert error if response.request.url.path.startswith("/api/") else error["message"]


# -- from the description


def no_server_error(context: Any, response: Any, case: schemathesis.Case) -> bool | None:
    """Checks that the server did not fail. Only a deadline that the request set may have passed."""
    deadlines = {"queue_timeout", "timeout"} & case.body.keys() if isinstance(case.body, dict) else set()
    return None if deadlines and response.status_code == 504 else not_a_server_error(context, response, case)


CHECKS = [no_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_requests_the_description_allows_or_forbids_are_answered_as_described(
    witness: Server, fuzzed: httpx.Client, mode: schemathesis.GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{witness.url}/openapi.json")
    failures: list[BaseException] = []
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        if operation.path in WAITING:
            continue

        @BOUNDED
        @given(operation.as_strategy(generation_mode=mode))
        def answered(case: schemathesis.Case) -> None:
            parameters = case.path_parameters
            if "session_id" in parameters and zlib.crc32(repr(case.body).encode(errors="replace")) % 4:
                parameters["session_id"] = "fuzzed"  # otherwise it is hardly ever an existing one
            case.validate_response(case.call(timeout=SECONDS), checks=CHECKS)

        try:
            answered()
        except Unsatisfiable:  # nothing about it can be wrong
            pass
        except (Exception, BaseExceptionGroup) as failure:  # noqa: BLE001 - the other operations are tried all the same
            failures.append(failure)
    for path in HALTING.values():
        assert fuzzed.post(path).status_code == 200
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} operations", failures)


# -- by hand

DEEP = b"[" * 100_000
ODD_TEXTS = st.sampled_from(
    ["", "\x00", "\ud800", "\udfff\ud800", "a" * 5000, "\u202e", "\U0010ffff", "../..", "~", "default/x", "'\"\n"]
)
ODD_NUMBERS = st.sampled_from([0, -1, 1.5, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, 1e-320, -0.0])
ODD_VALUES = st.recursive(
    ODD_TEXTS | ODD_NUMBERS | st.sampled_from([None, True, float("nan"), float("inf"), -float("inf")]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXTS, inner, max_size=3),
    max_leaves=5,
)
NAMES = """
    input max_new_tokens min_new_tokens stop stop_ids logit_bias seed top_k top_p min_p temperature logprobs
    input_logprobs timeout queue_timeout priority stream if_busy on_disconnect id metadata system ttl max_tokens turn
    position turns keep turn_id repetition_penalty presence_penalty frequency_penalty ignore_eos model messages prompt
    text input_ids sampling_params session_params session_id rid n echo tools max_completion_tokens stream_options
    response_format logprob_start_len
"""
ODD_FIELDS = st.dictionaries(st.sampled_from(NAMES.split()), ODD_VALUES, max_size=2)
PLAIN = st.sampled_from(
    [
        {},
        {"input": [1, 2], "max_new_tokens": 3},
        {"input": [1, 2], "max_new_tokens": 3, "temperature": 1.0, "stream": False},
        {"model": "witness", "prompt": [1, 2], "max_tokens": 3},
        {"model": "witness", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True},
        {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}},
        {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 3}, "stream": True},
    ]
)
BODIES = st.one_of(
    st.builds(lambda plain, odd: json.dumps({**plain, **odd}).encode(), PLAIN, ODD_FIELDS),
    ODD_VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=50),
    st.sampled_from([b"", b"{", b"{}" * 2, b'{"input": ' + DEEP, DEEP, b'{"a":' * 50_000, b'{"input": "\xff"}']),
    st.sampled_from([b'{"input": [1' + b"0" * 5000 + b"]}", b'{"input": "\\u0000"}', b'{"input": [1e999]}']),
)
HEADER_VALUES = st.one_of(
    st.sampled_from([b"*", b'W/"1"', b'"', b"-1", b"1" * 400, b"\xff\xfe", b"nan", b"0x1", b"", b"a" * 201, b'"\xb2"']),
    st.binary(max_size=20).map(lambda value: bytes(byte for byte in value if byte > 32 and byte != 127)),
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            *(b"if-match", b"idempotency-key", b"last-event-id", b"x-request-id", b"content-type", b"accept"),
            *(b"authorization", b"x-api-key", b"origin", b"range", b"content-encoding", b"expect"),
        ]
    ),
    HEADER_VALUES,
    max_size=3,
)


def routes(http: httpx.Client) -> list[tuple[str, str]]:
    """Returns methods and paths of the description, for an existing session, without those that pause turns or wait."""
    described = http.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path.replace("{session_id}", "fuzzed").replace("{turn_id}", f"turn-{'0' * 24}"))
        for path, methods in described.items()
        if path not in HALTING and path not in WAITING
        for method in methods
    ]


def test_no_body_makes_the_server_fail(fuzzed: httpx.Client) -> None:
    places = [(method, path) for method, path in routes(fuzzed) if method not in ("GET", "DELETE")]

    @settings(BOUNDED, max_examples=400)
    @given(st.sampled_from(places), BODIES)
    def refused_or_served(place: tuple[str, str], body: bytes) -> None:
        acceptable(fuzzed.request(*place, content=body, headers={"content-type": "application/json"}))

    refused_or_served()


def test_no_header_makes_the_server_fail(fuzzed: httpx.Client) -> None:
    body = json.dumps({"input": [1], "max_new_tokens": 1}).encode()

    @settings(BOUNDED, max_examples=200)
    @given(st.sampled_from(routes(fuzzed)), HEADERS)
    def refused_or_served(place: tuple[str, str], headers: dict[bytes, bytes]) -> None:
        acceptable(fuzzed.request(*place, content=body, headers={b"content-type": b"application/json", **headers}))
        if place == ("DELETE", "/v1/sessions/fuzzed"):
            fuzzed.post("/v1/sessions", json={"id": "fuzzed"})

    refused_or_served()


IDS = st.one_of(
    st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=70),
    st.text("ab.:_-~/%?#", max_size=5),
    st.sampled_from([".", "..", "...", "./a", "a/..", "%2e", "%2E%2e", "turns", "source", "a" * 64, "." * 65, "a\n"]),
)
OPENERS: dict[str, dict[str, Any]] = {
    "/v1/sessions": {"id": ...},
    "/v1/sessions/source/fork": {"turn": 0, "id": ...},
    "/v1/sessions/source/trim": {"turns": [], "id": ...},
    "/v1/completions": {"model": "witness", "prompt": [1], "max_tokens": 1, "session_id": ...},
    "/open_session": {"session_id": ..., "capacity_of_str_len": 1, "streaming": True},
}


def test_a_session_that_can_be_opened_can_be_read_used_and_closed(fuzzed: httpx.Client) -> None:
    opened: set[str] = set()
    assert fuzzed.post("/v1/sessions", json={"id": "source", "ttl": 3600}).status_code == 201

    @settings(BOUNDED, max_examples=300)
    @given(st.sampled_from(list(OPENERS)), IDS)
    def reachable(opener: str, name: str) -> None:
        body = {field: name if value is ... else value for field, value in OPENERS[opener].items()}
        answer = fuzzed.post(opener, json=body)
        assert answer.status_code in (200, 201, 400, 409), answer.text
        if name in (".", ".."):
            assert answer.status_code == 400
        if answer.status_code >= 400 or name == "source":
            return
        opened.add(name)
        path = f"/v1/sessions/{quote(name, safe='')}"
        assert fuzzed.get(path).json()["id"] == name
        assert fuzzed.post(f"{path}/append", json={"input": [1]}).status_code == 200
        assert name in [session["id"] for session in fuzzed.get("/v1/sessions").json()["data"]]
        assert fuzzed.delete(path).status_code == 204

    reachable()
    assert len(opened) > 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sessions/fuzzed/trim", b'{"turns": [1%s]}' % (b"0" * 30)),
        ("/v1/sessions/fuzzed/append", b'{"input": [1%s]}' % (b"0" * 30)),
        ("/v1/sessions", b'{"metadata": {"a": "\\ud800"}}'),
        ("/v1/sessions/fuzzed/turns", b'{"input": [1], "stop": "\\udfff"}'),
    ],
)
def test_text_that_no_engine_message_can_carry_is_refused(fuzzed: httpx.Client, path: str, body: bytes) -> None:
    answer = fuzzed.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PATCH", "TRACE", "PROPFIND", "PURGE", "X" * 300])
def test_no_method_makes_the_server_fail(fuzzed: httpx.Client, method: str) -> None:
    for path in ("/v1/sessions", "/v1/sessions/fuzzed/turns", "/nothing", "//", "/v1/sessions/%2e%2e", "/\xe9?%ff"):
        response = fuzzed.request(method, path)
        acceptable(response)
        assert response.status_code >= 400, path


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET /v1/sessions HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
        b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n{}",
        b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}",
        b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"GET /\xff\xfe\x1b[2J HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["bytes", "version", "long path", "headers", "negative", "huge", "chunks", "both lengths", "path"],
)
def test_bytes_that_are_not_http_break_only_their_connection(
    witness: Server, fuzzed: httpx.Client, sent: bytes
) -> None:
    url = httpx.URL(witness.url)
    with socket.create_connection((url.host, url.port or 0), timeout=SECONDS) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            status = connection.recv(65536).split(b"\r\n")[0]
        except ConnectionError:
            status = b""
    assert not status or status.split(b" ")[1].startswith(b"4"), status
    assert fuzzed.get("/v1/sessions").status_code == 200
