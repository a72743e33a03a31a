"""The native interface, over HTTP, on a real server of the witness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tenuto.base.errors import ConfigError
from tenuto.base.parsing import parse_ttl
from tests.eventually import eventually
from tests.serve.server import Server, serving

LONG: dict[str, Any] = {"input": [1, 2, 3], "max_new_tokens": 3000, "ignore_eos": True}
"""A turn that takes 2 seconds on the slow witness."""


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    """The path of a new session."""
    path = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}"
    yield path
    http.delete(path)


@pytest.fixture
def slow_session(slow_http: httpx.Client) -> Iterator[str]:
    path = f"/v1/sessions/{slow_http.post('/v1/sessions', json={}).json()['id']}"
    yield path
    slow_http.delete(path)


def events(response: httpx.Response) -> Iterator[tuple[str, int | None, Any]]:
    """Yields name, id and data of each event of a stream."""
    name, number = "message", None
    for line in response.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "id":
            number = int(value)
        elif key == "data":
            yield name, number, json.loads(value)
            name, number = "message", None


def turn(http: httpx.Client, session: str, **body: Any) -> dict[str, Any]:
    answer = http.post(f"{session}/turns", json={"stream": False, "max_new_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(response: httpx.Response) -> tuple[int, str]:
    """Returns the status and the error's code, or its type in Anthropic's form, which has no codes."""
    error = response.json()["error"]
    return response.status_code, error.get("code") or error["type"]


# -- sessions


def test_a_session_is_opened_shown_and_closed(http: httpx.Client) -> None:
    opened = http.post("/v1/sessions", json={"id": "first", "metadata": {"a": "b"}, "ttl": 60, "max_tokens": 100})
    assert opened.status_code == 201
    assert opened.headers["location"] == "/v1/sessions/first"
    shown = http.get("/v1/sessions/first").json()
    assert (shown["metadata"], shown["ttl"], shown["max_tokens"], shown["version"]) == ({"a": "b"}, 60, 100, 0)
    assert refusal(http.post("/v1/sessions", json={"id": "first"})) == (409, "already_exists")
    assert http.delete("/v1/sessions/first").status_code == 204
    assert refusal(http.get("/v1/sessions/first")) == (404, "not_found")


def test_sessions_are_listed_in_pages_by_id_and_state(http: httpx.Client) -> None:
    ids = [f"listed-{n}" for n in range(5)]
    for name in ids:
        http.post("/v1/sessions", json={"id": name})
    found: list[str] = []
    after: str | None = "listed-"
    while after is not None and after.startswith("listed"):
        page = http.get("/v1/sessions", params={"limit": 2, "after": after, "state": "idle"}).json()
        found += [entry["id"] for entry in page["data"] if entry["id"].startswith("listed")]
        after = page["next"]
    assert found == ids
    assert http.get("/v1/sessions", params={"state": "running"}).json()["data"] == []
    for name in ids:
        http.delete(f"/v1/sessions/{name}")


def test_an_idle_session_closes_itself_after_its_ttl(http: httpx.Client) -> None:
    http.post("/v1/sessions", json={"id": "brief", "ttl": 0.2})
    eventually(lambda: http.get("/v1/sessions/brief").status_code == 404)


def check_ttls(http: httpx.Client, named: float | None, made_up: float) -> None:
    """Checks the TTLs of sessions with a given id and of those whose id the server makes up, opened without a TTL."""
    assert http.post("/v1/sessions", json={"id": "named"}).json()["ttl"] == named
    assert http.post("/v1/sessions", json={}).json()["ttl"] == made_up
    assert http.post("/v1/sessions", json={"id": "own", "ttl": 5}).json()["ttl"] == 5
    completion = {"model": "witness", "prompt": "a", "max_tokens": 1, "session_id": "completed"}
    assert http.post("/v1/completions", json=completion).status_code == 200
    assert http.get("/v1/sessions/completed").json()["ttl"] == named
    made = http.post("/open_session", json={"capacity_of_str_len": 1, "streaming": True}).json()
    assert http.get(f"/v1/sessions/{made}").json()["ttl"] == made_up
    for session in http.get("/v1/sessions").json()["data"]:
        http.delete(f"/v1/sessions/{session['id']}")


def test_sessions_opened_without_a_ttl_stay_open_for_a_day(http: httpx.Client) -> None:
    check_ttls(http, 86_400, 86_400)


@pytest.mark.parametrize(("option", "named", "made_up"), [("600", 600, 600), ("none", None, 86_400)])
def test_sessions_opened_without_a_ttl_have_the_servers(option: str, named: float | None, made_up: float) -> None:
    with serving("--model", "witness", "--session-ttl", option) as server, server.client() as http:
        check_ttls(http, named, made_up)


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "1e10"])
def test_an_invalid_session_ttl_is_refused_before_the_server_starts(text: str) -> None:
    with pytest.raises(ConfigError, match="session_ttl"):
        parse_ttl("session_ttl", text)


# -- turns


def test_a_turn_streams_its_text_and_is_acknowledged_by_its_commit(http: httpx.Client, session: str) -> None:
    asked = {"input": "hello", "max_new_tokens": 5, "speculate": False}
    with http.stream("POST", f"{session}/turns", json=asked) as response:
        told = list(events(response))
    assert [name for name, _, _ in told] == ["started"] + ["delta"] * 5 + ["committed"]
    numbers = [number for _, number, _ in told if number is not None]
    assert len(numbers) == 6
    assert numbers == sorted(numbers)
    tokens = [token for name, _, data in told if name == "delta" for token in data["tokens"]]
    last = told[-1][2]
    assert (last["version"], last["reason"], last["kept"]) == (1, "length", 5)
    assert last["usage"] == {
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "completion_tokens": 5,
        "computed_tokens": 9,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "recomputed_tokens": {},
    }
    record = http.get(f"{session}/turns").json()["data"][0]
    assert (record["input_text"], record["output_tokens"]) == ("hello", tokens)
    assert http.get(session).headers["etag"] == '"1"'


def test_usage_says_how_many_tokens_were_computed_again_and_why(http: httpx.Client, session: str) -> None:
    first = turn(http, session, input=[1] * 50)
    assert first["usage"]["recomputed_tokens"] == {}
    assert turn(http, session, input=[2] * 7)["usage"]["recomputed_tokens"] == {}
    known = http.get(session).json()["tokens"]
    assert http.post("/flush_cache").status_code == 200
    usage = turn(http, session, input=[3])["usage"]
    assert usage["cached_tokens"] == 0
    assert list(usage["recomputed_tokens"].values()) == [known - 1]
    assert turn(http, session, input=[4])["usage"]["recomputed_tokens"] == {}


def test_a_second_turn_computes_only_its_new_tokens(http: httpx.Client, session: str) -> None:
    turn(http, session, input=[1] * 50)
    second = turn(http, session, input=[2] * 7)
    assert second["usage"]["cached_tokens"] == 50 + 4 - 1
    assert second["usage"]["prompt_tokens"] == 61


def test_an_empty_turn_continues_and_an_append_only_adds(http: httpx.Client, session: str) -> None:
    whole = turn(http, session, input=[5, 6], max_new_tokens=8)["tokens"]
    http.post(f"{session}/rewind", json={"turn": 0})
    appended = http.post(f"{session}/append", json={"input": [5, 6]})
    assert (appended.status_code, appended.json()["reason"]) == (200, "appended")
    first = turn(http, session, max_new_tokens=3)["tokens"]
    assert first + turn(http, session, max_new_tokens=5)["tokens"] == whole


def test_chat_messages_are_rendered_once_and_as_deltas(http: httpx.Client, session: str) -> None:
    turn(http, session, input=[{"role": "user", "content": "hi"}], stop_ids=[], ignore_eos=True)
    turn(http, session, input=[{"role": "user", "content": "again"}], ignore_eos=True)
    first, second = http.get(f"{session}/turns").json()["data"]
    assert first["input_text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert second["input_text"] == "<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"


def test_regenerate_replaces_the_last_output(http: httpx.Client, session: str) -> None:
    first = turn(http, session, input=[9, 9])
    again = http.post(f"{session}/regenerate", json={"stream": False, "max_new_tokens": 2}).json()
    assert again["tokens"] == first["tokens"][:2]
    assert http.get(session).json()["tokens"] == 4


def computed_by_its_turn(http: httpx.Client, session: str) -> int:
    """Returns how many tokens a session's open turn or draft has computed."""
    shown = http.get("/map/feed").json()["sessions"]
    (turn_of,) = (each["turn"] for each in shown if session.endswith(each["id"]))
    return int(turn_of["computed"])


