"""Replicas of one fleet: every one serves every session, and none is lost with its owner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import psycopg
import pytest

from tests.cli.inside import run_inside
from tests.eventually import eventually
from tests.postgres import database
from tests.present import present
from tests.serve.killing_fleets import disturb
from tests.serve.replicas import Replicas, replicas
from tests.serve.test_killed_streams import witness_output
from tests.serve.test_session_sockets import answer, joined, send

SECRET = "a-secret-of-letters-and-9s"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    secret = tmp_path_factory.mktemp("fleet") / "secret"
    secret.write_text(f"{SECRET}\n")
    options = ("--context-length", "8192", "--drain-seconds", "0.1", "--fleet-secret-file", str(secret))
    with replicas(database(), 3, "--model", "witness:0.005", *options, lease=4) as servers:
        yield servers


@pytest.fixture
def clients(fleet: Replicas) -> Iterator[list[httpx.Client]]:
    with ExitStack() as closing:
        yield [closing.enter_context(server.client()) for server in fleet.servers]


def test_a_session_can_be_used_through_any_replica(clients: list[httpx.Client]) -> None:
    one, two, three = clients
    one.post("/v1/sessions", json={"id": "any"}).raise_for_status()
    assert two.post("/v1/sessions", json={"id": "any"}).status_code == 409
    body = {"input": [1, 2, 3], "max_new_tokens": 5, "stream": False}
    key = {"idempotency-key": "k"}
    first = two.post("/v1/sessions/any/turns", json=body, headers=key).raise_for_status().json()
    assert first["tokens"] == witness_output([1, 2, 3], 5)
    assert three.post("/v1/sessions/any/turns", json=body, headers=key).json() == first
    assert one.post("/v1/sessions/any/turns", json=body, headers={"if-match": '"0"'}).status_code == 412
    assert three.post("/v1/sessions/any/turns", json=body, headers={"if-match": '"0"'}).status_code == 412
    assert three.get(f"/v1/sessions/any/turns/{first['id']}").json() == first
    assert two.post("/v1/sessions/any/fork", json={"id": "child"}).status_code == 201
    assert three.get("/v1/sessions/child").json()["tokens"] == 8
    assert two.delete("/v1/sessions/any").status_code == 204
    assert [http.get("/v1/sessions/any").status_code for http in (one, two, three)] == [404] * 3


def test_sockets_and_other_interfaces_work_at_any_replica(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, *_ = clients
    one.post("/v1/sessions", json={"id": "socket"}).raise_for_status()
    for number, server in enumerate(fleet.servers):
        with joined(server, "socket") as socket:
            send(socket, "turn", input=[number], max_new_tokens=3)
            assert answer(socket)[-1]["data"]["version"] == number + 1
    one.post("/v1/sessions", json={"id": "chat"}).raise_for_status()
    message = {"role": "user", "content": "x"}
    chat = {"model": "default", "messages": [message], "session_id": "chat", "max_tokens": 2}
    answers = [http.post("/v1/chat/completions", json=chat).raise_for_status().json() for http in clients]
    assert {each["usage"]["completion_tokens"] for each in answers} == {2}
    assert one.get("/v1/sessions/chat").json()["version"] == len(answers)


def test_a_forwarded_request_needs_the_secret_of_the_fleet(clients: list[httpx.Client]) -> None:
    one, two, _ = clients
    one.post("/v1/sessions", json={"id": "secret"}).raise_for_status()
    for guess in ("a guess", "", SECRET[:-1]):
        assert two.get("/v1/sessions/secret", headers={"x-tenuto-fleet": guess}).status_code == 401
    forwarded = {"x-tenuto-fleet": SECRET}
    answer = two.get("/v1/sessions/secret", headers=forwarded)  # it goes no further
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "misdirected")
    assert one.get("/v1/sessions/secret", headers=forwarded).status_code == 200


def test_every_replica_shows_the_fleet(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, two, _ = clients
    one.post("/v1/sessions", json={"id": "shown"}).raise_for_status()
    seen = two.get("/fleet").raise_for_status().json()
    assert {each["url"] for each in seen["replicas"]} == {server.url for server in fleet.servers}
    assert seen["replica"] in {each["replica"] for each in seen["replicas"]}
    own = {each["url"]: each for each in seen["replicas"]}[fleet.servers[0].url]
    assert own["live"]
    assert own["sessions"] >= 1
    done = run_inside("fleet", "status", "--url", fleet.servers[2].url)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split()[:4] == ["replica", "url", "state", "sessions"]
    assert {line.split()[1] for line in lines} == {server.url for server in fleet.servers}
    assert {line.split()[2] for line in lines} == {"live"}


def listed(http: httpx.Client, **options: str) -> list[dict[str, Any]] | None:
    """Returns the sessions of `test_every_replica_lists_the_sessions_of_all`, read in small pages; `None` if a replica
    that may own some does not answer."""
    found: list[dict[str, Any]] = []
    after: str | None = "listed"
    while after is not None:
        page = http.get("/v1/sessions", params={"after": after, "limit": 2, **options})
        if page.status_code == 503:
            return None
        found += page.raise_for_status().json()["data"]
        after = page.json()["next"]
    return [session for session in found if session["id"].startswith("listed-")]


def test_every_replica_lists_the_sessions_of_all(fleet: Replicas, clients: list[httpx.Client]) -> None:
    names = [f"listed-{number}" for number in range(7)]
    for number, name in enumerate(names):
        clients[number % 3].post("/v1/sessions", json={"id": name}).raise_for_status()
    for http in clients:
        assert [session["id"] for session in present(listed(http))] == names
    stream = Stream("listed-0", 7000)
    stream.begin(clients[0], 5)
    (running,) = present(listed(clients[1], state="running"))
    assert (running["id"], running["turn_id"]) == ("listed-0", stream.turn)
    clients[1].post("/v1/sessions/listed-0/abort", json={"keep": "none"}).raise_for_status()
    said = {"input": [1, 2, 3], "max_new_tokens": 5, "stream": False}
    clients[2].post("/v1/sessions/listed-5/turns", json=said).raise_for_status()
    before = present(listed(clients[0]))
    fleet.servers[2].kill_all()
    eventually(lambda: listed(clients[0]) is not None)
    after = present(listed(clients[0]))
    assert [session["id"] for session in after] == names
    same = ("id", "state", "version", "turns", "tokens", "context_left", "max_tokens", "ttl", "metadata")
    assert [[session[field] for field in same] for session in after] == [
        [session[field] for field in same] for session in before
    ]
    assert [session["computed"] for session in (before[5], after[5])] == [7, 0]
    fleet.restart(2)


def test_sessions_of_a_killed_owner_end_with_their_time(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, _, owner = clients
    owner.post("/v1/sessions", json={"id": "brief", "ttl": 5}).raise_for_status()
    owner.post("/v1/sessions", json={"id": "lasting", "ttl": 5000}).raise_for_status()
    fleet.servers[2].kill_all()

    def open_ones() -> set[str]:
        with psycopg.connect(fleet.url) as connection:
            return {name for (name,) in connection.execute("SELECT name FROM sessions")}

    assert "brief" in open_ones()
    eventually(lambda: "brief" not in open_ones())  # nobody has asked for it
    assert "lasting" in open_ones()
    assert one.get("/v1/sessions/lasting").status_code == 200
    fleet.restart(2)


def test_a_load_balancer_can_ask_for_owners_and_readiness(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, two, _ = clients
    one.post("/v1/sessions", json={"id": "asked"}).raise_for_status()
    for http in clients:
        assert http.get("/fleet/sessions/asked").json() == {"session": "asked", "url": fleet.servers[0].url}
        assert http.get("/fleet/ready").status_code == 200
    one.delete("/v1/sessions/asked").raise_for_status()
    assert two.get("/fleet/sessions/asked").json() == {"session": "asked", "url": None}


def test_forwarded_requests_are_counted(clients: list[httpx.Client]) -> None:
    one, two, _ = clients
    one.post("/v1/sessions", json={"id": "counted"}).raise_for_status()
    before = forwarded(one), forwarded(two)
    for http in (one, two, two):
        http.get("/v1/sessions/counted").raise_for_status()
    assert (forwarded(one), forwarded(two)) == (before[0], before[1] + 2)


def forwarded(http: httpx.Client) -> int:
    """Returns how many requests a replica has forwarded."""
    (count,) = re.findall(r"^tenuto_forwarded_requests_total (\S+)", http.get("/metrics").text, re.MULTILINE)
    return int(float(count))


def test_acknowledged_turns_survive_replicas_that_are_killed_or_asleep(fleet: Replicas) -> None:
    kinds = ("kill", "pause the engine")
    assert disturb(fleet, len(kinds), seed=1, kinds=kinds).turns > 0


class Stream:
    """A turn that goes on without readers, and what has been read of it. `last`: the id of the last event."""

    def __init__(self, session: str, tokens: int) -> None:
        self._path = f"/v1/sessions/{session}/turns"
        self._body = {"input": [7], "max_new_tokens": tokens, "ignore_eos": True, "on_disconnect": "continue"}
        self._last = ""
        self.turn = ""
        self.output: list[int] = []

    def begin(self, http: httpx.Client, most: int) -> None:
        """Starts the turn, and reads so many tokens at least."""
        with http.stream("POST", self._path, json={**self._body, "temperature": 1}) as answer:
            self.turn = answer.headers["x-turn-id"]
            self._read(answer.iter_lines(), most)

    def resume(self, http: httpx.Client) -> None:
        """Reads the rest."""
        path, last = f"{self._path}/{self.turn}/events", {"last-event-id": self._last}
        with http.stream("GET", path, headers=last) as answer:
            assert answer.status_code == 200, answer.read()
            self._read(answer.iter_lines(), 10_000)

    def _read(self, lines: Iterator[str], most: int) -> None:
        for line in lines:
            kind, _, value = line.partition(": ")
            if kind == "id":
                self._last = value
            elif kind == "data" and "delivered" in (told := msgspec.json.decode(value)):
                self.output += told["tokens"]
                if len(self.output) >= most:
                    return


def test_a_stream_of_a_killed_owner_goes_on_elsewhere(fleet: Replicas, clients: list[httpx.Client]) -> None:
    owner, other, third = clients
    owner.post("/v1/sessions", json={"id": "killed"}).raise_for_status()
    stream = Stream("killed", 300)
    stream.begin(other, 20)
    fleet.servers[0].kill_all()
    stream.resume(third)
    (record,) = other.get("/v1/sessions/killed/turns").json()["data"]
    assert record["output_tokens"] == stream.output
    assert len(stream.output) == 300
    again = third.get(f"/v1/sessions/killed/turns/{stream.turn}").json()
    assert (again["state"], again["tokens"]) == ("committed", stream.output)


def test_a_stream_goes_on_elsewhere_when_its_owner_is_asked_to_end(
    fleet: Replicas, clients: list[httpx.Client]
) -> None:
    _, owner, other = clients
    owner.post("/v1/sessions", json={"id": "ended"}).raise_for_status()
    stream = Stream("ended", 1000)
    stream.begin(owner, 20)
    assert fleet.servers[1].stop() == 0
    stream.resume(other)
    assert len(stream.output) == 1000
    (record,) = other.get("/v1/sessions/ended/turns").json()["data"]
    assert record["output_tokens"] == stream.output
