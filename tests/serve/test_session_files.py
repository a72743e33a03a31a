"""Sessions as files: another server of the same model continues an exported session, and refuses any other file."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.base.errors import InvalidRequest
from tenuto.base.wire import state_file
from tenuto.base.wire.document import SessionDocument
from tenuto.base.wire.state_file import StateFile
from tests.serve.server import Server, serving
from tests.serve.test_native import refusal

KEYS = """
[[keys]]
tenant = "one"
key = "one-key"
limits = { sessions = 3, tokens = 260 }
[[keys]]
tenant = "two"
key = "two-key"
[[keys]]
tenant = "admin"
key = "admin-key"
admin = true
"""
CONTEXT = 400
TOKENS = 90
"""Tokens in the history of `talk`, which is cut inside its last answer."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two tenants, with a journal. Refused sessions are not in the journal either."""
    directory = tmp_path_factory.mktemp("shared")
    (directory / "keys.toml").write_text(KEYS)
    arguments = ("--keys", str(directory / "keys.toml"), "--journal", str(directory / "journal"))
    limits = ("--context-length", str(CONTEXT), "--max-sessions", "8")
    with serving("--model", "witness", *arguments, *limits) as server:
        yield server
        with client(server, "admin") as http:
            assert http.get("/audit").status_code == 200
    with serving("--model", "witness", *arguments, *limits) as server:
        for tenant in ("one", "two"):
            with client(server, tenant) as http:
                assert http.get("/v1/sessions").json()["data"] == []


def client(server: Server, tenant: str) -> httpx.Client:
    return server.client(headers={"authorization": f"Bearer {tenant}-key"})


@pytest.fixture
def one(shared: Server) -> Iterator[httpx.Client]:
    """A client of the tenant with limits. Its sessions are closed at the end."""
    with client(shared, "one") as http:
        yield http
        close_all(http)


@pytest.fixture
def two(shared: Server) -> Iterator[httpx.Client]:
    with client(shared, "two") as http:
        yield http
        close_all(http)


def close_all(http: httpx.Client) -> None:
    for session in http.get("/v1/sessions").json()["data"]:
        http.delete(f"/v1/sessions/{session['id']}").raise_for_status()


def say(http: httpx.Client, session: str, text: str, tokens: int = 8) -> Any:
    body = {"input": [{"role": "user", "content": text}], "max_new_tokens": tokens, "stream": False}
    return http.post(f"/v1/sessions/{session}/turns", json=body).raise_for_status().json()["tokens"]


def talk(http: httpx.Client, session: str = "s") -> dict[str, Any]:
    """Returns a session with a past, as a file."""
    body = {"id": session, "system": "Be brief.", "ttl": 60, "priority": 2, "metadata": {"b": "1", "a": "é"}}
    http.post("/v1/sessions", json=body).raise_for_status()
    say(http, session, "hello")
    http.post(f"/v1/sessions/{session}/append", json={"input": [{"role": "user", "content": "and"}]})
    say(http, session, "again")
    http.post(f"/v1/sessions/{session}/rewind", json={"position": TOKENS}).raise_for_status()
    return exported(http, session)