def test_a_draft_is_computed_before_its_turn(http: httpx.Client, session: str) -> None:
    http.put(f"{session}/draft", json={"input": [3] * 20})
    drafted = http.put(f"{session}/draft", json={"input": [3] * 30})
    assert drafted.json()["turn"] == "drafting"
    eventually(lambda: computed_by_its_turn(http, session) == 29)  # the last token waits for the turn
    assert turn(http, session, input=[3] * 30)["usage"]["cached_tokens"] == 29
    http.put(f"{session}/draft", json={"input": [4]})
    assert http.post(f"{session}/abort", json={}).json() is None
    assert http.get(session).json()["turn"] is None


def test_forks_rewinds_and_trims_share_memory_where_possible(http: httpx.Client, session: str) -> None:
    outputs = [turn(http, session, input=[n] * 10)["tokens"] for n in range(3)]
    child = http.post(f"{session}/fork", json={"turn": 2}).json()
    assert (child["turns"], child["tokens"], child["computed"]) == (2, 28, 27)
    assert turn(http, f"/v1/sessions/{child['id']}", input=[2] * 10)["tokens"] == outputs[2]
    trimmed = http.post(f"{session}/trim", json={"turns": [1, 3], "id": "trimmed"}).json()
    assert (trimmed["turns"], trimmed["tokens"], trimmed["computed"]) == (2, 28, 13)
    assert turn(http, "/v1/sessions/trimmed", input=[7])["usage"]["cached_tokens"] == 13
    records = http.get("/v1/sessions/trimmed/turns").json()["data"]
    assert [record["output_tokens"] for record in records[:2]] == [outputs[0], outputs[2]]
    rewound = http.post(f"{session}/rewind", json={"turn": 1}).json()
    assert (rewound["turns"], rewound["version"]) == (1, 4)
    assert refusal(http.post(f"{session}/trim", json={"turns": [2]})) == (400, "invalid_request")
    http.delete("/v1/sessions/trimmed")


