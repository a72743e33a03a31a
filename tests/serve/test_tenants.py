"""Tenants share a server by their weights on every interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenuto.serve.shared.settings import read_keys
from tests.eventually import eventually
from tests.serve.server import Server, serving

ROWS = 4
WEIGHTS = {"greedy": 1, "small": 1, "heavy": 3, "light": 1}
LIGHT_ROWS = 1
"""Rows of a tenant of weight 1 beside one of weight 3."""
STREAMS = 6
ENDLESS = 900_000
"""Tokens to generate."""
NUMBERS = count()
SECONDS = 60


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with few rows, on which turns outlast any test."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        "".join(
            f"[[keys]]\ntenant = '{tenant}'\nkey = '{tenant}-key'\nweight = {weight}\n"
            for tenant, weight in WEIGHTS.items()
        )
    )
    arguments = ("--keys", str(path), "--admin-api-key", "admin-key", "--max-running-requests", str(ROWS))
    with serving("--model", "witness:0.001", "--context-length", "1000000", *arguments) as server:
        yield server
        with client(server, "admin") as http:
            assert http.get("/audit").status_code == 200


def client(server: Server, tenant: str) -> httpx.Client:
    return server.client(headers={"authorization": f"Bearer {tenant}-key"}, timeout=SECONDS)


Way = Callable[[httpx.Client, int], tuple[str, dict[str, Any]]]
"""Returns the path and body of a request for a stream of this many tokens."""


def in_a_session(http: httpx.Client, tokens: int) -> tuple[str, dict[str, Any]]:
    session = http.post("/v1/sessions", json={}).json()["id"]
    return f"/v1/sessions/{session}/turns", {"input": [1], "max_new_tokens": tokens}


def in_a_fork(http: httpx.Client, tokens: int) -> tuple[str, dict[str, Any]]:
    session = http.post("/v1/sessions", json={}).json()["id"]
    fork = http.post(f"/v1/sessions/{session}/fork", json={}).json()["id"]
    return f"/v1/sessions/{fork}/turns", {"input": [1], "max_new_tokens": tokens}


def after_a_draft(http: httpx.Client, tokens: int) -> tuple[str, dict[str, Any]]:
    session = http.post("/v1/sessions", json={}).json()["id"]
    assert http.put(f"/v1/sessions/{session}/draft", json={"input": [1, 2]}).status_code == 200
    return f"/v1/sessions/{session}/turns", {"input": [1, 2, 3], "max_new_tokens": tokens}


def openai(path: str, **body: Any) -> Way:
    asked = {"model": "witness", "stream": True, **body}
    return lambda _, tokens: (f"/v1/{path}", {**asked, "max_tokens": tokens})


def kept(_: httpx.Client, tokens: int) -> tuple[str, dict[str, Any]]:
    return openai("completions", prompt=[1], session_id=f"kept-{next(NUMBERS)}")(_, tokens)


def sglang(**body: Any) -> Way:
    def ask(_: httpx.Client, tokens: int) -> tuple[str, dict[str, Any]]:
        options = {"max_new_tokens": tokens, "n": body.get("n", 1)}
        session = {"session_params": body["session_params"]} if "session_params" in body else {}
        return "/generate", {"input_ids": [1], "stream": True, "sampling_params": options, **session}

    return ask


def in_an_sglang_session(http: httpx.Client, tokens: int) -> tuple[str, dict[str, Any]]:
    session = http.post("/open_session", json={"capacity_of_str_len": 99}).json()
    return sglang(session_params={"id": session})(http, tokens)


WAYS: dict[str, Way] = {
    "session": in_a_session,
    "fork": in_a_fork,
    "draft": after_a_draft,
    "completion": openai("completions", prompt=[1]),
    "two completions": openai("completions", prompt=[1], n=2),
    "kept completion": kept,
    "chat": openai("chat/completions", messages=[{"role": "user", "content": "w1"}]),
    "generate": sglang(),
    "two generated": sglang(n=2),
    "SGLang session": in_an_sglang_session,
}


@contextmanager
def endless(http: httpx.Client, way: Way, requests: int = STREAMS) -> Iterator[None]:
    """Runs turns that generate until the block ends."""
    with ExitStack() as stack:
        for _ in range(requests):
            path, body = way(http, ENDLESS)
            response = stack.enter_context(http.stream("POST", path, json=body))
            assert response.status_code == 200
        yield


def running(http: httpx.Client) -> int:
    """Returns the number of rows used by the tenant's turns."""
    return len(http.get("/v1/sessions", params={"state": "running"}).json()["data"])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_small_tenants_turn_ends_while_a_greedy_one_wants_every_row(shared: Server, way: Way) -> None:
    with client(shared, "greedy") as greedy, client(shared, "small") as small, endless(greedy, in_a_session):
        eventually(lambda: running(greedy) == ROWS)
        path, body = way(small, 3)
        answer = small.post(path, json=body)
        assert answer.status_code == 200
        assert '"length"' in answer.text
        eventually(lambda: running(greedy) == ROWS)  # the other takes its row again


@pytest.mark.parametrize("name", WAYS)
def test_turns_on_every_interface_count_for_their_keys_tenant_by_its_weight(shared: Server, name: str) -> None:
    requests = 2 if name.startswith("two") else STREAMS  # a third would wait for the tenant's first two
    with (
        client(shared, "heavy") as heavy,
        client(shared, "light") as light,
        endless(light, in_a_session),
        endless(heavy, WAYS[name], requests),
    ):
        eventually(lambda: running(light) == LIGHT_ROWS)
    with client(shared, "light") as light:
        eventually(lambda: running(light) == 0)


def test_a_weight_holds_for_all_keys_of_its_tenant_and_defaults_to_1(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        "[[keys]]\ntenant = 'a'\nkey = '1'\n[[keys]]\ntenant = 'a'\nkey = '2'\nweight = 2.5\n"
        "[[keys]]\ntenant = 'b'\nkey = '3'\n[[keys]]\ntenant = 'default'\nkey = '4'\nweight = 4\n"
    )
    assert dict(read_keys(path, "own", None).weights) == {"a": 2.5, "default": 4}
