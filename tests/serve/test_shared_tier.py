"""Replicas on machines without a common file system go on with state from a store that they share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.eventually import eventually
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.server import Server
from tests.serve.test_killed_streams import witness_output
from tests.serve.test_left_state import ask, assert_continues, end_and_begin_again, opened


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def fleet(tmp_path: Path, store: Path) -> Iterator[Replicas]:
    options = ("--model", "witness", "--page-size", "8", "--context-length", "4096", "--shared-tier", store.as_uri())
    with replicas(database(), 2, *options, own=lambda number: ("--disk-tier", str(tmp_path / str(number)))) as servers:
        yield servers


def metrics(server: Server) -> dict[str, float]:
    """Returns the metrics of the shared tier."""
    with server.client() as http:
        text = http.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^tenuto_(shared_tier_\S+) (\S+)$", text, re.MULTILINE)}


def computed(server: Server) -> float:
    with server.client() as http:
        found = re.search(r"^tenuto_computed_tokens_total (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def uploaded(server: Server, sessions: int, store: Path) -> None:
    """Waits until the store has what the disk tier of a replica has saved of so many sessions."""
    eventually(lambda: len(list(store.glob("*/*.session"))) == sessions and not metrics(server)["shared_tier_waiting"])


def test_a_session_of_a_killed_replica_goes_on_with_state_from_the_store(
    fleet: Replicas, tmp_path: Path, store: Path
) -> None:
    one, two = fleet.servers
    history = {session: opened(one, session, tmp_path / "0") for session in ("a", "another")}
    uploaded(one, 2, store)
    one.kill_all()
    for session, tokens in history.items():
        assert_continues(two, session, tokens, cached=len(tokens) - 1)
    assert computed(two) == 2 * (1 + 2 + 4)  # what no state has, the input, and the output without its last token
    assert metrics(two)['shared_tier_bytes_total{direction="downloaded"}'] > 0
    two.audit()
    eventually(lambda: len(list(store.iterdir())) == 1)  # what the first replica had


def test_a_fleet_that_was_ended_goes_on_with_what_its_last_replica_has_uploaded(
    fleet: Replicas, tmp_path: Path, store: Path
) -> None:
    history = opened(fleet.servers[0], "s", tmp_path / "0")
    end_and_begin_again(fleet)
    assert_continues(fleet.servers[0], "s", history, cached=len(history) - 1)


def test_objects_of_a_closed_session_are_removed(fleet: Replicas, tmp_path: Path, store: Path) -> None:
    one, _ = fleet.servers
    for session in ("kept", "closed", "erased"):
        opened(one, session, tmp_path / "0")
    uploaded(one, 3, store)
    with one.client() as http:
        http.delete("/v1/sessions/closed").raise_for_status()
        http.delete("/v1/sessions/erased?erase=true").raise_for_status()
    uploaded(one, 1, store)
    files = {path.name for path in (tmp_path / "0").glob("*/*.units")}
    eventually(lambda: {path.name for path in store.glob("*/*.units")} == files)
    assert {path.read_bytes() for path in store.glob("*/*.units")} == {
        path.read_bytes() for path in (tmp_path / "0").glob("*/*.units")
    }


def test_damaged_objects_are_not_used(fleet: Replicas, tmp_path: Path, store: Path) -> None:
    one, two = fleet.servers
    history = {session: opened(one, session, tmp_path / "0") for session in ("damaged", "not-listed")}
    uploaded(one, 2, store)
    one.kill_all()
    for file in store.glob("*/*.units"):
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    for session, tokens in history.items():
        assert_continues(two, session, tokens, cached=0)
        for listing in store.glob("*/*.session"):
            listing.write_bytes(b"{}")
    two.audit()


def test_turns_go_on_while_the_store_fails(fleet: Replicas, tmp_path: Path, store: Path) -> None:
    one, _ = fleet.servers
    eventually(lambda: not metrics(one)["shared_tier_waiting"])
    store.rename(tmp_path / "gone")
    store.write_text("no directory")
    history = opened(one, "s", tmp_path / "0")
    eventually(lambda: metrics(one).get('shared_tier_failures_total{operation="write"}', 0) > 0)
    answer = ask(one, "s", [1, 2])
    assert answer["tokens"] == witness_output([*history, 1, 2], 5)
    store.unlink()
    (tmp_path / "gone").rename(store)
    uploaded(one, 1, store)