# -- refusals


def test_an_update_of_an_outdated_version_is_refused(http: httpx.Client, session: str) -> None:
    turn(http, session, input=[1])
    stale = {"if-match": '"0"'}
    for method, path, body in (
        ("POST", "/turns", {"input": [1], "stream": False}),
        ("POST", "/append", {"input": [1]}),
        ("POST", "/regenerate", {"stream": False}),
        ("PUT", "/draft", {"input": [1]}),
        ("POST", "/fork", {}),
        ("POST", "/trim", {"turns": [1]}),
        ("POST", "/rewind", {"turn": 0}),
        ("DELETE", "", None),
    ):
        assert refusal(http.request(method, session + path, json=body, headers=stale)) == (412, "version_mismatch")
    current = {"if-match": http.get(session).headers["etag"]}
    assert http.post(f"{session}/rewind", json={"turn": 0}, headers=current).json()["version"] == 2


def test_a_turn_that_cannot_fit_is_refused_and_changes_nothing(http: httpx.Client, session: str) -> None:
    before = http.get(session).json()
    assert refusal(http.post(f"{session}/turns", json={"input": [1] * 5000})) == (400, "context_exceeded")
    after = http.get(session).json()
    assert {**before, "idle_seconds": 0} == {**after, "idle_seconds": 0}


