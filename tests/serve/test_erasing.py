"""Sessions that are erased, on a real server with a journal and tiers: nothing of them is left in any file."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tenuto
from tests.eventually import eventually
from tests.postgres import database
from tests.serve.replicas import replicas
from tests.serve.server import Server, serving

SECRET = "the heron keeps its amber lantern under the seventh bridge"


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Server]:
    """A server that writes everything it can to files below `tmp_path`."""
    tiers = ("--host-tier", "64MiB", "--disk-tier", str(tmp_path / "tier"), "--disk-tier-size", "64MiB")
    options = ("--journal", str(tmp_path / "journal"), *tiers, "--context-length", "4096")
    with serving("--model", "witness", *options) as server:
        yield server


def said(http: httpx.Client, session: str, tokens: list[int]) -> None:
    answer = http.post(f"/v1/sessions/{session}/turns", json={"input": tokens, "max_new_tokens": 8, "stream": False})
    assert answer.status_code == 200, answer.text


def history(http: httpx.Client, session: str) -> list[int]:
    turns = http.get(f"/v1/sessions/{session}/turns").json()["data"]
    return [token for turn in turns for token in (*turn["input_tokens"], *turn["output_tokens"])]


def contents(file: Path) -> bytes:
    """Returns what a file has; nothing if the server removes it meanwhile."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def found_in(folder: Path, needle: bytes) -> list[str]:
    return [each.name for each in folder.rglob("*") if each.is_file() and needle in contents(each)]


def windows(tokens: list[int]) -> Iterator[bytes]:
    """Yields the tokens as journals have them, and as names of units on disk have them, twelve at a time."""
    for first in range(0, len(tokens) - 11, 12):
        data = array("i", tokens[first : first + 12]).tobytes()
        yield from (data, data.hex().encode())


def erased(http: httpx.Client, session: str) -> dict[str, Any]:
    answer = http.delete(f"/v1/sessions/{session}?erase=true", timeout=60)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = answer.json()
    assert receipt["failed"] == []
    return receipt


def test_no_file_has_anything_of_an_erased_session(kept: Server, tmp_path: Path) -> None:
    with kept.client() as http:
        for name in ("stays", "goes-for-good"):
            http.post("/v1/sessions", json={"id": name, "metadata": {"about": f"{SECRET} {name}"}})
        for turn in range(12):
            said(http, "stays", [(turn * 31 + i * 7) % 200 for i in range(40)])
            said(http, "goes-for-good", [(turn * 17 + i * i) % 200 for i in range(40)])
        tokens = history(http, "goes-for-good")
        assert any(found_in(tmp_path, window) for window in windows(tokens))
        receipt = erased(http, "goes-for-good")
        assert receipt["tokens"] == len(tokens)
        assert receipt["journal_rows"] >= 12
        assert not any(found_in(tmp_path, window) for window in windows(tokens))
        assert not found_in(tmp_path, b"goes-for-good")
        assert found_in(tmp_path, f"{SECRET} stays".encode())
        assert http.get("/v1/sessions/goes-for-good").status_code == 404
        said(http, "stays", [1, 2, 3])
    kept.audit()


def test_no_file_has_the_messages_of_an_erased_session(smollm2_path: Path, tmp_path: Path) -> None:
    options = ("--model", str(smollm2_path), "--context-length", "2048", "--journal", str(tmp_path / "journal"))
    with serving(*options) as server, server.client() as http:
        for name in ("stays", "goes"):
            http.post("/v1/sessions", json={"id": name, "system": f"{SECRET} {name}"})
        for turn in range(6):
            for name in ("stays", "goes"):
                message = {"role": "user", "content": f"{turn}: {SECRET}, says {name}"}
                body = {"input": [message], "max_new_tokens": 4, "stream": False}
                http.post(f"/v1/sessions/{name}/turns", json=body).raise_for_status()
        tokens = history(http, "goes")
        assert any(found_in(tmp_path, window) for window in windows(tokens))
        present = b"".join(windows(history(http, "stays")))
        erased(http, "goes")
        assert not any(found_in(tmp_path, window) for window in windows(tokens) if window not in present)
        assert not found_in(tmp_path, b"says goes")
        assert not found_in(tmp_path, f"{SECRET} goes".encode())
        assert found_in(tmp_path, f"{SECRET} stays".encode())


def test_a_receipt_names_the_forks_that_still_share(kept: Server) -> None:
    with kept.client() as http:
        http.post("/v1/sessions", json={"id": "parent"})
        said(http, "parent", list(range(100)))
        http.post("/v1/sessions/parent/fork", json={"id": "child"})
        receipt = erased(http, "parent")
        (sharing,) = receipt["shared"]
        assert sharing["session"] == "child"
        assert sharing["tokens"] == receipt["tokens"]
        assert sum(sharing["units"].values()) > 0
        said(http, "child", [5, 6, 7])
        assert erased(http, "child")["shared"] == []


