"""The limits of a tenant hold in its fleet as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import httpx
import pytest

from tests.eventually import eventually
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.test_moves import Reader

LIMITS = {
    "opens": "sessions = 4",
    "holds": "tokens = 300",
    "pins": "pinned = 1",
    "runs": "turns = 3",
    "moves": "turns = 3",
    "waits": "queued = 1",
    "follows": "turns = 4, queued = 3",
    "dies": "turns = 2, sessions = 3",
}
"""By tenant."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        "".join(
            f"[[keys]]\ntenant = '{tenant}'\nkey = '{tenant}-key'\nlimits = {{ {limit} }}\n"
            for tenant, limit in LIMITS.items()
        )
    )
    options = ("--model", "witness:0.05", "--context-length", "8192", "--drain-seconds", "0.1")
    keys = ("--keys", str(path), "--admin-api-key", "admin-key")
    with replicas(database(), 2, *options, *keys, lease=6) as servers:
        yield servers


Clients = tuple[httpx.Client, httpx.Client]


@pytest.fixture
def asked(fleet: Replicas) -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


def clients(fleet: Replicas, closing: ExitStack, tenant: str) -> Clients:
    """Returns clients of a tenant at both replicas."""
    headers = {"authorization": f"Bearer {tenant}-key"}
    one, two = (closing.enter_context(server.client(headers=headers)) for server in fleet.servers)
    return one, two


def accepted(answer: httpx.Response) -> bool:
    """Whether a request was not refused by a limit."""
    if answer.status_code == 429:
        assert answer.json()["error"]["code"] == "limit_reached", answer.text
        return False
    answer.raise_for_status()
    return True


def opens(http: httpx.Client, *, pinned: bool = False) -> bool:
    """Whether a session can be opened, which is closed at once."""
    answer = http.post("/v1/sessions", json={"pinned": pinned})
    if accepted(answer):
        http.delete(f"/v1/sessions/{answer.json()['id']}").raise_for_status()
        return True
    return False


def starts(http: httpx.Client, session: str) -> bool:
    """Whether a turn can be started."""
    body = {"input": [1], "max_new_tokens": 1, "ignore_eos": True, "stream": False}
    return accepted(http.post(f"/v1/sessions/{session}/turns", json=body))


def refused(ask: Callable[..., bool], *arguments: object) -> bool:
    return not ask(*arguments)


def stream(http: httpx.Client, session: str) -> Reader:
    """Starts a turn that goes on, in a new session, and waits for its first tokens."""
    http.post("/v1/sessions", json={"id": session}).raise_for_status()
    body = {"input": [1], "max_new_tokens": 8000, "ignore_eos": True}
    reader = Reader(http, f"/v1/sessions/{session}/turns", body)
    reader.read_more(1)
    return reader


def test_sessions_at_other_replicas_count(fleet: Replicas, asked: ExitStack) -> None:
    one, two = clients(fleet, asked, "opens")
    for number, http in enumerate((one, one, one, two)):
        http.post("/v1/sessions", json={"id": f"s{number}"}).raise_for_status()
    for http in (one, two):
        eventually(partial(refused, opens, http))
    said = one.post("/v1/sessions", json={}).json()["error"]["message"]
    assert re.fullmatch(r"[45] sessions are open; allowed: 4; close some first", said)  # one was closed just now
    one.delete("/v1/sessions/s0").raise_for_status()
    for http in (one, two):
        eventually(partial(opens, http))


def test_tokens_at_other_replicas_count(fleet: Replicas, asked: ExitStack) -> None:
    one, two = clients(fleet, asked, "holds")
    for http, name in ((one, "large"), (two, "small")):
        http.post("/v1/sessions", json={"id": name}).raise_for_status()
    assert starts(two, "small")
    body = {"input": list(range(298)), "max_new_tokens": 1, "ignore_eos": True, "stream": False}
    one.post("/v1/sessions/large/turns", json=body).raise_for_status()
    eventually(lambda: not starts(two, "small"))
    assert not opens(two)
    one.delete("/v1/sessions/large").raise_for_status()
    eventually(lambda: starts(two, "small"))


def test_pinned_sessions_at_other_replicas_count(fleet: Replicas, asked: ExitStack) -> None:
    one, two = clients(fleet, asked, "pins")
    one.post("/v1/sessions", json={"id": "pinned", "pinned": True}).raise_for_status()
    eventually(lambda: not opens(two, pinned=True))
    assert opens(two)
    one.delete("/v1/sessions/pinned").raise_for_status()
    eventually(lambda: opens(two, pinned=True))


