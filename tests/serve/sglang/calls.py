"""Requests to the SGLang interface, and readers of its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

LONG = {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 0}


def opened(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/open_session", json={"capacity_of_str_len": 1000, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def closed(http: httpx.Client, name: str) -> None:
    assert http.post("/close_session", json={"session_id": name}).status_code == 200


def generate(http: httpx.Client, ids: list[int] | str, **body: Any) -> Any:
    """Generates for one prompt, greedily, 4 tokens unless the body says otherwise; returns the answer, or a list of
    `n`."""
    answer = http.post("/generate", json=request(ids, **body))
    assert answer.status_code == 200, answer.text
    return answer.json()


def request(ids: list[int] | str, *, session: str | None = None, **body: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 4, **body.pop("sampling_params", {})}
    names = ("offset", "replace", "drop_previous_output", "after")
    place: dict[str, Any] = {name: body.pop(name) for name in names if name in body}
    if "after" in place:
        place["rid"] = place.pop("after")
    where = {"session_params": {"id": session, **place}} if session is not None else {}
    return {"text" if isinstance(ids, str) else "input_ids": ids, "sampling_params": params, **where, **body}


def chunks(response: httpx.Response) -> Iterator[Any]:
    """Yields the chunks of a stream, and checks that it ends properly."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    pytest.fail("the stream has no end")


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def tail(answer: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of tokens in the prompt, and how many of them were computed."""
    meta = answer["meta_info"]
    return meta["prompt_tokens"], meta["prompt_tokens"] - meta["cached_tokens"]
