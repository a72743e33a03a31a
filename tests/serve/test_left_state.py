"""Replicas that share a directory for saved state go on with what a replica that is gone has saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenuto.memory.tiers.state_index import SUFFIXES, StateIndex
from tenuto.memory.tiers.unit_files import INDEX
from tests.eventually import eventually
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.server import END_SECONDS, Server
from tests.serve.test_killed_streams import witness_output

TOKENS = 400
OPTIONS = ("--model", "witness", "--page-size", "8", "--context-length", "4096", "--disk-tier")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def fleet(shared: Path) -> Iterator[Replicas]:
    with replicas(database(), 2, *OPTIONS, str(shared)) as servers:
        yield servers


def ask(server: Server, session: str, given: list[int]) -> Any:
    """Returns the answer to a turn."""
    body = {"input": given, "max_new_tokens": 5, "ignore_eos": True, "stream": False}
    with server.client() as http:
        return http.post(f"/v1/sessions/{session}/turns", json=body).raise_for_status().json()


def assert_continues(server: Server, session: str, history: list[int], cached: int) -> None:
    """Checks that a turn continues the history of a session, and finds the state of `cached` tokens."""
    answer = ask(server, session, [1, 2])
    assert answer["tokens"] == witness_output([*history, 1, 2], 5)
    assert answer["usage"]["cached_tokens"] == cached


def opened(server: Server, session: str, shared: Path) -> list[int]:
    """Opens a session, and returns its history after a turn, once its state is saved."""
    with server.client() as http:
        http.post("/v1/sessions", json={"id": session}).raise_for_status()
    given = [len(session), *range(1, TOKENS)]  # no session has another's beginning
    history = [*given, *ask(server, session, given)["tokens"]]
    eventually(lambda: saved(session, shared) == len(history) - 1)
    return history


def end_and_begin_again(fleet: Replicas) -> None:
    """Ends the replicas one after another, so that sessions move to the last one, and starts the first one again."""
    for server in fleet.servers:
        server.process.terminate()
        assert server.process.wait(END_SECONDS) == 0
    fleet.restart(0)


def refusal(answer: httpx.Response) -> Any:
    """Returns the code of an error."""
    return answer.json()["error"]["code"]


def saved(session: str, shared: Path) -> int:
    """Returns the number of tokens of a session whose state a replica has saved."""
    indices = [StateIndex.copy_of(path) for path in shared.glob(f"*/{INDEX}")]
    found = [index.find(("default", session)) for index in indices]
    return max((listed.position for listed in found if listed is not None), default=0)


def test_a_session_of_a_killed_replica_goes_on_with_its_saved_state(fleet: Replicas, shared: Path) -> None:
    one, two = fleet.servers
    history = {session: opened(one, session, shared) for session in ("a", "another")}
    assert len(list(shared.iterdir())) == 2
    one.kill_all()
    for session, tokens in history.items():
        assert_continues(two, session, tokens, cached=len(tokens) - 1)
    two.audit()
    eventually(lambda: len(list(shared.iterdir())) == 1)


def test_a_fleet_that_was_ended_goes_on_with_what_its_last_replica_has_saved(fleet: Replicas, shared: Path) -> None:
    history = opened(fleet.servers[0], "s", shared)
    end_and_begin_again(fleet)
    assert_continues(fleet.servers[0], "s", history, cached=len(history) - 1)


def test_a_session_that_a_drained_replica_gave_up_goes_on_elsewhere_with_its_saved_state(shared: Path) -> None:
    """At first the other replica has no room for it: when the drain begins, and when a client asks for it."""
    with replicas(database(), 2, *OPTIONS, str(shared), "--max-sessions", "2") as fleet:
        one, two = fleet.servers
        history = opened(one, "s", shared)
        with two.client() as http:
            for name in ("a", "b"):
                http.post("/v1/sessions", json={"id": name}).raise_for_status()
            assert one.stop() == 0
            assert refusal(http.get("/v1/sessions/s")) == "overloaded"
            http.delete("/v1/sessions/a").raise_for_status()
            eventually(lambda: http.get("/v1/sessions/s").status_code == 200)
        assert_continues(two, "s", history, cached=len(history) - 1)
        two.audit()


def test_damaged_state_is_computed_again(fleet: Replicas, shared: Path) -> None:
    one, two = fleet.servers
    history = {session: opened(one, session, shared) for session in ("damaged", "not-listed")}
    one.kill_all()
    files = list(shared.glob("*/*.units"))
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    for session, tokens in history.items():
        assert_continues(two, session, tokens, cached=0)
        for suffix in SUFFIXES:
            (files[0].parent / f"{INDEX}{suffix}").write_bytes(b"no index")
    two.audit()
