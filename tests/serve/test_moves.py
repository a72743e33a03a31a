"""Sessions move between replicas, with their open turns, and no client notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.eventually import eventually
from tests.exec.kernels import EXACT
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas
from tests.serve.test_killed_streams import witness_output


@pytest.fixture(scope="module")
def fleet() -> Iterator[Replicas]:
    with replicas(database(), 2, "--model", "witness:0.01", "--context-length", "8192", lease=20) as servers:
        yield servers


@pytest.fixture
def clients(fleet: Replicas) -> Iterator[list[httpx.Client]]:
    with ExitStack() as closing:
        yield [closing.enter_context(server.client()) for server in fleet.servers]


def move(fleet: Replicas, http: httpx.Client, session: str, to: int) -> httpx.Response:
    return http.post("/fleet/move", json={"session": session, "to": fleet.servers[to].url})


class Reader(threading.Thread):
    """Reads the events of a turn while other things happen."""

    def __init__(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._ask = lambda: http.stream("POST", path, json=body)
        self.tokens: list[int] = []
        self.names: list[str] = []
        self.text = ""
        self.ids: list[int] = []
        self.error: BaseException | None = None
        self.last: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        try:
            with self._ask() as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    kind, _, value = line.partition(": ")
                    if kind == "event":
                        self.names.append(value)
                    elif kind == "id":
                        self.ids.append(int(value))
                    elif kind == "data":
                        self.last = msgspec.json.decode(value)
                        if self.names[-1] == "delta":
                            self.tokens += self.last["tokens"]
                            self.text += self.last["text"]
        except BaseException as error:  # noqa: BLE001 - raised by `whole`
            self.error = error

    def read_more(self, tokens: int) -> None:
        """Waits until so many more tokens have come."""
        wanted = len(self.tokens) + tokens
        eventually(lambda: len(self.tokens) > wanted)

    def whole(self) -> list[int]:
        """Waits for the end of the turn, and returns its tokens."""
        self.join(60)
        if self.error is not None:
            raise self.error
        assert not self.is_alive()
        assert self.names[-1] == "committed", (self.names[-3:], self.last)
        assert self.ids == sorted(self.ids)
        return self.tokens


def test_an_idle_session_moves_with_its_state(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, two = clients
    one.post("/v1/sessions", json={"id": "idle"}).raise_for_status()
    body = {"input": list(range(100)), "max_new_tokens": 5, "ignore_eos": True, "stream": False}
    key = {"idempotency-key": "k"}
    first = one.post("/v1/sessions/idle/turns", json=body, headers=key).raise_for_status().json()
    moved = move(fleet, two, "idle", 1)  # asked of the one to which it moves
    assert moved.status_code == 200, moved.text
    assert (moved.json()["from"], moved.json()["to"]) == (fleet.servers[0].url, fleet.servers[1].url)
    again = move(fleet, one, "idle", 1)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "invalid_request")
    assert one.post("/v1/sessions/idle/turns", json=body, headers=key).json() == first
    second = one.post("/v1/sessions/idle/turns", json={**body, "input": [7]}).raise_for_status().json()
    assert second["usage"]["cached_tokens"] == 104
    assert second["tokens"] == witness_output([*range(100), *first["tokens"], 7], 5)
    assert move(fleet, one, "idle", 0).status_code == 200
    assert two.get("/v1/sessions/idle").json()["version"] == 2
    for server in fleet.servers:
        server.audit()


def test_a_key_is_free_in_another_session_of_the_same_id_at_every_replica(
    fleet: Replicas, clients: list[httpx.Client]
) -> None:
    one, two = clients
    body = {"input": [1, 2], "max_new_tokens": 3, "stream": False}
    key = {"idempotency-key": "k"}
    for home, there, replica in ((one, two, 1), (two, one, 0)):
        home.post("/v1/sessions", json={"id": "again"}).raise_for_status()
        answers = [http.post("/v1/sessions/again/turns", json=body, headers=key).json() for http in clients]
        assert move(fleet, home, "again", replica).status_code == 200
        answers += [http.post("/v1/sessions/again/turns", json=body, headers=key).json() for http in clients]
        assert all(answer == answers[0] for answer in answers)
        assert answers[0]["version"] == there.get("/v1/sessions/again").raise_for_status().json()["version"] == 1
        assert there.delete("/v1/sessions/again").status_code == 204


def test_an_open_turn_moves_and_its_stream_goes_on(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, two = clients
    one.post("/v1/sessions", json={"id": "open"}).raise_for_status()
    given = list(range(500, 800))
    body = {"input": given, "max_new_tokens": 6000, "ignore_eos": True}
    at_owner = Reader(one, "/v1/sessions/open/turns", body)
    eventually(lambda: len(at_owner.tokens) > 20)
    for to in (1, 0, 1):
        moved = move(fleet, one, "open", to)
        assert moved.status_code == 200, moved.text
        at_owner.read_more(5)
    turn = two.get("/v1/sessions/open").json()["turn_id"]
    two.post("/v1/sessions/open/abort", json={"keep": "all"}).raise_for_status()
    whole = at_owner.whole()
    assert whole == witness_output(given, len(whole))
    assert at_owner.last["usage"]["computed_tokens"] <= 300 + len(whole)  # nothing was computed again
    shown = one.get(f"/v1/sessions/open/turns/{turn}").raise_for_status().json()
    assert (shown["state"], shown["tokens"]) == ("committed", whole)
    for server in fleet.servers:
        server.audit()


def test_a_session_takes_the_last_place_of_a_replica_with_its_open_turn() -> None:
    own = ("--max-sessions", "2")
    model = ("--model", "witness:0.01", "--context-length", "8192")
    with replicas(database(), 2, *model, lease=20, own=lambda _: own) as fleet, ExitStack() as closing:
        one, two = (closing.enter_context(server.client()) for server in fleet.servers)
        for http, session in ((two, "there"), (one, "s"), (one, "idle")):
            http.post("/v1/sessions", json={"id": session}).raise_for_status()
        reader = Reader(one, "/v1/sessions/s/turns", {"input": [1, 2, 3], "max_new_tokens": 400, "ignore_eos": True})
        reader.read_more(20)
        assert move(fleet, one, "s", 1).status_code == 200
        assert reader.whole() == witness_output([1, 2, 3], 400)
        full = move(fleet, one, "idle", 1)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
        assert one.get("/v1/sessions/idle").json()["state"] == "open"
        for server in fleet.servers:
            server.audit()


def test_turns_that_wait_go_with_their_session(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, two = clients
    one.post("/v1/sessions", json={"id": "queue"}).raise_for_status()
    body = {"max_new_tokens": 100, "ignore_eos": True, "if_busy": "queue"}
    readers = [Reader(one, "/v1/sessions/queue/turns", {**body, "input": [1]})]
    eventually(lambda: len(readers[0].tokens) > 5)
    for number, http in enumerate((one, two)):
        readers.append(Reader(http, "/v1/sessions/queue/turns", {**body, "input": [2 + number]}))
    assert move(fleet, one, "queue", 1).status_code == 200
    outputs = [reader.whole() for reader in readers]
    records = two.get("/v1/sessions/queue/turns").json()["data"]
    assert records[0]["output_tokens"] == outputs[0]
    assert sorted(record["output_tokens"] for record in records) == sorted(outputs)


def test_a_forwarded_turn_may_wait_long_before_its_session_moves() -> None:
    with (
        replicas(database(), 2, "--model", "witness:0.05", "--context-length", "8192", lease=5) as pair,
        pair.servers[0].client() as one,
        pair.servers[1].client() as two,
    ):
        one.post("/v1/sessions", json={"id": "long"}).raise_for_status()
        body = {"ignore_eos": True, "if_busy": "queue"}
        first = Reader(one, "/v1/sessions/long/turns", {**body, "input": [1], "max_new_tokens": 8000})
        first.read_more(5)
        waiting = Reader(two, "/v1/sessions/long/turns", {**body, "input": [2], "max_new_tokens": 5})
        first.read_more(220)  # for longer than a request waits for a replica that does not answer
        assert move(pair, one, "long", 1).status_code == 200
        one.post("/v1/sessions/long/abort", json={"keep": 0}).raise_for_status()
        assert waiting.whole() == witness_output([1, 2], 5)


def test_a_moved_turn_can_be_aborted_and_followed_anywhere(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, two = clients
    one.post("/v1/sessions", json={"id": "abort"}).raise_for_status()
    body = {"input": [1, 2, 3], "max_new_tokens": 4000, "ignore_eos": True}
    reader = Reader(one, "/v1/sessions/abort/turns", body)
    eventually(lambda: len(reader.tokens) > 5)
    assert move(fleet, two, "abort", 1).status_code == 200
    turn = one.get("/v1/sessions/abort").json()["turn_id"]
    with one.stream("GET", f"/v1/sessions/abort/turns/{turn}/events") as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    one.post("/v1/sessions/abort/abort", json={"keep": 3}).raise_for_status()
    reader.join(60)
    assert reader.names[-1] == "committed"
    history = [1, 2, 3, *witness_output([1, 2, 3], 3)]
    after = one.post("/v1/sessions/abort/turns", json={"input": [9], "max_new_tokens": 4, "stream": False}).json()
    assert after["tokens"] == witness_output([*history, 9], 4)


def test_a_client_that_leaves_ends_its_moved_turn(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, two = clients
    one.post("/v1/sessions", json={"id": "left"}).raise_for_status()
    body = {"input": [1], "max_new_tokens": 6000, "ignore_eos": True}
    with one.stream("POST", "/v1/sessions/left/turns", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert move(fleet, two, "left", 1).status_code == 200
        next(lines)
    eventually(lambda: two.get("/v1/sessions/left").json()["turn"] is None)
    assert two.get("/v1/sessions/left").json()["version"] == 0


def test_a_move_that_is_impossible_is_refused_and_changes_nothing(fleet: Replicas, clients: list[httpx.Client]) -> None:
    one, _ = clients
    assert move(fleet, one, "nothing", 1).status_code == 404
    one.post("/v1/sessions", json={"id": "stays"}).raise_for_status()
    for to in (99, "http://nowhere", ""):
        answer = one.post("/fleet/move", json={"session": "stays", "to": to})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert httpx.post(f"{fleet.servers[0].url}/fleet/between", content=b"x").status_code == 401
    assert one.get("/v1/sessions/stays").status_code == 200


def test_a_rolling_restart_is_noticed_by_no_client() -> None:
    options = ("--model", "witness:0.01", "--context-length", "8192", "--drain-seconds", "50")
    with replicas(database(), 3, *options, lease=20) as fleet, ExitStack() as closing:
        clients = [closing.enter_context(server.client()) for server in fleet.servers]
        body = {"max_new_tokens": 600, "ignore_eos": True}
        readers: list[Reader] = []
        for number, http in enumerate(clients):
            for kind in ("here", "there"):
                name = f"{kind}-{number}"
                http.post("/v1/sessions", json={"id": name}).raise_for_status()
                through = http if kind == "here" else clients[(number + 1) % 3]
                readers.append(Reader(through, f"/v1/sessions/{name}/turns", {**body, "input": [number, 5]}))
        clients[0].post("/v1/sessions", json={"id": "idle"}).raise_for_status()
        eventually(lambda: all(len(reader.tokens) > 5 for reader in readers))
        ending = threading.Thread(target=fleet.servers[0].stop)
        ending.start()
        shown = clients[1]
        eventually(lambda: _view(shown, fleet.servers[0].url).get("sessions") == 0)
        for http in clients[1:]:
            assert http.get("/v1/sessions/idle").status_code == 200
        new = clients[0].post("/v1/sessions", json={"id": "new"})  # it is opened elsewhere
        assert new.status_code == 201, new.text
        outputs = [reader.whole() for reader in readers]
        ending.join(60)
        assert fleet.servers[0].process.returncode == 0
        for number, output in enumerate(outputs):
            assert output == witness_output([number // 2, 5], 600)
        assert clients[1].get("/v1/sessions/new").status_code == 200


def _view(http: httpx.Client, url: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in http.get("/fleet").json()["replicas"] if each["url"] == url)
    return found


def test_a_replica_ends_although_its_clients_ask_on_and_on() -> None:
    """They have their answers to what they asked before the drain. Then it accepts no more connections."""
    options = ("--model", "witness:0.02", "--context-length", "8192", "--drain-seconds", "600")
    with replicas(database(), 2, *options, lease=20) as fleet, ExitStack() as closing:
        one, two = (closing.enter_context(server.client()) for server in fleet.servers)
        one.post("/v1/sessions", json={"id": "before"}).raise_for_status()
        before = Reader(one, "/v1/sessions/before/turns", {"input": [3], "max_new_tokens": 200, "ignore_eos": True})
        ended, answers = threading.Event(), list[httpx.Response]()

        def ask_on(name: str) -> None:
            body = {"input": [1], "max_new_tokens": 10, "ignore_eos": True, "stream": False}
            while not ended.is_set():
                with suppress(httpx.TransportError):  # once it accepts no more
                    answers.append(httpx.post(f"{one.base_url}/v1/sessions/{name}/turns", json=body, timeout=60))

        names = [f"after-{number}" for number in range(4)]
        for name in names:
            two.post("/v1/sessions", json={"id": name}).raise_for_status()
        asking = [threading.Thread(target=ask_on, args=(name,), daemon=True) for name in names]
        for thread in asking:
            thread.start()
        eventually(lambda: len(answers) > 8 and len(before.tokens) > 5)
        assert fleet.servers[0].stop() == 0
        ended.set()
        for thread in asking:
            thread.join(60)
        assert before.whole() == witness_output([3], 200)
        assert {answer.status_code for answer in answers} == {200}


def test_turns_for_a_replica_that_is_ending_are_carried_out_elsewhere() -> None:
    """Its sessions could not move in time. It gives idle ones up, and the others are taken over."""
    options = ("--model", "witness:0.02", "--context-length", "8192", "--drain-seconds", "0.1")
    with replicas(database(), 2, *options, lease=20) as fleet, ExitStack() as closing:
        one, two = (closing.enter_context(server.client()) for server in fleet.servers)
        names = [f"s{number}" for number in range(12)]
        for name in names:
            one.post("/v1/sessions", json={"id": name}).raise_for_status()
        ended, counts, answers = threading.Event(), dict.fromkeys(names, 0), list[httpx.Response]()

        def ask_on(name: str) -> None:
            body = {"input": [1], "max_new_tokens": 5, "ignore_eos": True, "stream": False}
            with fleet.servers[1].client() as http:
                while not ended.is_set():
                    key = {"idempotency-key": f"k{counts[name]}"}
                    told = {**body, "on_disconnect": "continue"}
                    answers.append(http.post(f"/v1/sessions/{name}/turns", json=told, headers=key))
                    counts[name] += 1

        asking = [threading.Thread(target=ask_on, args=(name,), daemon=True) for name in names]
        for thread in asking:
            thread.start()
        eventually(lambda: min(counts.values()) > 1)
        assert fleet.servers[0].stop() == 0
        done = len(answers)
        eventually(lambda: len(answers) > done + len(names))
        ended.set()
        for thread in asking:
            thread.join(60)
        assert {answer.status_code for answer in answers} == {200}, [each.text for each in answers][-3:]
        for name in names:
            assert two.get(f"/v1/sessions/{name}").json()["version"] == counts[name]


def test_a_drained_replica_becomes_empty_and_goes_on_to_serve() -> None:
    with (
        replicas(database(), 2, "--model", "witness:0.01", "--context-length", "8192", lease=20) as fleet,
        ExitStack() as closing,
    ):
        one, two = (closing.enter_context(server.client()) for server in fleet.servers)
        for name in ("used", "unused"):
            one.post("/v1/sessions", json={"id": name}).raise_for_status()
        body = {"input": [1, 2], "max_new_tokens": 5, "stream": False}
        one.post("/v1/sessions/used/turns", json=body).raise_for_status()
        number = _view(two, fleet.servers[0].url)["replica"]
        assert two.post("/fleet/drain", json={"replica": 99}).status_code == 400
        assert two.post("/fleet/drain", json={"replica": number}).status_code == 202
        eventually(lambda: _view(two, fleet.servers[0].url)["empty"])
        assert _view(two, fleet.servers[0].url)["draining"]
        for http in (one, two):
            for name in ("used", "unused"):
                answer = http.get(f"/v1/sessions/{name}")
                assert answer.status_code == 200
                assert answer.headers.get("connection") == ("close" if http is one else None)
        used = two.post("/v1/sessions/used/turns", json=body).json()
        assert used["usage"]["cached_tokens"] == 6
        assert one.post("/fleet/move", json={"session": "used", "to": number}).status_code == 400
        assert two.post("/fleet/drain").status_code == 503  # no other replica takes sessions
        assert _view(two, fleet.servers[0].url)["sessions"] == 0


def test_a_models_turn_says_the_same_after_its_move(smollm2_path: Path) -> None:
    """Sampling, a grammar and stop strings go on where they stood, and so does a chat over another interface."""
    model = ("--model", str(smollm2_path), "--kernels", EXACT, "--context-length", "2048", "--max-running", "2")
    with replicas(database(), 2, *model, lease=20) as fleet, ExitStack() as closing:
        one, two = (closing.enter_context(server.client()) for server in fleet.servers)
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
        body: dict[str, Any] = {
            "input": [{"role": "user", "content": "Count as far as you can."}],
            "temperature": 1,
            "seed": 7,
            "max_new_tokens": 400,
            "grammar": {"json_schema": schema},
            "logprobs": 0,
        }
        for name in ("moves", "stays"):
            one.post("/v1/sessions", json={"id": name}).raise_for_status()
        reader = Reader(one, "/v1/sessions/moves/turns", body)
        eventually(lambda: len(reader.tokens) > 5)
        for to in (1, 0):
            moved = move(fleet, one, "moves", to)
            assert moved.status_code == 200, moved.text
        stays = one.post("/v1/sessions/stays/turns", json={**body, "stream": False}).raise_for_status().json()
        assert reader.whole() == stays["tokens"]
        assert reader.text == stays["text"]
        (record,) = two.get("/v1/sessions/moves/turns").json()["data"]
        assert record["output_tokens"] == stays["tokens"]
        chat = {
            "model": "default",
            "messages": body["input"],
            "session_id": "chat",
            "max_tokens": 300,
            "temperature": 0,
        }
        one.post("/v1/sessions", json={"id": "chat"}).raise_for_status()
        pieces: list[str] = []
        with one.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    told = msgspec.json.decode(line[6:])
                    pieces += [each["delta"].get("content") or "" for each in told["choices"]]
                if len(pieces) == 10:
                    assert move(fleet, two, "chat", 1).status_code == 200
                    pieces.append("")
        one.post("/v1/sessions", json={"id": "other"}).raise_for_status()
        whole = one.post("/v1/chat/completions", json={**chat, "session_id": "other"}).json()
        assert len(pieces) > 11
        assert "".join(pieces) == whole["choices"][0]["message"]["content"]
