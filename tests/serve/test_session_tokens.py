"""A session's tokens for trainers, over HTTP and by the clients: who made each, with what, and the tree of forks."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.ipc
import pyarrow.parquet
import pytest

import tenuto
from tenuto.base import arrow
from tenuto.base.errors import ExtraMissing, NotAcceptable
from tenuto.base.tokens import PackedTokens, SessionTokens
from tenuto.base.turns import OutputSpan
from tenuto.serve.native.tokens import FORMATS, accepted
from tests.serve.server import Server, serving

STREAM, PARQUET = "application/vnd.apache.arrow.stream", "application/vnd.apache.parquet"


@pytest.fixture(scope="module")
def trained() -> Iterator[Server]:
    """A separate server, since its weights are replaced."""
    with serving("--model", "witness", "--context-length", "512") as server:
        yield server
        server.audit()


@pytest.fixture
def http(trained: Server) -> Iterator[httpx.Client]:
    with trained.client() as client:
        yield client


def opened(http: httpx.Client, **body: Any) -> str:
    """Opens a session, and returns its id."""
    return str(http.post("/v1/sessions", json=body).raise_for_status().json()["id"])


def say(http: httpx.Client, session: str, given: list[int], **body: Any) -> list[int]:
    """Runs a turn, and returns its output."""
    body = {"input": given, "max_new_tokens": 5, "ignore_eos": True, "stream": False, **body}
    return list(http.post(f"/v1/sessions/{session}/turns", json=body).raise_for_status().json()["tokens"])


def tokens_of(http: httpx.Client, session: str) -> dict[str, Any]:
    return dict(http.get(f"/v1/sessions/{session}/tokens").raise_for_status().json())


def update(http: httpx.Client, path: str, **body: Any) -> str:
    """Replaces the weights; returns the version."""
    answer = http.post("/update_weights_from_disk", json={"model_path": path, **body}).raise_for_status().json()
    return str(answer["weight_version"])


def test_tokens_are_listed_with_what_made_them(http: httpx.Client) -> None:
    session = opened(http)
    first = say(http, session, [1, 2, 3], logprobs=0, temperature=1.0, seed=77)
    version = update(http, "one", keep_state=True, weight_version="step 1")
    assert version == "step 1"
    second = say(http, session, [4])
    http.post(f"/v1/sessions/{session}/append", json={"input": [5, 6]}).raise_for_status()
    found = tokens_of(http, session)
    assert [(turn["turn"], turn["input_ids"], turn["output_ids"]) for turn in found["turns"]] == [
        (1, [1, 2, 3], first),
        (2, [4], second),
        (3, [5, 6], []),
    ]
    one, two, three = found["turns"]
    assert (one["seed"], two["seed"], three["seed"]) == (77, None, None)
    assert one["logprobs"] == [0.0] * 5  # the witness is certain
    assert (two["logprobs"], three["logprobs"]) == (None, None)
    assert one["weight_versions"] != two["weight_versions"] == [{"output_tokens": 5, "weight_version": "step 1"}]
    assert three["weight_versions"] == [{"output_tokens": 0, "weight_version": "step 1"}]
    assert found["weight_version"] == "step 1"
    assert [span["start"] for span in found["state"]] == [0, 7]
    assert found["state"][1]["weight_version"] == "step 1"
    assert found["computed_tokens"] <= len(first) + len(second) + 6 - 1
    assert (found["parent"], found["children"]) == (None, [])
    http.delete(f"/v1/sessions/{session}")


def test_a_turn_says_which_weights_have_sampled_it(http: httpx.Client) -> None:
    session = opened(http)
    version = update(http, "two")
    body = {"input": [1, 2], "max_new_tokens": 3, "ignore_eos": True, "stream": False}
    answer = http.post(f"/v1/sessions/{session}/turns", json=body).raise_for_status().json()
    assert answer["weight_versions"] == [{"output_tokens": 3, "weight_version": version}]
    http.delete(f"/v1/sessions/{session}")


def test_the_tree_of_forks(http: httpx.Client) -> None:
    root = opened(http, id="root")
    for number in range(3):
        say(http, root, [number])
    http.post("/v1/sessions/root/fork", json={"id": "a", "turn": 1}).raise_for_status()
    http.post("/v1/sessions/root/fork", json={"id": "b", "position": 8}).raise_for_status()
    http.post("/v1/sessions/a/fork", json={"id": "a1"}).raise_for_status()

    def fork(session: str, turn: int, position: int, *, is_open: bool = True) -> dict[str, Any]:
        return {"session": session, "turn": turn, "position": position, "open": is_open}

    assert tokens_of(http, "root")["children"] == [fork("a", 1, 6), fork("b", 2, 8)]
    assert tokens_of(http, "a")["parent"] == fork("root", 1, 6)
    assert tokens_of(http, "a")["children"] == [fork("a1", 1, 6)]
    assert tokens_of(http, "b")["turns"][1]["output_ids"] == tokens_of(http, "root")["turns"][1]["output_ids"][:1]
    http.delete("/v1/sessions/b").raise_for_status()
    assert tokens_of(http, "root")["children"] == [fork("a", 1, 6)]
    http.delete("/v1/sessions/root").raise_for_status()
    assert tokens_of(http, "a")["parent"] == fork("root", 1, 6, is_open=False)
    opened(http, id="root")  # another one
    assert tokens_of(http, "root")["children"] == []
    assert tokens_of(http, "a")["parent"]["open"] is False
    for session in ("root", "a", "a1"):
        http.delete(f"/v1/sessions/{session}").raise_for_status()


@pytest.mark.parametrize("media", [STREAM, PARQUET])
def test_tokens_as_a_table(http: httpx.Client, media: str) -> None:
    session = opened(http)
    say(http, session, [1, 2, 3], logprobs=0, temperature=0.5, seed=5)
    say(http, session, [4])
    http.post(f"/v1/sessions/{session}/fork", json={}).raise_for_status()
    answer = http.get(f"/v1/sessions/{session}/tokens", headers={"accept": media}).raise_for_status()
    assert answer.headers["content-type"] == media
    table = (
        pyarrow.ipc.open_stream(answer.content).read_all()
        if media == STREAM
        else pyarrow.parquet.read_table(io.BytesIO(answer.content))
    )
    as_json = tokens_of(http, session)
    version = as_json["turns"][0]["weight_versions"][0]["weight_version"]
    rows = []
    for turn in as_json["turns"]:
        logprobs = turn["logprobs"] or [None] * len(turn["output_ids"])
        rows += [(turn["turn"], token, False, None, None, None) for token in turn["input_ids"]]
        pairs = zip(turn["output_ids"], logprobs, strict=True)
        rows += [(turn["turn"], token, True, logprob, turn["seed"], version) for token, logprob in pairs]
    names = ("turn", "token_id", "sampled", "logprob", "seed", "weight_version")
    assert list(zip(*(table[name].to_pylist() for name in names), strict=True)) == rows
    assert table["position"].to_pylist() == list(range(len(rows)))
    about = json.loads(table.schema.metadata[arrow.ABOUT])
    assert about == {name: value for name, value in as_json.items() if name != "turns"}
    assert len(about["children"]) == 1


def test_an_empty_session_has_an_empty_table(http: httpx.Client) -> None:
    session = opened(http)
    answer = http.get(f"/v1/sessions/{session}/tokens", headers={"accept": STREAM}).raise_for_status()
    assert pyarrow.ipc.open_stream(answer.content).read_all().num_rows == 0
    assert tokens_of(http, session)["turns"] == []


@pytest.mark.parametrize(
    ("header", "media"),
    [
        ("*/*", "application/json"),
        ("text/html, application/*;q=0.5", "application/json"),
        (f"application/json;q=0.2, {PARQUET}", PARQUET),
        (f"{STREAM};q=0.9, {PARQUET};q=0.8, */*;q=0.1", STREAM),
        (f"{STREAM.upper()} ; Q=1", STREAM),
    ],
)
def test_the_preferred_format_is_chosen(header: str, media: str) -> None:
    assert accepted(header) == media


@pytest.mark.parametrize("header", ["text/html", "application/json;q=0", "application/json;q=much", ""])
def test_a_request_that_accepts_no_format_is_refused(header: str, http: httpx.Client) -> None:
    with pytest.raises(NotAcceptable, match="allowed: application/json, "):
        accepted(header)
    if header:
        answer = http.get("/v1/sessions/none/tokens", headers={"accept": header})
        assert (answer.status_code, answer.json()["error"]["code"]) == (406, "not_acceptable")


def test_sessions_that_do_not_exist_have_no_tokens(http: httpx.Client) -> None:
    assert http.get("/v1/sessions/none/tokens").status_code == 404


def test_a_server_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    nothing = PackedTokens(
        session="s",
        version=0,
        weight_version="default",
        computed_tokens=0,
        state=[],
        turns=[],
        parent=None,
        children=[],
        tokens=b"",
    )
    for media in (STREAM, PARQUET):
        with pytest.raises(ExtraMissing, match=r"install tenuto\[arrow\]") as caught:
            FORMATS[media](nothing)
        assert caught.value.status == 501


@pytest.fixture(params=["here", "server"])
def engine(request: pytest.FixtureRequest, trained: Server) -> Iterator[Any]:
    if request.param == "server":
        with tenuto.connect(trained.url) as remote:
            yield remote
    else:
        with tenuto.Engine("witness", context_length=512) as local:
            yield local


def test_clients_list_tokens_and_keep_state(engine: Any) -> None:
    with engine.session() as session:
        first = list(session.turn([1, 2, 3], max_new_tokens=4, ignore_eos=True, logprobs=0).tokens())
        before = session.tokens()
        version = engine.update_weights_from_disk("three", weight_version="3", keep_state=True)
        again = session.turn([4], max_new_tokens=4, ignore_eos=True)
        second = list(again.tokens())
        assert again.result().usage.cached == 6
        assert again.result().weight_versions == (OutputSpan(4, "3"),)
        with session.fork() as fork:
            found = session.tokens()
            assert isinstance(found, SessionTokens)
            assert found.token_ids == session.history == [1, 2, 3, *first, 4, *second]
            assert found.turns[0] == before.turns[0]
            assert found.turns[0].logprobs == [0.0] * 4
            assert found.turns[1].weight_versions == [OutputSpan(4, version)]
            assert [child.session for child in found.children] == [fork.id]
            assert fork.tokens().parent is not None
            assert fork.tokens().turns == found.turns
        with pytest.raises(tenuto.errors.InvalidRequest, match="weight_version"):
            engine.update_weights_from_disk("four", weight_version="")
        assert session.tokens().weight_version == "3"


def test_asynchronous_clients_list_tokens(trained: Server) -> None:
    async def run() -> None:
        async with tenuto.connect_async(trained.url) as engine:
            session = await engine.session()
            await session.append([1, 2, 3])
            found = await session.tokens()
            assert (found.token_ids, found.turns[0].output_ids) == ([1, 2, 3], [])
            assert await engine.update_weights_from_disk("five", weight_version="5", keep_state=True) == "5"
            await session.close()

    asyncio.run(run())


def test_what_is_known_of_tokens_outlives_the_server(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    with serving("--model", "witness", "--journal", journal) as server, server.client() as http:
        opened(http, id="s")
        say(http, "s", [1, 2, 3], logprobs=0, temperature=1.0, seed=11)
        update(http, "new", weight_version="trained")
        say(http, "s", [4])
        http.post("/v1/sessions/s/fork", json={"id": "fork", "turn": 1}).raise_for_status()
        say(http, "fork", [5], logprobs=0)
        before = {name: tokens_of(http, name) for name in ("s", "fork")}
        assert before["s"]["turns"][1]["weight_versions"] == [{"output_tokens": 5, "weight_version": "trained"}]
    with serving("--model", "witness", "--journal", journal) as server, server.client() as http:
        for name, found in before.items():
            now = tokens_of(http, name)
            for field in ("turns", "parent", "children", "version"):
                assert now[field] == found[field]
            assert now["state"] == []
            assert now["weight_version"] == "default"
