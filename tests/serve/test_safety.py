"""Permissions, limits, and secrecy: keys, tenants, limits and logs, over HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tenuto.base.errors import ConfigError, EngineStopped, TenutoError
from tenuto.serve.sglang.server import _paths
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.settings import ServeSettings, Tenant, read_keys
from tests.serve.server import START_SECONDS, Server, serving
from tests.serve.test_native import LONG, events, refusal, turn

ANN, BOB, LIM, LINE, ROOT = "ann-secret-1f", "bob-secret-2e", "lim-secret-3d", "line-secret-5b", "root-secret-4c"
KEYS = f"""
[[keys]]
tenant = "ann"
key = "{ANN}"

[[keys]]
tenant = "bob"
sha256 = "{sha256(BOB.encode()).hexdigest()}"

[[keys]]
tenant = "lim"
key = "{LIM}"
limits = {{ sessions = 2, turns = 2, tokens = 20 }}

[[keys]]
tenant = "line"
key = "{LINE}"
limits = {{ queued = 1 }}
"""
OPEN = (
    "/health",
    "/health_generate",
    "/fleet/ready",
    "/ping",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
)
MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys for several tenants, on which 4,000 tokens take 8 seconds."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    arguments = ("--keys", str(path), "--max-body-bytes", str(MAX_BYTES), "--host", "0.0.0.0")
    root = {"TENUTO_ADMIN_API_KEY": ROOT}
    with serving("--model", "witness:0.002", "--context-length", "4096", *arguments, env=root) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        yield server
        with as_key(server, ROOT) as http:
            assert http.get("/audit").json()["clean"]


def as_key(server: Server, key: str) -> httpx.Client:
    return server.client(headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def ann(guarded: Server) -> Iterator[httpx.Client]:
    with as_key(guarded, ANN) as http:
        yield http


@pytest.fixture
def bob(guarded: Server) -> Iterator[httpx.Client]:
    with as_key(guarded, BOB) as http:
        yield http


@pytest.fixture
def limited(guarded: Server) -> Iterator[httpx.Client]:
    with as_key(guarded, LIM) as http:
        yield http
        for session in http.get("/v1/sessions").json()["data"]:
            http.delete(f"/v1/sessions/{session['id']}")


def routes(http: httpx.Client) -> list[tuple[str, str]]:
    described = http.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path.replace("{turn_id}", f"turn-{'0' * 24}").replace("{session_id}", "s"))
        for path, methods in described.items()
        for method in methods
        if path not in OPEN
    ]


# -- keys


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {ANN}"},
        {"authorization": f"Bearer {ANN}x"},
        {"authorization": "Bearer"},
        {"authorization": ANN},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {"authorization": "Bearer wrong", "x-api-key": ANN},
    ],
    ids=["none", "wrong", "basic", "longer", "empty", "bare", "wrong x", "empty x", "wrong first"],
)
def test_without_a_valid_key_every_route_refuses(guarded: Server, headers: dict[str, str]) -> None:
    with guarded.client(headers={}) as http:
        places = routes(http)
        assert len(places) > 15
        for method, path in places:
            for body in (None, b"{}", b"{", b"[" * 50_000):
                answer = http.request(method, path, content=body, headers=headers, params={"api_key": ANN, "key": ANN})
                code = "authentication_error" if path.startswith("/v1/messages") else "unauthorized"
                if path.startswith("/api/"):  # Ollama's errors are texts
                    assert answer.status_code == 401, (method, path, body)
                    assert "key" in answer.json()["error"]
                else:
                    assert refusal(answer) == (401, code), (method, path, body)
                assert answer.headers["www-authenticate"] == "Bearer"


def test_health_and_the_description_need_no_key(guarded: Server) -> None:
    with guarded.client(headers={}) as http:
        for path in ("/health", "/openapi.json", "/docs"):
            assert http.get(path).status_code == 200, path


def test_a_key_is_accepted_in_either_header(guarded: Server) -> None:
    with guarded.client(headers={}) as http:
        for headers in ({"x-api-key": ANN}, {"authorization": f"bearer {ANN}"}, {"X-API-Key": BOB}):
            assert http.get("/v1/sessions", headers=headers).status_code == 200


def test_server_wide_routes_need_an_admin_key(guarded: Server, ann: httpx.Client) -> None:
    whole = ("/audit", "/metrics", "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation")
    places = [place for place in routes(ann) if place[1] in whole]
    assert len(places) >= len(whole)
    with as_key(guarded, ROOT) as root:
        for method, path in places:
            assert refusal(ann.request(method, path)) == (403, "forbidden"), path
            assert root.request(method, path).status_code == 200, path


def test_only_an_admin_sees_where_the_models_files_are() -> None:
    edge: Any = SimpleNamespace(
        served_name="served",
        model=SimpleNamespace(path="/secret/model.gguf", model="model"),
        weights=SimpleNamespace(path="/secret/others.gguf"),
    )
    told = {"model_path": "served", "tokenizer_path": "served"}
    assert _paths(edge, Tenant("ann")) == told
    assert _paths(edge, Tenant("root", admin=True)) == {
        "model_path": "/secret/others.gguf",
        "tokenizer_path": "/secret/model.gguf",
    }


def test_metrics_can_be_made_public() -> None:
    with serving("--model", "witness", "--api-key", "k", "--public-metrics") as server, server.client() as http:
        assert http.get("/metrics").status_code == 200
        assert http.get("/audit").status_code == 401


# -- tenants


def test_sessions_of_two_tenants_with_the_same_id_are_independent(ann: httpx.Client, bob: httpx.Client) -> None:
    prompt = list(range(200))
    assert ann.post("/v1/sessions", json={"id": "same", "metadata": {"of": "ann"}}).status_code == 201
    first = turn(ann, "/v1/sessions/same", input=prompt)
    for place in ("", "/turns"):
        assert refusal(bob.get(f"/v1/sessions/same{place}")) == (404, "not_found")
    for place in ("fork", "rewind", "abort", "regenerate"):
        assert refusal(bob.post(f"/v1/sessions/same/{place}", json={})) == (404, "not_found")
    assert bob.post("/v1/sessions", json={"id": "same"}).status_code == 201
    assert turn(bob, "/v1/sessions/same", input=prompt)["usage"]["cached_tokens"] == 0
    assert [session["metadata"] for session in bob.get("/v1/sessions").json()["data"]] == [{}]
    assert bob.delete("/v1/sessions/same").status_code == 204
    assert ann.get("/v1/sessions/same").json()["version"] == first["version"]
    assert ann.delete("/v1/sessions/same").status_code == 204


def test_a_turn_is_found_only_by_its_tenant(ann: httpx.Client, bob: httpx.Client) -> None:
    for http in (ann, bob):
        http.post("/v1/sessions", json={"id": "busy"})
    with ann.stream("POST", "/v1/sessions/busy/turns", json={**LONG, "max_new_tokens": 400}) as response:
        told = events(response)
        next(told)
        turn_id = response.headers["x-turn-id"]
        assert refusal(bob.get(f"/v1/sessions/busy/turns/{turn_id}")) == (404, "not_found")
        assert refusal(bob.get(f"/v1/sessions/busy/turns/{turn_id}/events")) == (404, "not_found")
        assert refusal(bob.post("/v1/sessions/busy/abort", json={"turn_id": turn_id})) == (404, "not_found")
        bob.post("/v1/sessions/busy/abort", json={})
        assert turn(bob, "/v1/sessions/busy", input=[1])["version"] == 1
        assert list(told)[-1][0] == "committed"


def test_an_idempotency_key_counts_only_for_its_tenant(ann: httpx.Client, bob: httpx.Client) -> None:
    ids = []
    for http, extra in ((ann, {}), (bob, {"seed": 5})):
        http.post("/v1/sessions", json={"id": "keyed"})
        body = {"input": [1], "max_new_tokens": 2, "stream": False, **extra}
        answer = http.post("/v1/sessions/keyed/turns", json=body, headers={"idempotency-key": "k"})
        ids.append(answer.json()["id"])
    assert ids[0] != ids[1]


def test_no_id_reaches_into_another_tenant(ann: httpx.Client, bob: httpx.Client) -> None:
    ann.post("/v1/sessions", json={"id": "mine"})
    for path in ("ann/mine", "..%2fann%2fmine", "ann%2Fmine", "%2e%2e/ann/mine", "~"):
        assert bob.get(f"/v1/sessions/{path}").status_code in (400, 404)
    for name in ("ann/mine", "../ann/mine", "mine\n", "", "~x", "é"):
        assert refusal(bob.post("/v1/sessions", json={"id": name})) == (400, "invalid_request")
        assert refusal(ann.post("/v1/sessions/mine/fork", json={"id": name})) == (400, "invalid_request")


def test_errors_name_sessions_as_their_tenant_does(ann: httpx.Client) -> None:
    ann.post("/v1/sessions", json={"id": "named"})
    answers = [
        ann.get("/v1/sessions/none"),
        ann.post("/v1/sessions", json={"id": "named"}),
        ann.post("/v1/sessions/named/abort", json={}),
        ann.post("/v1/sessions/named/rewind", json={"turn": 0}, headers={"if-match": "9"}),
        ann.post("/v1/sessions/named/regenerate", json={}),
    ]
    for answer in answers:
        assert answer.status_code >= 400
        assert "ann/" not in answer.text
    assert "'none'" in answers[0].json()["error"]["message"]


# -- limits


def over_limit(answer: httpx.Response) -> bool:
    return refusal(answer) == (429, "limit_reached") and int(answer.headers["retry-after"]) > 0


def test_a_tenants_sessions_are_limited(limited: httpx.Client, ann: httpx.Client) -> None:
    for name in ("one", "two"):
        assert limited.post("/v1/sessions", json={"id": name}).status_code == 201
    assert over_limit(limited.post("/v1/sessions", json={}))
    assert over_limit(limited.post("/v1/sessions/one/fork", json={}))
    assert over_limit(limited.post("/v1/sessions/one/trim", json={"turns": []}))
    assert ann.post("/v1/sessions", json={}).status_code == 201
    limited.delete("/v1/sessions/one")
    assert limited.post("/v1/sessions", json={}).status_code == 201


def test_a_tenants_tokens_are_limited(limited: httpx.Client) -> None:
    limited.post("/v1/sessions", json={"id": "full"})
    turn(limited, "/v1/sessions/full", input=[1] * 20)
    for place, body in (("turns", {"input": [1]}), ("append", {"input": [1]}), ("fork", {})):
        assert over_limit(limited.post(f"/v1/sessions/full/{place}", json=body)), place
    assert over_limit(limited.put("/v1/sessions/full/draft", json={"input": [1]}))
    limited.post("/v1/sessions/full/rewind", json={"turn": 0})
    turn(limited, "/v1/sessions/full", input=[1])


def test_a_tenants_turns_are_limited(limited: httpx.Client, ann: httpx.Client) -> None:
    endless = {**LONG, "max_new_tokens": 4000}
    for name in ("one", "two"):
        limited.post("/v1/sessions", json={"id": name})
    told: list[Iterator[Any]] = []
    with ExitStack() as stack:
        for name in ("one", "two"):
            answer = stack.enter_context(limited.stream("POST", f"/v1/sessions/{name}/turns", json=endless))
            told.append(events(answer))
            next(told[-1])
        assert over_limit(limited.post("/v1/sessions/two/turns", json={"input": [1], "if_busy": "queue"}))
        ann.post("/v1/sessions", json={"id": "other"})
        turn(ann, "/v1/sessions/other", input=[1])


def test_a_tenants_waiting_turns_are_limited(guarded: Server) -> None:
    queued = {"input": [1], "if_busy": "queue", "max_new_tokens": 1}
    with as_key(guarded, LINE) as http, as_key(guarded, ROOT) as root, ThreadPoolExecutor(1) as pool:
        path = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}"
        with http.stream("POST", f"{path}/turns", json={**LONG, "max_new_tokens": 4000}) as answer:
            told = events(answer)
            next(told)
            waiting = pool.submit(turn, http, path, **queued)
            while "tenuto_turns_waiting 1.0" not in root.get("/metrics").text:
                time.sleep(0.01)
            assert over_limit(http.post(f"{path}/turns", json=queued))
            http.post(f"{path}/abort", json={})
            list(told)
        assert waiting.result()["version"] == 1


# -- sizes


def test_a_body_that_is_too_large_is_refused_however_it_is_sent(ann: httpx.Client) -> None:
    ann.post("/v1/sessions", json={"id": "large"})
    body = json.dumps({"input": "a" * (MAX_BYTES + 1)}).encode()

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 7919):
            yield body[start : start + 7919]

    for content in (body, chunks()):
        answer = ann.post("/v1/sessions/large/turns", content=content, headers={"content-type": "application/json"})
        assert refusal(answer) == (413, "too_large")
        assert answer.headers["x-request-id"]
    key = f"Authorization: Bearer {ANN}".encode()
    with socket.create_connection((ann.base_url.host, ann.base_url.port or 0), timeout=10) as connection:
        connection.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: a\r\n" + key + b"\r\nContent-Length: 9999999\r\n\r\n")
        assert b" 413 " in connection.recv(65536).split(b"\r\n")[0]  # it does not wait for the announced rest
    assert turn(ann, "/v1/sessions/large", input=[1])["version"] == 1


# -- configuration


def started(*arguments: str) -> tuple[int, str]:
    """Returns exit status and output of a server that does not start."""
    done = subprocess.run(
        [sys.executable, "-c", "from tenuto.cli import main; main()", "serve", "--model", "witness", *arguments],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "", "example.invalid"])
def test_without_a_key_the_server_listens_only_on_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        ServeSettings(host=host)


def test_a_server_that_may_not_listen_reports_it_in_one_line() -> None:
    status, output = started("--host", "0.0.0.0")
    assert (status, output.count("\n")) == (1, 1), output
    assert "API key" in output
    status, output = started("--log-level", "loud")
    assert (status, output.count("\n")) == (1, 1), output


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[keys]",
        "\x00",
        "keys = 1",
        "[[keys]]",
        "[[keys]]\ntenant = 'a'",
        "[[keys]]\ntenant = 'a'\nkey = ''",
        "[[keys]]\ntenant = 'a'\nkey = 'secret é'",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nsha256 = 'b'",
        "[[keys]]\ntenant = 'a'\nsha256 = 'secret'",
        f"[[keys]]\ntenant = 'a'\nsha256 = '{'a' * 62}'",
        "[[keys]]\ntenant = 'a/b'\nkey = 'secret'",
        "[[keys]]\ntenant = 'a\\n'\nkey = 'secret'",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nadmn = true",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nlimits = { turns = -1 }",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nlimits = { turns = 'many' }",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nweight = 0",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nweight = 101",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nweight = nan",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nweight = 'much'",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\nweight = 1\n[[keys]]\ntenant = 'a'\nkey = 'other'\nweight = 2",
        "[[keys]]\ntenant = 'a'\nkey = 'secret'\n[[keys]]\ntenant = 'b'\nkey = 'secret'",
    ],
)
def test_an_invalid_key_file_is_refused_in_one_line_without_its_secrets(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_keys(path, None, None)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_binary_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("none", "bytes", "."):
        with pytest.raises(ConfigError, match="cannot be used"):
            read_keys(tmp_path / name, None, None)


# -- secrecy


def test_no_secret_and_no_content_is_logged_or_sent_back(guarded: Server, ann: httpx.Client) -> None:
    word, number = "lavender-tea", 4077
    with guarded.client(headers={}) as stranger:
        answers = [
            stranger.get("/v1/sessions", headers={"authorization": "Bearer wrong-secret"}),
            stranger.get("/v1/sessions", headers={"authorization": "Basic wrong-secret"}),
        ]
    answers += [
        ann.get("/v1/sessions", params={"api_key": ANN}),
        ann.get("/v1/sessions/none", headers={"x-api-key": BOB, "cookie": "session=cookie-secret"}),
        ann.post("/v1/sessions", json={"id": "quiet", "system": None, "metadata": {"note": word}}),
        ann.post("/v1/sessions/quiet/turns", json={"input": word}),
        ann.post("/v1/sessions/quiet/turns", json={"input": [number] * 3, "stream": False, "max_new_tokens": 3}),
        ann.post("/v1/sessions/quiet/turns", json={"input": [{"role": "user", "content": word}]}),
        ann.post("/v1/sessions/quiet/turns", content=json.dumps({"input": word})[:-3]),
    ]
    ann.get("/v1/nothing%0a%1b[31mred")
    secrets = (ANN, BOB, LIM, LINE, ROOT, "wrong-secret", "cookie-secret")
    for answer in answers:
        assert not [secret for secret in secrets if secret in answer.text + str(answer.headers)]
        if answer.status_code >= 400:
            assert word not in answer.text
    guarded.line_with("nothing%0a")  # those before it have been logged
    output = "".join(guarded.lines)
    assert not [secret for secret in (*secrets, word, f"{number}, {number}") if secret in output]
    assert "\x1b" not in output


def test_clients_see_no_details_of_errors_and_nothing_of_bugs() -> None:
    stopped = Failure.of(EngineStopped("the engine stopped", detail="InvariantError: turn 3 of secret"))
    assert (stopped.status, stopped.message) == (503, "the engine stopped")
    assert "secret" not in str(Failure.of(TenutoError("KeyError: secret")).body)
