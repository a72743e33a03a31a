"""Compaction of sessions, over HTTP: a summary takes the place of turns, and only it and what follows is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.eventually import eventually
from tests.serve.server import Server, serving

SUMMARY = "They said hello."
SPAN: dict[str, Any] = {"first": 2, "last": 3}
WRITTEN: dict[str, Any] = {**SPAN, "max_new_tokens": 20}
"""A compaction whose summary the model writes."""


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    """The path of a session of four turns."""
    path = opened(http)
    yield path
    http.delete(path)


def opened(http: httpx.Client, **fields: Any) -> str:
    """Opens a session of four turns, and returns its path."""
    body = {"system": "Be brief. " * 20, **fields}
    path = f"/v1/sessions/{http.post('/v1/sessions', json=body).raise_for_status().json()['id']}"
    for number in range(4):
        say(http, path, f"This is message {number}. " * 10)
    return path


def say(http: httpx.Client, session: str, text: str, **body: Any) -> dict[str, Any]:
    given = {"input": [{"role": "user", "content": text}], "max_new_tokens": 12, "ignore_eos": True, "stream": False}
    return dict(http.post(f"{session}/turns", json={**given, **body}).raise_for_status().json())


def records_of(http: httpx.Client, session: str) -> list[dict[str, Any]]:
    turns = http.get(f"{session}/turns").raise_for_status().json()["data"]
    return [{name: value for name, value in turn.items() if name != "resume_cost"} for turn in turns]


def tokens_of(http: httpx.Client, session: str) -> list[int]:
    turns = records_of(http, session)
    return [token for turn in turns for token in (*turn["input_tokens"], *turn["output_tokens"])]


def compact(http: httpx.Client, session: str, **body: Any) -> dict[str, Any]:
    return dict(http.post(f"{session}/compact", json=body).raise_for_status().json())


def refused(http: httpx.Client, session: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, str]:
    answer = http.post(f"{session}/compact", json=body, headers=headers)
    return answer.status_code, answer.json()["error"]["code"]


def hidden_sessions(server: Server, **client: Any) -> int:
    """Returns the number of sessions that the engine has besides those that are listed."""
    with server.client(**client) as http:
        metrics = http.get("/metrics").text.splitlines()
        count = next(float(line.split()[-1]) for line in metrics if line.startswith("tenuto_sessions_open "))
        return int(count) - len(http.get("/v1/sessions", params={"limit": 1000}).json()["data"])


def test_a_given_summary_takes_the_place_of_turns_and_only_what_follows_is_computed(
    http: httpx.Client, session: str
) -> None:
    before, turns = http.get(session).json(), records_of(http, session)
    done = compact(http, session, **SPAN, summary=SUMMARY)
    assert (done["turns"], done["version"], done["summary"]) == (3, before["version"] + 1, None)
    after = records_of(http, session)
    assert after[0] == turns[0]
    assert SUMMARY in after[1]["input_text"]
    assert after[2]["output_tokens"] == turns[3]["output_tokens"]
    assert after[2]["input_text"].endswith(turns[3]["input_text"][-100:])
    # the last token of the first turn is computed with what follows; the last token of all, by the next turn
    assert done["computed_tokens"] == done["tokens"] - turns[1]["start"]
    assert done["computed"] == done["tokens"] - 1
    said = say(http, session, "And now?")
    assert said["usage"]["cached_tokens"] == done["tokens"] - 1
    assert said["usage"]["recomputed_tokens"] == {}


def test_the_model_writes_a_summary_with_the_state_it_has(http: httpx.Client, session: str) -> None:
    turns = records_of(http, session)
    http.post(f"{session}/fork", json={"turn": 3, "id": "asked"}).raise_for_status()
    asked = say(http, "/v1/sessions/asked", "Sum up.", max_new_tokens=20, ignore_eos=False)
    http.delete("/v1/sessions/asked")
    done = compact(http, session, **WRITTEN, instructions="Sum up.")
    assert done["summary"] == asked["text"].strip()
    assert done["completion_tokens"] == asked["usage"]["completion_tokens"]
    follows = done["tokens"] - turns[1]["start"]
    # The question may be found among the pages that `asked` has left.
    assert follows <= done["computed_tokens"] <= asked["usage"]["computed_tokens"] + follows
    assert done["summary"] in records_of(http, session)[1]["input_text"]


def test_a_whole_conversation_becomes_a_summary_behind_its_system_message(http: httpx.Client, session: str) -> None:
    old = tokens_of(http, session)
    done = compact(http, session, summary=SUMMARY)
    new = tokens_of(http, session)
    common = next(n for n, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
    assert (done["turns"], done["tokens"]) == (1, len(new))
    assert common > 150  # the system message
    say(http, session, "Go on.")


def test_a_compacted_session_says_what_one_with_the_same_messages_says(http: httpx.Client, session: str) -> None:
    compact(http, session, **SPAN, summary=SUMMARY)
    tokens = tokens_of(http, session)
    plain = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}"
    http.post(f"{plain}/append", json={"input": tokens}).raise_for_status()
    continued = [{"role": "user", "content": "And now?"}]
    mine = http.post(f"{session}/turns", json={"input": continued, "max_new_tokens": 8, "stream": False}).json()
    given = records_of(http, session)[-1]["input_tokens"]
    theirs = http.post(f"{plain}/turns", json={"input": given, "max_new_tokens": 8, "stream": False}).json()
    assert mine["tokens"] == theirs["tokens"]
    http.delete(plain)


def test_forks_from_before_and_after_a_compaction_keep_their_histories(http: httpx.Client, session: str) -> None:
    old = tokens_of(http, session)
    http.post(f"{session}/fork", json={"id": "before"}).raise_for_status()
    done = compact(http, session, **SPAN, summary=SUMMARY)
    new = tokens_of(http, session)
    http.post(f"{session}/fork", json={"id": "after"}).raise_for_status()
    assert tokens_of(http, "/v1/sessions/before") == old
    said = say(http, "/v1/sessions/before", "And now?")
    assert said["usage"]["cached_tokens"] == len(old) - 1
    http.delete(session)
    assert tokens_of(http, "/v1/sessions/after") == new
    assert say(http, "/v1/sessions/after", "And now?")["usage"]["cached_tokens"] == done["tokens"] - 1
    for name in ("before", "after"):
        http.delete(f"/v1/sessions/{name}")


def test_refused_compactions_change_nothing(http: httpx.Client, witness: Server, session: str) -> None:
    state, tokens, hidden = http.get(session).json(), tokens_of(http, session), hidden_sessions(witness)
    invalid = (400, "invalid_request")
    assert refused(http, session, first=5, summary=SUMMARY) == invalid
    assert refused(http, session, first=3, last=2, summary=SUMMARY) == invalid
    assert refused(http, session, first=2, last=5, summary=SUMMARY) == invalid
    assert refused(http, session, **SPAN, summary=SUMMARY, input="too") == invalid
    assert refused(http, session, {"if-match": '"1"'}, **SPAN, summary=SUMMARY) == (412, "version_mismatch")
    assert refused(http, "/v1/sessions/nobody", summary=SUMMARY) == (404, "not_found")
    tool = {"name": "look", "parameters": {"type": "object"}}
    assert refused(http, session, **SPAN, summary=SUMMARY, tools=[tool])[0] == 400
    assert refused(http, session, **SPAN, input=[]) == invalid
    assert refused(http, session, **SPAN, input="") == invalid
    assert refused(http, session, **SPAN, summary="word " * 100_000) == (400, "context_exceeded")
    now = http.get(session).json()
    assert {**now, "idle_seconds": 0} == {**state, "idle_seconds": 0}
    assert tokens_of(http, session) == tokens
    eventually(lambda: hidden_sessions(witness) <= hidden)
    witness.audit()


def test_tools_of_the_first_turn_must_be_given_again(http: httpx.Client) -> None:
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    path = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}"
    for text in ("Hello.", "And again."):
        say(http, path, text, tools=[tool], tool_choice="none")
    assert refused(http, path, summary=SUMMARY) == (409, "illegal_transition")
    assert refused(http, path, last=1, summary=SUMMARY) == (409, "illegal_transition")
    assert http.get(path).json()["turns"] == 2
    assert compact(http, path, summary=SUMMARY, tools=[tool])["turns"] == 1
    assert "look" in records_of(http, path)[0]["input_text"]
    http.delete(path)


@pytest.mark.parametrize("limit", ["tokens = 350", "journal_bytes = 3000"])
def test_a_compaction_that_makes_a_session_longer_keeps_its_tenants_limits(tmp_path: Path, limit: str) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f"[[keys]]\ntenant = 'ann'\nkey = 'ann-key'\nlimits.{limit}\n")
    options = ("--model", "witness", "--keys", str(keys), "--admin-api-key", "admin-key")
    admin: dict[str, Any] = {"headers": {"authorization": "Bearer admin-key"}}
    path, too_long = "/v1/sessions/s", (429, "limit_reached")
    with serving(*options) as server, server.client(headers={"authorization": "Bearer ann-key"}) as http:
        for name, lengths in {"s": (200, 100), "other": (100,)}.items():
            http.post("/v1/sessions", json={"id": name}).raise_for_status()
            for length in lengths:
                http.post(f"/v1/sessions/{name}/append", json={"input": [1] * length}).raise_for_status()
        assert http.post(f"{path}/append", json={"input": [1]}).status_code == 429
        state, tokens = http.get(path).json(), tokens_of(http, path)
        assert refused(http, path, first=2, input=[2] * 101) == too_long
        assert refused(http, path, first=2, input=[2] * 1000) == too_long
        assert refused(http, path, first=1, last=1, input=[2] * 201) == too_long
        assert {**http.get(path).json(), "idle_seconds": 0} == {**state, "idle_seconds": 0}
        assert tokens_of(http, path) == tokens
        eventually(lambda: hidden_sessions(server, **admin) == 2)  # the administrator's list lacks the tenant's two
        assert compact(http, path, first=2, input=[2] * 90)["tokens"] == 290  # the tenant is still over its limit
        assert compact(http, path, first=2, input=[2] * 40)["tokens"] == 240
        assert compact(http, path, first=2, input=[2] * 45)["tokens"] == 245
        assert refused(http, path, first=2, input=[2] * 60) == too_long
        with server.client(**admin) as operator:
            assert operator.get("/audit").status_code == 200


def test_turns_that_run_meanwhile_follow_the_summary(slow_witness: Server, slow_http: httpx.Client) -> None:
    path = opened(slow_http)
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(compact, slow_http, path, first=1, max_new_tokens=60, temperature=0)
        eventually(lambda: hidden_sessions(slow_witness) == 1)
        said = say(slow_http, path, "Meanwhile.", max_new_tokens=30)
        done = running.result(60)
    turns = records_of(slow_http, path)
    assert [turn["output_tokens"] for turn in turns] == [[], said["tokens"]]
    assert "Meanwhile." in turns[1]["input_text"]
    assert done["computed"] == done["tokens"] - 1
    slow_http.delete(path)


def test_a_session_that_is_rewound_meanwhile_is_not_compacted(slow_witness: Server, slow_http: httpx.Client) -> None:
    path = opened(slow_http)
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(refused, slow_http, path, first=2, max_new_tokens=200, temperature=0)
        eventually(lambda: hidden_sessions(slow_witness) == 1)
        slow_http.post(f"{path}/rewind", json={"turn": 2}).raise_for_status()
        tokens = tokens_of(slow_http, path)
        assert running.result(60) == (412, "version_mismatch")
    assert tokens_of(slow_http, path) == tokens
    slow_http.delete(path)


def test_nothing_is_left_of_a_compaction_whose_client_leaves(slow_witness: Server, slow_http: httpx.Client) -> None:
    path = opened(slow_http)
    before = slow_http.get(path).json()["version"]
    with slow_witness.client(timeout=httpx.Timeout(60, read=0.5)) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post(f"{path}/compact", json={"max_new_tokens": 2000, "temperature": 0})
    eventually(lambda: hidden_sessions(slow_witness) == 0)
    assert slow_http.get(path).json()["version"] == before
    slow_http.delete(path)


def test_a_compaction_survives_a_kill_once_it_is_acknowledged_and_leaves_nothing_before(tmp_path: Path) -> None:
    options = ("--model", "witness:0.005", "--journal", str(tmp_path / "journal"))
    with serving(*options) as server, server.client() as http:
        path = opened(http, id="s")
        http.post(f"{path}/fork", json={"id": "fork"}).raise_for_status()
        compact(http, path, **SPAN, summary=SUMMARY)
        kept = records_of(http, path)
        forked = records_of(http, "/v1/sessions/fork")
        beside = threading.Thread(target=_until_killed, args=(server.url, path))
        beside.start()
        time.sleep(0.3)  # while the model writes another summary
        server.kill_all()
        beside.join()
    with serving(*options) as server, server.client() as http:
        assert records_of(http, path) == kept
        assert records_of(http, "/v1/sessions/fork") == forked
        assert hidden_sessions(server) == 0
        say(http, path, "And now?")
        compact(http, path, summary=SUMMARY)
        last = records_of(http, path)
        server.kill_all()
    with serving(*options) as server, server.client() as http:
        assert records_of(http, path) == last
        say(http, path, "And now?")
        server.audit()


def _until_killed(url: str, path: str) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{url}{path}/compact", json={"max_new_tokens": 2000, "temperature": 0}, timeout=60)


def test_a_session_that_has_left_the_device_is_compacted_with_its_state(tmp_path: Path) -> None:
    options = ("--model", "witness", "--host-tier", "64MiB", "--memory", "40000", "--context-length", "2048")
    with serving(*options) as server, server.client() as http:
        path = opened(http, id="s")
        others = [opened(http, id=f"other-{number}", system=f"You are {number}. " * 20) for number in range(4)]
        assert http.get(path).json()["computed"] == 0
        start = records_of(http, path)[1]["start"]
        done = compact(http, path, **SPAN, summary=SUMMARY)
        assert done["computed_tokens"] == done["tokens"] - start
        for other in (*others, path):
            say(http, other, "And now?")
        server.audit()