@pytest.mark.parametrize(
    "body",
    [
        {"input": [1], "temperature": -1},
        {"input": [1], "max_new_tokens": "4"},
        {"input": [1], "unknown": 1},
        {"input": [1, "a"]},
        {"input": [-1]},
        {"input": [10**9]},
        {"input": [{"role": "user"}]},
        {"input": [1], "stop": [""]},
        {"input": [1], "if_busy": "perhaps"},
    ],
)
def test_a_malformed_turn_names_the_wrong_field(http: httpx.Client, session: str, body: dict[str, Any]) -> None:
    assert refusal(http.post(f"{session}/turns", json=body)) == (400, "invalid_request")
    assert http.get(session).json()["turn"] is None


# -- busy sessions, aborts, disconnects


def wait_until(http: httpx.Client, session: str, state: str | None) -> None:
    eventually(lambda: http.get(session).json()["turn"] == state)


def are_waiting(http: httpx.Client, number: int) -> None:
    """Waits until so many turns wait for their sessions."""
    eventually(lambda: f"tenuto_turns_waiting {number}.0" in http.get("/metrics").text)


def end(http: httpx.Client, session: str) -> None:
    """Ends the session's turn, which keeps what it has."""
    http.post(f"{session}/abort", json={"keep": "all"}).raise_for_status()


def test_a_busy_session_rejects_or_queues(slow_http: httpx.Client, slow_session: str, slow_witness: Server) -> None:
    with slow_witness.client() as other, ThreadPoolExecutor(2) as pool:
        first = pool.submit(turn, other, slow_session, **LONG)
        wait_until(slow_http, slow_session, "running")
        assert refusal(slow_http.post(f"{slow_session}/turns", json=LONG)) == (409, "session_busy")
        assert refusal(slow_http.post(f"{slow_session}/rewind", json={"turn": 0})) == (409, "session_busy")
        queued = pool.submit(turn, other, slow_session, input=[4], if_busy="queue", max_new_tokens=2)
        are_waiting(slow_http, 1)
        end(slow_http, slow_session)
        assert first.result()["version"] == 1
        computed = len(LONG["input"]) + len(first.result()["tokens"]) - 1
        assert (queued.result()["version"], queued.result()["usage"]["cached_tokens"]) == (2, computed)


def test_queued_turns_begin_in_order(slow_session: str, slow_witness: Server) -> None:
    with slow_witness.client() as http, ThreadPoolExecutor(6) as pool:
        first = pool.submit(turn, http, slow_session, **LONG)
        wait_until(http, slow_session, "running")
        queued = []
        for n in range(5):
            queued.append(pool.submit(turn, http, slow_session, input=[n], if_busy="queue", max_new_tokens=1))
            are_waiting(http, n + 1)
        end(http, slow_session)
        assert [future.result()["version"] for future in [first, *queued]] == [1, 2, 3, 4, 5, 6]
        assert [record["input_tokens"] for record in http.get(f"{slow_session}/turns").json()["data"]][1:] == [
            [n] for n in range(5)
        ]


@pytest.mark.parametrize(("keep", "tokens"), [("none", 0), (3, 6), ("all", None), ("delivered", None)])
def test_a_barge_in_keeps_the_requested_part_of_the_output(
    slow_http: httpx.Client, slow_session: str, keep: str | int, tokens: int | None
) -> None:
    with slow_http.stream("POST", f"{slow_session}/turns", json=LONG) as response:
        told = events(response)
        said: list[int] = []
        delivered = 0
        for name, _, data in told:
            if name == "delta":
                said, delivered = said + data["tokens"], data["delivered"]
            if len(said) >= 20:
                break
        with httpx.Client(base_url=slow_http.base_url, timeout=60) as other:
            aborted = other.post(f"{slow_session}/abort", json={"keep": keep}).json()
        rest = list(told)
    assert aborted["reason"] == "abort"
    assert rest[-1][0] == ("aborted" if keep == "none" else "committed")
    for data in (data for name, _, data in rest if name == "delta"):
        said, delivered = said + data["tokens"], data["delivered"]
    after = slow_http.get(slow_session).json()
    if tokens is not None:
        assert after["tokens"] == tokens
    else:
        assert after["tokens"] == 3 + aborted["kept"]
        assert slow_http.get(f"{slow_session}/turns").json()["data"][0]["output_tokens"] == said[: aborted["kept"]]
        # a last character may be incomplete
        assert (delivered if keep == "delivered" else len(said)) == aborted["kept"]
    follows = turn(slow_http, slow_session, input=[8])
    assert follows["usage"]["cached_tokens"] == max(0, after["tokens"] - 1)


