"""The feed of the map, what operators do from it, and traces, over HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.eventually import eventually
from tests.serve.server import Server, serving
from tests.serve.test_native import events, turn

ANN, BOB, ROOT = "ann-secret-1f", "bob-secret-2e", "root-secret-3d"
KEYS = "".join(f'[[keys]]\ntenant = "{name}"\nkey = "{key}"\n' for name, key in (("ann", ANN), ("bob", BOB)))
STATIC = Path(__file__).parents[2] / "src" / "tenuto" / "serve" / "static"
LONG = {"input": list(range(40)), "max_new_tokens": 3900, "ignore_eos": True}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    arguments = ("--keys", str(path), "--context-length", "4096", "--host-tier", "8MiB", "--no-prefix-cache")
    with serving("--model", "witness:0.002", *arguments, env={"TENUTO_ADMIN_API_KEY": ROOT}) as server:
        yield server
        with as_key(server, ROOT) as http:
            assert http.get("/audit").json()["clean"]


def as_key(server: Server, key: str) -> httpx.Client:
    return server.client(headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def ann(keyed: Server) -> Iterator[httpx.Client]:
    with as_key(keyed, ANN) as http:
        yield http


@pytest.fixture
def root(keyed: Server) -> Iterator[httpx.Client]:
    with as_key(keyed, ROOT) as http:
        yield http


def picture(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/map/feed").raise_for_status()
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


def shown(whole: dict[str, Any], session: str) -> dict[str, Any]:
    (found,) = [each for each in whole["sessions"] if each["id"] == session]
    return dict(found)


def units(session: dict[str, Any]) -> set[tuple[int, int]]:
    """Returns all units of a session, each with its pool."""
    found = [
        (pool, unit)
        for pool, _, ranges in session["held"]
        for first, count in zip(ranges[::2], ranges[1::2], strict=True)
        for unit in range(first, first + count)
    ]
    assert len(found) == len(set(found)), "a unit is listed twice"
    return set(found)


@contextmanager
def watching(http: httpx.Client) -> Iterator[Iterator[tuple[str, Any]]]:
    with http.stream("GET", "/map/feed", headers={"accept": "text/event-stream"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield ((name, data) for name, _, data in events(answer))


def test_the_map_accounts_for_every_unit(http: httpx.Client) -> None:
    for name in ("one", "two"):
        http.post("/v1/sessions", json={"id": name})
        turn(http, f"/v1/sessions/{name}", input=list(range(100)), max_new_tokens=30)
    http.post("/v1/sessions/one/fork", json={"id": "child"})
    turn(http, "/v1/sessions/child", input=[5] * 40)
    whole, audit = picture(http), http.get("/audit").json()
    held = [units(session) for session in whole["sessions"]]
    for index, pool in enumerate(whole["head"]["pools"]):
        leased = {unit for each in held for unit in each if unit[0] == index}
        recounted = audit["pools"][index]
        assert len(leased) == recounted["leased"]
        assert pool["free"] == recounted["free"]
        assert pool["other"] == []
    one, child = shown(whole, "one"), shown(whole, "child")
    assert child["parent"] == one["n"]
    assert child["forked"] == one["tokens"] == sum(map(sum, one["recent"]))
    assert units(one) & units(child)
    assert units(child) - units(one)


def test_a_viewer_sees_turns_begin_grow_and_end(slow_http: httpx.Client) -> None:
    slow_http.post("/v1/sessions", json={"id": "seen"})
    with watching(slow_http) as told:
        name, whole = next(told)
        assert name == "map"
        assert shown(whole, "seen")["tokens"] == 0
        outputs: list[int] = []
        with slow_http.stream("POST", "/v1/sessions/seen/turns", json=LONG):
            times = []
            while len(outputs) < 3:
                name, change = next(told)
                times.append(time.monotonic())
                assert name == "change"
                outputs += [each["turn"]["output"] for each in change["sessions"] if "turn" in each]
        assert outputs == sorted(outputs)
        assert len(times) <= 4 * (times[-1] - times[0]) + 3  # at most four a second
        while all("turn" in each for each in change["sessions"] if each["id"] == "seen"):
            _, change = next(told)
        slow_http.delete("/v1/sessions/seen")
        number = shown(whole, "seen")["n"]
        while number not in change.get("gone", []):
            _, change = next(told)


def test_a_viewer_who_does_not_read_holds_up_nobody(slow_http: httpx.Client) -> None:
    assert isinstance(slow_http.base_url.port, int)
    with socket.create_connection((slow_http.base_url.host, slow_http.base_url.port), timeout=10) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        stuck.sendall(b"GET /map/feed HTTP/1.1\r\nHost: a\r\nAccept: text/event-stream\r\n\r\n")
        for number in range(30):
            slow_http.post("/v1/sessions", json={"id": f"many-{number}", "metadata": {"a": "b" * 400}})
        for number in range(30):
            turn(slow_http, f"/v1/sessions/many-{number}", input=[number] * 50, max_new_tokens=4)
        with watching(slow_http) as told:
            _, whole = next(told)
            assert {f"many-{number}" for number in range(30)} <= {each["id"] for each in whole["sessions"]}
    for number in range(30):
        slow_http.delete(f"/v1/sessions/many-{number}")


def test_no_text_is_on_the_map(http: httpx.Client) -> None:
    http.post("/v1/sessions", json={"id": "secret", "metadata": {"note": "a hidden note"}})
    turn(http, "/v1/sessions/secret", input=[987] * 3)
    whole = picture(http)
    assert "hidden" not in json.dumps(whole)
    assert set(map(type, shown(whole, "secret").values())) <= {int, float, bool, str, list, type(None)}
    assert "987" not in json.dumps(shown(whole, "secret"))


def test_tenants_see_their_own_sessions_alone(keyed: Server, ann: httpx.Client, root: httpx.Client) -> None:
    with as_key(keyed, BOB) as bob:
        for http, name in ((ann, "hers"), (bob, "his")):
            http.post("/v1/sessions", json={"id": name})
            turn(http, f"/v1/sessions/{name}", input=[1] * 80)
        assert [each["id"] for each in picture(ann)["sessions"]] == ["hers"]
        assert {each["id"] for each in picture(root)["sessions"]} == {"hers", "his"}
        assert picture(ann)["head"].keys() == {"t", "more"}
        with watching(ann) as told:
            next(told)
            turn(bob, "/v1/sessions/his", input=[2] * 80)
            bob.delete("/v1/sessions/his")
            turn(ann, "/v1/sessions/hers", input=[3])
            seen: list[str] = []
            while "hers" not in seen:
                _, change = next(told)
                seen += [each["id"] for each in change["sessions"]]
                assert "gone" not in change
            assert set(seen) == {"hers"}


def test_an_operator_aborts_parks_exports_and_closes(ann: httpx.Client, root: httpx.Client) -> None:
    ann.post("/v1/sessions", json={"id": "work"})
    first = turn(ann, "/v1/sessions/work", input=[4] * 200)
    about = {"session": "work", "tenant": "ann"}
    with ann.stream("POST", "/v1/sessions/work/turns", json=LONG) as answer:
        told = events(answer)
        next(told)
        assert root.post("/map/action", json={"action": "park", **about}).status_code == 409
        assert root.post("/map/action", json={"action": "abort", **about}).status_code == 204
        assert list(told)[-1][0] == "aborted"
    assert shown(picture(root), "work")["computed"] > 0
    assert root.post("/map/action", json={"action": "park", **about}).status_code == 204
    parked = shown(picture(root), "work")
    assert (parked["computed"], parked["held"], parked["tier"]) == (0, [], "host")
    assert parked["parked"] == parked["tokens"] - 1
    file = root.get("/map/export", params={"session": "work", "of": "ann"}).json()
    assert file["version"] == first["version"] == ann.get("/v1/sessions/work").json()["version"]
    again = turn(ann, "/v1/sessions/work", input=[5])
    assert again["usage"]["cached_tokens"] == parked["parked"]
    assert root.post("/map/action", json={"action": "close", **about}).status_code == 204
    assert ann.get("/v1/sessions/work").status_code == 404


def test_nobody_acts_on_sessions_of_other_tenants_without_an_admin_key(ann: httpx.Client, keyed: Server) -> None:
    ann.post("/v1/sessions", json={"id": "guarded"})
    with as_key(keyed, BOB) as bob:
        for action in ("abort", "park", "close"):
            body = {"action": action, "session": "guarded"}
            assert bob.post("/map/action", json={**body, "tenant": "ann"}).status_code == 403
            assert bob.post("/map/action", json=body).status_code == 404
        assert bob.get("/map/export", params={"session": "guarded", "of": "ann"}).status_code == 403
        assert bob.get("/map/export", params={"session": "guarded"}).status_code == 404
        assert bob.get("/trace", params={"seconds": 0.1}).status_code == 403
    assert ann.post("/map/action", json={"action": "close", "session": "guarded"}).status_code == 204


def test_a_pinned_session_is_not_parked(http: httpx.Client) -> None:
    http.post("/v1/sessions", json={"id": "pinned", "pinned": True, "max_tokens": 200})
    turn(http, "/v1/sessions/pinned", input=[1] * 50)
    answer = http.post("/map/action", json={"action": "park", "session": "pinned"})
    assert (answer.status_code, "pinned" in answer.json()["error"]["message"]) == (400, True)
    assert shown(picture(http), "pinned")["computed"] > 0


def test_a_trace_has_every_step_and_what_its_turns_did(slow_http: httpx.Client) -> None:
    slow_http.post("/v1/sessions", json={"id": "traced"})
    with slow_http.stream("POST", "/v1/sessions/traced/turns", json=LONG) as answer:
        told = events(answer)
        next(told)
        found = slow_http.get("/trace", params={"seconds": 0.5}).json()
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in slices if event["name"].startswith("step")]
    assert len(steps) > 10
    numbers = [int(event["name"].removeprefix("step ")) for event in steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    for one, two in pairwise(steps):
        assert one["ts"] + one["dur"] <= two["ts"] + 0.2  # rounded to tenths of a microsecond
    names = {event["tid"]: event["args"]["name"] for event in found["traceEvents"] if event["name"] == "thread_name"}
    of_turn = [event for event in slices if event["pid"] == 2]
    assert {names[event["tid"]] for event in of_turn} == {"traced"}
    assert {event["name"] for event in of_turn} == {"decode"}
    assert len(of_turn) == len(steps)


def test_one_trace_is_made_at_a_time_and_ends_with_its_client(slow_server_url: str) -> None:
    with httpx.Client(base_url=slow_server_url, timeout=60) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.get("/trace", params={"seconds": 60}, timeout=httpx.Timeout(60, read=1))
        eventually(lambda: http.get("/trace", params={"seconds": 0.01}).status_code == 200)


@pytest.fixture
def slow_server_url(slow_witness: Server) -> str:
    return slow_witness.url


def test_the_pages_and_their_files_come_from_this_server_alone(http: httpx.Client) -> None:
    for path in ("/map", "/static/map.js", "/static/base.css", "/static/vendor/uPlot.iife.min.js"):
        answer = http.get(path).raise_for_status()
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        again = http.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for page in (*STATIC.glob("*.html"), *STATIC.glob("*.js"), *STATIC.glob("*.css")):
        text = page.read_text()
        assert "http://" not in text.replace("http://www.w3.org/", "")
        assert "https://" not in text
    for path in ("/static/", "/static/../pages.py", "/static/%2e%2e/pages.py", "/static/x.js", "/static/vendor"):
        assert http.get(path).status_code == 404, path


def test_the_vendored_files_are_those_that_were_published() -> None:
    vendor = STATIC / "vendor"
    lines = (line.split() for line in (vendor / "SHA256SUMS").read_text().splitlines())
    files = [path for path in vendor.iterdir() if path.suffix in (".js", ".css")]
    assert {name: digest for digest, name in lines} == {
        path.name: sha256(path.read_bytes()).hexdigest() for path in files
    }


def test_a_browser_gets_the_chat_page_and_others_are_sent_to_the_description(http: httpx.Client) -> None:
    page = http.get("/", headers={"accept": "text/html,application/xhtml+xml"})
    assert (page.status_code, "chat.js" in page.text) == (200, True)
    for accept in ("*/*", "application/json"):
        answer = http.get("/", headers={"accept": accept}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"], answer.headers["vary"]) == (307, "/docs", "accept")