def test_a_receipt_names_forks_that_share_only_rows_of_the_journal(tmp_path: Path) -> None:
    with serving("--model", "witness", "--journal", str(tmp_path / "journal")) as server, server.client() as http:
        http.post("/v1/sessions", json={"id": "parent"})
        said(http, "parent", list(range(100)))
        common = len(history(http, "parent"))
        http.post("/v1/sessions/parent/fork", json={"id": "child"})
        said(http, "parent", [7] * 20)
        http.post("/flush_cache").raise_for_status()
        receipt = erased(http, "parent")
        (sharing,) = receipt["shared"]
        assert (sharing["session"], sharing["tokens"], sum(sharing["units"].values())) == ("child", common, 0)
        assert receipt["tokens"] == common + 28


def test_an_erased_session_is_gone_after_a_restart(tmp_path: Path) -> None:
    options = ("--model", "witness", "--journal", str(tmp_path / "journal"), "--disk-tier", str(tmp_path / "tier"))
    with serving(*options) as server, server.client() as http:
        http.post("/v1/sessions", json={"id": "goes"})
        said(http, "goes", list(range(64)))
        erased(http, "goes")
        server.kill_all()
    assert not any(found_in(tmp_path, window) for window in windows(list(range(64))))
    with serving(*options) as server, server.client() as http:
        assert http.get("/v1/sessions/goes").status_code == 404


def test_erasing_ends_the_open_turn_and_forgets_ended_ones(slow_http: httpx.Client) -> None:
    slow_http.post("/v1/sessions", json={"id": "erased"})
    said(slow_http, "erased", [1, 2, 3])
    path = "/v1/sessions/erased"
    body = {"input": [4], "max_new_tokens": 3000, "ignore_eos": True}
    with slow_http.stream("POST", f"{path}/turns", json=body) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("event: delta"))
        receipt = erased(slow_http, "erased")
        assert any(line.startswith("event: aborted") for line in lines)
    assert receipt["answers"] == 2
    assert slow_http.get(path).status_code == 404


def test_erase_and_finish_exclude_each_other(http: httpx.Client) -> None:
    http.post("/v1/sessions", json={"id": "both"})
    answer = http.delete("/v1/sessions/both?erase=true&finish=true")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert http.get("/v1/sessions/both").status_code == 200
    assert http.delete("/v1/sessions/both", params={"erase": True}, headers={"if-match": '"7"'}).status_code == 412


def test_both_python_clients_erase(witness: Server) -> None:
    with tenuto.connect(witness.url) as engine:
        session = engine.session(session_id="by-client")
        session.append([1, 2, 3])
        assert session.erase().tokens == 3
    with tenuto.Engine("witness") as engine:
        local = engine.session()
        local.append(list(range(30)))
        receipt = local.erase()
        assert receipt.tokens == 30
        assert sum(receipt.overwritten.values()) >= sum(receipt.held.values()) > 0
        assert receipt.failed == []


def test_no_file_of_a_fleet_has_anything_of_a_session_that_has_moved_and_was_erased(tmp_path: Path) -> None:
    options = ("--model", "witness", "--context-length", "4096", "--disk-tier", str(tmp_path))
    with replicas(database(), 3, *options, lease=60) as fleet:
        clients = [server.client() for server in fleet.servers]
        for name in ("stays", "goes-for-good"):
            clients[0].post("/v1/sessions", json={"id": name}).raise_for_status()
        for turn in range(6):
            said(clients[0], "stays", [(turn * 31 + i * 7) % 200 for i in range(40)])
            said(clients[0], "goes-for-good", [(turn * 17 + i * i) % 200 for i in range(40)])
        tokens = history(clients[0], "goes-for-good")
        eventually(lambda: any(found_in(tmp_path, window) for window in windows(tokens)))
        for server in (fleet.servers[1], fleet.servers[2]):
            moved = clients[0].post("/fleet/move", json={"session": "goes-for-good", "to": server.url})
            assert moved.status_code == 200, moved.text
            said(clients[0], "goes-for-good", [1, 2, 3])
        erased(clients[1], "goes-for-good")
        assert not any(found_in(tmp_path, window) for window in windows(tokens))
        said(clients[0], "stays", [1])
        fleet.servers[2].kill_all()
        (failed,) = clients[0].delete("/v1/sessions/stays?erase=true", timeout=60).json()["failed"]
        assert failed.startswith("replica ")
        assert fleet.servers[2].url in failed
        for client, server in zip(clients[:2], fleet.servers, strict=False):
            client.close()
            server.audit()
