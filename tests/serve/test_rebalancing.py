"""Replicas with much more to do than others move sessions there by themselves."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import httpx

from tests.eventually import eventually
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.test_killed_streams import witness_output
from tests.serve.test_moves import Reader

LEASE = 6


def seen(fleet: Replicas, http: httpx.Client) -> list[dict[str, Any]]:
    """Returns what the fleet shows about its replicas, in the order of `fleet.servers`."""
    found = {each["url"]: each for each in http.get("/fleet").raise_for_status().json()["replicas"]}
    return [found[server.url] for server in fleet.servers]


def test_streams_that_all_began_at_one_replica_spread_over_both() -> None:
    options = ("--model", "witness:0.05", "--context-length", "8192", "--max-running", "2")
    with replicas(database(), 2, *options, lease=LEASE, rebalance=True) as fleet, ExitStack() as closing:
        one, two = (closing.enter_context(server.client()) for server in fleet.servers)
        body = {"max_new_tokens": 8000, "ignore_eos": True}
        readers = []
        for number in range(4):
            one.post("/v1/sessions", json={"id": f"s{number}"}).raise_for_status()
            readers.append(Reader(one, f"/v1/sessions/s{number}/turns", {**body, "input": [number, 5]}))

        def turns() -> list[int]:
            return [each["running"] + each["waiting"] for each in seen(fleet, two)]

        eventually(lambda: turns() == [2, 2])
        eventually(lambda: all(len(reader.tokens) > 20 for reader in readers))  # with rows for two, none waits
        for number, reader in enumerate(readers):
            two.post(f"/v1/sessions/s{number}/abort", json={"keep": "all"}).raise_for_status()
            whole = reader.whole()
            assert whole == witness_output([number, 5], len(whole))
        eventually(lambda: [each["sessions"] for each in seen(fleet, one)] == [2, 2])
        assert [each["moves"]["done"] for each in seen(fleet, one)] == [2, 0]
        for server in fleet.servers:
            server.audit()


def test_idle_sessions_move_where_there_is_memory_and_keep_their_state() -> None:
    memory = ("--memory", str(40 * 2**10), "--page-size", "8", "--context-length", "256", "--max-running", "2")
    with (
        replicas(database(), 2, "--model", "witness", *memory, lease=LEASE, rebalance=True) as fleet,
        ExitStack() as closing,
    ):
        one, two = (closing.enter_context(server.client()) for server in fleet.servers)
        (pool,) = one.get("/audit").json()["pools"]
        assert pool["capacity"] == 320
        for number in range(20):  # of 14 pages each
            one.post("/v1/sessions", json={"id": f"s{number}"}).raise_for_status()
            given = list(range(number, number + 100))
            body = {"input": given, "max_new_tokens": 5, "ignore_eos": True, "stream": False}
            answer = one.post(f"/v1/sessions/s{number}/turns", json=body).raise_for_status().json()
            assert answer["tokens"] == witness_output(given, 5)
        eventually(lambda: seen(fleet, two)[0]["used"] < 0.6)
        eventually(lambda: seen(fleet, two)[1]["used"] > 0.3)
        assert seen(fleet, two)[1]["moves"]["done"] == 0
        for number in range(20):
            body = {"input": [7], "max_new_tokens": 1, "ignore_eos": True, "stream": False}
            answer = two.post(f"/v1/sessions/s{number}/turns", json=body).raise_for_status().json()
            assert answer["usage"]["cached_tokens"] == 104
        for server in fleet.servers:
            server.audit()