def test_a_turn_without_readers_is_rolled_back(slow_http: httpx.Client, slow_session: str) -> None:
    with slow_http.stream("POST", f"{slow_session}/turns", json=LONG) as response:
        next(events(response))
    wait_until(slow_http, slow_session, None)
    assert slow_http.get(slow_session).json()["version"] == 0


def test_a_turn_may_continue_without_readers_and_its_stream_can_be_resumed(http: httpx.Client, session: str) -> None:
    with http.stream("POST", f"{session}/turns", json={**LONG, "on_disconnect": "continue"}) as response:
        turn_id = response.headers["x-turn-id"]
        told = events(response)
        first = [next(told) for _ in range(10)]
    seen, last = [token for _, _, data in first[1:] for token in data["tokens"]], first[-1][1]
    with http.stream("GET", f"{session}/turns/{turn_id}/events", headers={"last-event-id": str(last)}) as response:
        rest = list(events(response))
    seen += [token for name, _, data in rest if name == "delta" for token in data["tokens"]]
    assert rest[-1][0] == "committed"
    assert http.get(f"{session}/turns").json()["data"][0]["output_tokens"] == seen
    assert http.get(f"{session}/turns/{turn_id}").json()["tokens"] == seen


def test_a_deadline_ends_a_turn_and_leaves_its_session(http: httpx.Client, session: str) -> None:
    late = turn(http, session, **{**LONG, "timeout": 0.05})
    assert (late["state"], late["reason"]) == ("aborted", "deadline")
    assert http.get(session).json()["version"] == 0


def test_a_deadline_also_counts_while_a_turn_waits_for_its_session(slow_session: str, slow_witness: Server) -> None:
    with slow_witness.client() as http, ThreadPoolExecutor(1) as pool:
        first = pool.submit(turn, http, slow_session, **LONG)
        wait_until(http, slow_session, "running")
        late = http.post(f"{slow_session}/turns", json={"input": [1], "if_busy": "queue", "queue_timeout": 0.05})
        assert refusal(late) == (504, "deadline_passed")
        end(http, slow_session)
        assert first.result()["version"] == 1
        assert turn(http, slow_session, input=[1])["version"] == 2


# -- idempotency


def test_a_repeated_request_gets_the_result_of_the_first(http: httpx.Client, session: str) -> None:
    body = {"input": [1, 2], "max_new_tokens": 3, "stream": False}
    key = {"idempotency-key": "k"}
    first = http.post(f"{session}/turns", json=body, headers=key).json()
    again = http.post(f"{session}/turns", json=body, headers={**key, "if-match": '"0"'}).json()
    assert again == first
    assert http.get(session).json()["version"] == 1
    other = http.post(f"{session}/turns", json={**body, "max_new_tokens": 4}, headers=key)
    assert refusal(other) == (422, "idempotency_key_reused")


def test_a_repeated_request_attaches_to_the_running_turn(session: str, witness: Server) -> None:
    with witness.client() as http, ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(
                http.post, f"{session}/turns", json={**LONG, "stream": False}, headers={"idempotency-key": "same"}
            )
            for _ in range(4)
        ]
        answers = [future.result().json() for future in asked]
    assert len({answer["id"] for answer in answers}) == 1
    assert answers[0]["version"] == 1


def test_after_an_abort_the_key_is_free_again(http: httpx.Client, session: str) -> None:
    body, key = {**LONG, "timeout": 0.05, "stream": False}, {"idempotency-key": "twice"}
    first = http.post(f"{session}/turns", json=body, headers=key).json()
    second = http.post(f"{session}/turns", json=body, headers=key).json()
    assert first["reason"] == second["reason"] == "deadline"
    assert first["id"] != second["id"]
    refused = http.post(f"{session}/turns", json={"input": [1] * 5000}, headers=key)
    assert refusal(refused) == (400, "context_exceeded")
    assert http.post(f"{session}/append", json={"input": [1]}, headers=key).status_code == 200
