"""JSON bodies are limited in structure, parsed strictly, and freed."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import TooLarge
from tenuto.serve.shared import bodies
from tenuto.serve.shared.bodies import MAX_DEPTH, MAX_PARTS, MAX_VALUES, JsonRoute, Structure, parsed
from tests.serve.server import Server
from tests.serve.test_native import refusal
from tests.serve.test_other_servers import in_process

TEXTS = st.text(st.sampled_from('a,:[]{}"\\\n'), max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """Returns the number of commas and opening brackets, and of opening brackets and colons, as `Structure` counts
    them."""
    if not isinstance(value, list | dict):
        return 0, 0
    children = [counted(child) for child in (value.values() if isinstance(value, dict) else value)]
    commas = max(0, len(value) - 1)
    colons = len(value) if isinstance(value, dict) else 0
    return 1 + commas + sum(each for each, _ in children), 1 + colons + sum(each for _, each in children)


@given(VALUES, st.lists(st.integers(0, 400), max_size=6), st.sampled_from([None, 2]))
def test_structure_is_counted_outside_of_strings_however_the_body_is_cut(
    value: Any, cuts: list[int], indent: int | None
) -> None:
    body, structure = json.dumps(value, indent=indent).encode(), Structure()
    places = [0, *sorted(cuts), len(body)]
    for begin, end in pairwise(places):
        structure.feed(body[begin:end])
    values, parts = counted(value)
    assert (structure.values, structure.parts) == (1 + values, parts)


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        (b"[" + b"1," * MAX_VALUES, MAX_VALUES),
        (b"[" + b"[]," * MAX_PARTS, MAX_PARTS),
        (b"{" + b'"k":0,' * MAX_PARTS, MAX_PARTS),
        (b"[" * (MAX_DEPTH + 1), MAX_DEPTH),
    ],
)
def test_too_much_structure_is_refused_with_the_limit(body: bytes, allowed: int) -> None:
    with pytest.raises(TooLarge, match=f"more than {allowed}"):
        Structure().feed(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"' + rb"[{,\"\\" * 4_000_000 + b'"}',
        b'{"input_ids":[' + b"12345," * (2**20 - 1) + b"1]}",
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 10_000}).encode(),
        b"[" * MAX_DEPTH,
    ],
    ids=["text", "tokens", "messages", "depth"],
)
def test_large_text_many_tokens_and_many_messages_are_accepted(body: bytes) -> None:
    structure = Structure()
    for at in range(0, len(body), 2**16):
        structure.feed(body[at : at + 2**16])


@pytest.mark.parametrize(
    "body", [b'[1e400, NaN, "\\ud800", 123456789012345678901234567890]', b"\xef\xbb\xbf[1]", b"[1.5, true]"]
)
def test_a_body_is_read_as_python_reads_json(body: bytes) -> None:
    assert repr(parsed(body)) == repr(json.loads(body))


@pytest.mark.parametrize("body", ["[1]".encode("utf-16"), "[1]".encode("utf-32"), b'["\xff"]'])
def test_only_utf_8_is_read(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"utf-8|Expecting"):
        parsed(body)


def test_dense_bodies_are_refused_before_they_are_parsed(http: httpx.Client) -> None:
    body = b'{"model":"default","messages":[' + b"[]," * MAX_PARTS + b"[]]}"
    answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert refusal(answer) == (413, "too_large")
    assert str(MAX_PARTS) in answer.json()["error"]["message"]


def test_every_route_with_a_body_checks_it_before_parsing(witness: Server) -> None:
    async def routes(http: httpx.AsyncClient) -> list[APIRoute]:
        transport: Any = http._transport
        app: FastAPI = transport.app
        return [route for route in app.routes if isinstance(route, APIRoute)]

    assert all(isinstance(route, JsonRoute) for route in in_process(routes) if route.body_field is not None)


def test_the_parsed_body_is_freed_when_the_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parsed(dict[str, Any]):
        """A dict that can be weakly referenced."""

    seen: list[weakref.ref[Any]] = []

    def noted(raw: bytes) -> Parsed:
        try:
            value = Parsed(json.loads(raw))
        except json.JSONDecodeError as error:  # which has the text
            seen.append(weakref.ref(error))
            raise
        seen.append(weakref.ref(value))
        return value

    async def ask(http: httpx.AsyncClient) -> list[int]:
        monkeypatch.setattr(bodies, "parsed", noted)
        chat, message = "/v1/chat/completions", {"role": "user", "content": "x " * 5000}
        statuses = []
        for path, body in (
            (chat, "[,"),
            (chat, json.dumps({"model": "default", "messages": 1})),
            (chat, json.dumps({"model": "default", "messages": [message]})),
            ("/v1/completions", json.dumps({"model": "default", "prompt": [5], "max_tokens": 1})),
        ):
            headers = {"content-type": "application/json"}
            statuses.append((await http.post(path, content=body, headers=headers)).status_code)
        await asyncio.sleep(0)
        return statuses

    gc.disable()
    try:
        assert in_process(ask) == [400, 400, 400, 200]
        assert [each() for each in seen] == [None] * 4
    finally:
        gc.enable()