def test_turns_at_other_replicas_count(fleet: Replicas, asked: ExitStack) -> None:
    one, two = clients(fleet, asked, "runs")
    two.post("/v1/sessions", json={"id": "short"}).raise_for_status()
    assert starts(two, "short")
    for number in range(3):
        stream(one, f"long-{number}")
    eventually(lambda: not starts(two, "short"))
    said = two.post("/v1/sessions/short/turns", json={"input": [1]}).json()["error"]["message"]
    assert said == "3 turns are open, and 1 asked for; allowed: 3; wait for one to end"
    two.post("/v1/sessions/long-0/abort", json={"keep": "none"}).raise_for_status()
    eventually(lambda: starts(two, "short"))


def test_a_turn_that_has_moved_counts_once(fleet: Replicas, asked: ExitStack) -> None:
    one, two = clients(fleet, asked, "moves")
    (admin, _) = clients(fleet, asked, "admin")
    for number in range(3):
        stream(one, f"m{number}")
    two.post("/v1/sessions", json={"id": "short"}).raise_for_status()
    for number in range(2):
        body = {"session": f"m{number}", "tenant": "moves", "to": fleet.servers[1].url}
        admin.post("/fleet/move", json=body).raise_for_status()
    one.post("/v1/sessions", json={"id": "here"}).raise_for_status()
    for http, session in ((one, "here"), (two, "short")):
        eventually(partial(refused, starts, http, session))
    two.post("/v1/sessions/m2/abort", json={"keep": "none"}).raise_for_status()
    for http, session in ((one, "here"), (two, "short")):
        eventually(partial(starts, http, session))


def test_turns_that_wait_at_other_replicas_count(fleet: Replicas, asked: ExitStack) -> None:
    one, two = clients(fleet, asked, "waits")
    for http, name in ((one, "first"), (two, "second")):
        stream(http, name)
    body = {"input": [2], "max_new_tokens": 1, "if_busy": "queue"}
    waiting = Reader(one, "/v1/sessions/first/turns", body)

    def queues() -> bool:
        """Whether another turn may wait; it does so for a moment only."""
        answer = two.post("/v1/sessions/second/turns", json={**body, "stream": False, "queue_timeout": 0.01})
        return answer.status_code == 504 or accepted(answer)

    eventually(lambda: not queues())
    two.post("/v1/sessions/first/abort", json={"keep": "none"}).raise_for_status()
    waiting.whole()
    eventually(queues)


def test_turns_that_wait_for_a_session_follow_it_within_the_limits(fleet: Replicas, asked: ExitStack) -> None:
    one, two = clients(fleet, asked, "follows")
    (admin, _) = clients(fleet, asked, "admin")
    stream(one, "moving")
    body = {"input": [2], "max_new_tokens": 1, "ignore_eos": True, "if_busy": "queue"}
    waiting = [Reader(one, "/v1/sessions/moving/turns", body) for _ in range(3)]
    two.post("/v1/sessions", json={"id": "here"}).raise_for_status()
    eventually(lambda: not starts(two, "here"))  # so it counts all of them
    move = {"session": "moving", "tenant": "follows", "to": fleet.servers[1].url}
    admin.post("/fleet/move", json=move).raise_for_status()
    two.post("/v1/sessions/moving/abort", json={"keep": "none"}).raise_for_status()
    for reader in waiting:
        assert len(reader.whole()) == 1
    eventually(lambda: starts(two, "here"))


def test_what_a_dead_replica_ran_stops_counting_and_its_sessions_go_on_to(fleet: Replicas, asked: ExitStack) -> None:
    one, two = clients(fleet, asked, "dies")
    two.post("/v1/sessions", json={"id": "short"}).raise_for_status()
    for number in range(2):
        stream(one, f"d{number}")
    eventually(lambda: not starts(two, "short"))
    eventually(lambda: not opens(two))
    fleet.servers[0].kill_all()
    eventually(lambda: starts(two, "short"))
    eventually(lambda: not opens(two))
    assert two.get("/v1/sessions/d0").status_code == 200  # now it is here
    eventually(lambda: not opens(two))
    two.delete("/v1/sessions/d1").raise_for_status()
    eventually(lambda: opens(two))
    fleet.restart(0)