def exported(http: httpx.Client, session: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/sessions/{session}/export").raise_for_status().json()
    return found


def put(http: httpx.Client, document: Any, **query: str) -> httpx.Response:
    return http.post("/v1/sessions/import", json=document, params=query)


def signed(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Applies changes to a file and gives it a matching checksum."""
    changed = msgspec.convert({**document, **changes}, SessionDocument)
    built: dict[str, Any] = msgspec.to_builtins(changed.signed(changed.model))
    return built


def shown(http: httpx.Client, session: str) -> dict[str, Any]:
    """Returns everything about a session that does not depend on where and when it runs."""
    view = http.get(f"/v1/sessions/{session}").raise_for_status().json()
    turns = http.get(f"/v1/sessions/{session}/turns").json()["data"]
    for turn in turns:
        del turn["resume_cost"]
    return {name: view[name] for name in ("version", "turns", "tokens", "priority", "ttl", "metadata")} | {"all": turns}


def test_an_imported_session_continues_as_the_exported_one_does_even_after_a_kill(
    witness: Server, http: httpx.Client, tmp_path: Path
) -> None:
    document = talk(http)
    journal = ("--journal", str(tmp_path / "journal"))
    with serving("--model", "witness", "--context-length", "4096", *journal) as other, other.client() as there:
        answer = put(there, document)
        assert (answer.status_code, answer.headers["location"]) == (201, "/v1/sessions/s")
        assert answer.json()["version"] == 4
        assert answer.headers["etag"] == '"4"'
        assert shown(there, "s") == shown(http, "s")
        assert exported(there, "s") == document
    with serving("--model", "witness", "--context-length", "4096", *journal) as other, other.client() as there:
        assert exported(there, "s") == document
        assert say(there, "s", "and then?") == say(http, "s", "and then?")
        assert exported(there, "s") == exported(http, "s")
        other.audit()
    close_all(http)


def test_an_export_leaves_out_an_open_turn(slow_http: httpx.Client) -> None:
    slow_http.post("/v1/sessions", json={"id": "busy"})
    slow_http.post("/v1/sessions/busy/append", json={"input": [1, 2, 3]})
    body = {"input": [4], "max_new_tokens": 3000, "on_disconnect": "continue"}
    with slow_http.stream("POST", "/v1/sessions/busy/turns", json=body) as answer:
        assert answer.status_code == 200
    assert [turn["input"] for turn in exported(slow_http, "busy")["turns"]] == [[1, 2, 3]]
    slow_http.delete("/v1/sessions/busy")


def test_one_file_can_be_imported_under_several_names(two: httpx.Client) -> None:
    document = talk(two)
    assert refusal(put(two, document)) == (409, "already_exists")
    assert put(two, document, id="other").json()["id"] == "other"
    assert exported(two, "other")["turns"] == document["turns"]
    assert refusal(put(two, document, id="a/b"))[0] == 400


def test_a_tenant_exports_only_its_own_sessions_and_imports_only_to_itself(
    one: httpx.Client, two: httpx.Client
) -> None:
    document = talk(two)
    assert refusal(one.get("/v1/sessions/s/export")) == (404, "not_found")
    assert put(one, document).status_code == 201
    say(one, "s", "mine")
    assert exported(two, "s") == document


def test_imported_sessions_and_tokens_count_against_limits(one: httpx.Client, two: httpx.Client) -> None:
    document = talk(two)
    for name in ("a", "b"):
        assert put(one, document, id=name).status_code == 201
    assert refusal(put(one, document, id="c")) == (429, "limit_reached")
    assert [session["id"] for session in one.get("/v1/sessions").json()["data"]] == ["a", "b"]
    one.post("/v1/sessions", json={"id": "empty"}).raise_for_status()
    assert refusal(put(one, signed(document, turns=[]))) == (429, "limit_reached")
    for name in "abcd":
        assert put(two, document, id=name).status_code == 201
    assert refusal(put(two, document, id="e")) == (429, "overloaded")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "0" * 64}, "another vocabulary"),
        ({"turns": [{"input": [1000], "output": [], "conversation": None, "cut": False}]}, "token id 1000"),
        ({"turns": [{"input": [1] * (CONTEXT + 1), "output": [], "conversation": None, "cut": False}]}, "allowed: 400"),
        ({"max_tokens": TOKENS - 1}, f"history and input have {TOKENS} tokens"),
        ({"turns": [{"input": [], "output": [], "conversation": None, "cut": False}]}, "turn without tokens"),
        ({"system": "word " * 5000}, "allowed"),
    ],
    ids=["model", "token", "context", "max_tokens", "empty", "system"],
)
def test_an_intact_file_that_does_not_fit_is_refused(two: httpx.Client, change: dict[str, Any], complaint: str) -> None:
    answer = put(two, signed(talk(two), **change), id="new")
    assert answer.status_code == 400
    assert complaint in answer.json()["error"]["message"]
    assert [session["id"] for session in two.get("/v1/sessions").json()["data"]] == ["s"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: {**d, "format": "tenuto-session-2"}, "format"),
        (lambda d: {**d, "version": d["version"] + 1}, "damaged"),
        (lambda d: {**d, "version": 2**70}, "version"),
        (lambda d: {**d, "turns": d["turns"][:-1]}, "damaged"),
        (lambda d: {**d, "sha256": ""}, "damaged"),
        (lambda d: {**d, "extra": 1}, "extra"),
        (lambda d: {name: d[name] for name in d if name != "turns"}, "turns"),
        (lambda d: {**d, "metadata": {"a": "1"} | {str(n): "" for n in range(20)}}, "metadata"),
        (lambda d: [d], "body"),
    ],
)
def test_a_changed_file_is_refused(two: httpx.Client, change: Callable[[Any], Any], complaint: str) -> None:
    answer = put(two, change(talk(two)), id="new")
    assert answer.status_code == 400
    assert complaint in answer.text
    assert len(two.get("/v1/sessions").json()["data"]) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_whatever_the_damage(two: httpx.Client, data: st.DataObject) -> None:
    close_all(two)
    document = talk(two)
    content = bytearray(json.dumps(document).encode())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place : place + data.draw(st.integers(1, 40))] = data.draw(st.binary(max_size=40))
    else:
        del content[place:]
    answer = two.post(
        "/v1/sessions/import?id=new", content=bytes(content), headers={"content-type": "application/json"}
    )
    if is_same(content, document):
        assert answer.status_code == 201
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert [session["id"] for session in two.get("/v1/sessions").json()["data"]] == ["s"]


def is_same(content: bytearray, document: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(content) == document)
    except ValueError:
        return False


BINARY = {"content-type": "application/octet-stream"}


def test_a_session_with_its_state_moves_to_another_server_and_survives_there(
    http: httpx.Client, tmp_path: Path
) -> None:
    talk(http)
    tokens = http.get("/v1/sessions/s").json()["computed"]
    file = http.get("/v1/sessions/s/export/state").raise_for_status()
    assert file.headers["content-length"] == str(len(file.content))
    options = (
        "--context-length",
        "4096",
        "--journal",
        str(tmp_path / "journal"),
        "--disk-tier",
        str(tmp_path / "tier"),
    )
    with serving("--model", "witness", *options, env={"TMPDIR": str(tmp_path)}) as other, other.client() as there:
        answer = there.post("/v1/sessions/import/state", content=file.content, headers=BINARY)
        assert (answer.status_code, answer.headers["location"]) == (201, "/v1/sessions/s")
        assert answer.json()["computed"] == tokens
        assert shown(there, "s") == shown(http, "s")
        assert other.stop() == 0
    with serving("--model", "witness", *options, env={"TMPDIR": str(tmp_path)}) as other, other.client() as there:
        body = {"input": [1, 2], "max_new_tokens": 4, "stream": False}
        turns = [each.post("/v1/sessions/s/turns", json=body).json() for each in (there, http)]
        assert turns[0]["tokens"] == turns[1]["tokens"]
        assert turns[0]["usage"]["cached_tokens"] == turns[1]["usage"]["cached_tokens"] == tokens
        assert there.get("/v1/sessions/s/export/state").status_code == 200
        other.audit()
    assert not list(tmp_path.glob("tenuto-*"))
    close_all(http)


def test_foreign_damaged_or_oversized_state_is_refused_and_changes_nothing(http: httpx.Client, tmp_path: Path) -> None:
    talk(http)
    content = http.get("/v1/sessions/s/export/state").content
    assert refusal(http.get("/v1/sessions/none/export/state")) == (404, "not_found")
    arguments = ("--page-size", "8", "--max-state-bytes", str(len(content)), "--journal", str(tmp_path / "journal"))
    with serving("--model", "witness", *arguments, env={"TMPDIR": str(tmp_path)}) as other, other.client() as there:

        def put_file(data: bytes, **headers: str) -> tuple[int, str]:
            answer = there.post("/v1/sessions/import/state", content=data, headers=BINARY | headers)
            return refusal(answer)

        assert put_file(content) == (400, "invalid_request")  # of other pages
        for damaged in (content[:-1], content[:-1] + b"\x00", b"", b"{}", content[:30]):
            assert put_file(damaged) == (400, "invalid_request")
        assert put_file(content + b"x") == (413, "too_large")
        assert put_file(content, **{"content-type": "application/json"}) == (415, "unsupported_media_type")
        answer = there.post("/v1/sessions/import/state", params={"id": "a/b"}, content=content, headers=BINARY)
        assert answer.status_code == 400
        assert there.get("/v1/sessions").json()["data"] == []
        other.audit()
    assert not list(tmp_path.glob("tenuto-*"))
    close_all(http)


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Limits files of this process to 1,000 bytes."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_answered_507_and_changes_nothing(witness: Server, http: httpx.Client) -> None:
    talk(http)
    content = http.get("/v1/sessions/s/export/state").raise_for_status().content
    assert len(content) > 1000
    here: dict[str, Any] = {"content": content, "headers": BINARY, "params": {"id": "again"}}
    with full_disk(witness.process.pid):
        answer = http.post("/v1/sessions/import/state", **here)
    assert refusal(answer) == (507, "no_room")
    assert answer.json()["error"]["message"].startswith("the server has no room for the file: ")
    with full_disk(witness.engine_pid):
        assert refusal(http.get("/v1/sessions/s/export/state")) == (507, "no_room")
    assert [each["id"] for each in http.get("/v1/sessions").json()["data"]] == ["s"]
    assert http.post("/v1/sessions/import/state", **here).status_code == 201
    close_all(http)


@pytest.mark.parametrize("where", ["session", "state", "tensors"])
def test_a_state_file_with_far_more_values_than_allowed_is_not_parsed(where: str, http: httpx.Client) -> None:
    talk(http)
    content = http.get("/v1/sessions/s/export/state").raise_for_status().content
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    many: list[Any] = [[]] * 150_000
    if where == "tensors":
        header["group 0"]["shape"] = many
    else:
        metadata = header["__metadata__"] = {**header["__metadata__"], where: json.dumps(many)}
        del metadata["sha256"]
        metadata["sha256"] = state_file._digest(metadata)
    start = json.dumps(header).encode()
    body = len(start).to_bytes(8, "little") + start + content[8 + length :]
    answer = http.post("/v1/sessions/import/state", content=body, headers=BINARY)
    assert refusal(answer) == (413, "too_large")
    close_all(http)


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        StateFile(tmp_path / "pipe")
