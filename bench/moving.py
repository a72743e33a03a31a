"""The cost of moves of sessions in a fleet: `python -m bench.moving [--only gap|restart|outlive|ray] [--model M]
[--haproxy]`.

`gap`: two replicas of the model share a PostgreSQL server that does not flush its files. Turns stream from a session of
`--tokens` tokens, `--moves` in all, and during each the session moves to the other replica. The client stays connected
to the first replica. Before each of these turns the same one streams without a move. A step makes one token, since
nothing is guessed. The figures are the time between two tokens in turns without a move, and while state is copied; the
longest time between two tokens while the owner changes; and the longest during each whole move, and of as many tokens
of the turn before it. The longest of so many is large also if nothing moves.

`restart`: three replicas of the witness, with `--streams` clients. Each streams turn after turn of 50 tokens, at five a
second at most, through changing replicas. Every replica has rows for all of them. Each replica gets SIGTERM in turn,
and is started again once it has ended. The figures are the errors that clients see, and the turns whose tokens are not
the witness's. The replica on which a stream was opened goes on to pass it on until it ends.

`outlive`: the same with `--drain-seconds 2`, which most streams outlive. Turns have `"on_disconnect": "continue"`, and
clients whose streams break ask another replica for the rest.

`ray`: two replicas of the witness on a Ray cluster of this machine, with as many clients at Ray's proxy. Turns have 20
tokens, at one a second at most, and `"on_disconnect": "continue"`. The fleet is deployed again, and Ray replaces one
replica after the other. It runs only if it is named, in an environment with `tenuto[ray]` (`make test-ray` makes one).
With `--haproxy`, HAProxy takes the place of Ray's proxy.

Clients, replicas and PostgreSQL share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import httpx

from bench.streams import Streams, show
from tenuto.base.interpreter import configure_interpreter, exempt_existing_objects
from tests.postgres import database
from tests.ray.cluster import Cluster, Replica, clusters, is_running
from tests.serve.lines import lines
from tests.serve.replicas import Replicas, replicas

QUIET = 25
"""Tokens before each move."""
TOKENS = 560
"""Of a turn, which must be enough for a whole move."""
SETTLING = 0.1
"""Seconds after a move that still belong to it."""
HANDING_OVER = 0.05
"""Seconds before the end of a move in which the owner changes."""
RESTART_STEP = 0.2
RESTART_TOKENS = 50
RAY_STEP = 1.0
"""Ray's proxy takes about two milliseconds for each event."""
RAY_TOKENS = 20


async def deltas(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[tuple[float, list[int]]]:
    """Starts a turn, and yields when each delta has come, and its tokens. Raises `RuntimeError` if it fails."""
    async with http.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url}: {answer.status_code} {await answer.aread()!r}")
        name = ""
        async for line in lines(answer):
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data" and name == "delta":
                yield time.perf_counter(), json.loads(value)["tokens"]
            elif kind == "data" and name in ("error", "aborted"):
                raise RuntimeError(value)
        if name != "committed":
            raise RuntimeError(f"the stream ended with {name!r}")


async def gap(fleet: Replicas, tokens: int, moves: int) -> None:
    """Measures the times between tokens."""
    urls = [server.url for server in fleet.servers]
    async with httpx.AsyncClient(timeout=600) as http:
        (await http.post(f"{urls[0]}/v1/sessions", json={"id": "s"})).raise_for_status()
        given = [10 + number % 1000 for number in range(tokens)]
        fill = await http.post(f"{urls[0]}/v1/sessions/s/append", json={"input": given})
        fill.raise_for_status()
        await (await http.post(f"{urls[0]}/fleet/move", json={"session": "s", "to": urls[1]})).aread()  # hashes weights
        await (await http.post(f"{urls[0]}/fleet/move", json={"session": "s", "to": urls[0]})).aread()
        measured = []
        for number in range(1, moves + 1):
            still, _, _ = await _turn(http, urls[0], None, tokens)
            measured.append((still, *await _turn(http, urls[0], urls[number % 2], tokens)))
    _show_gaps(measured)


async def _turn(http: httpx.AsyncClient, url: str, to: str | None, length: int) -> tuple[list[float], float, float]:
    """Streams a turn of a session of `length` tokens, which moves to `to` unless that is None, and drops the turn.
    Returns when its tokens came, and when the move began and ended."""
    times: list[float] = []
    moving: asyncio.Task[None] | None = None
    began = ended = 0.0

    async def move() -> None:
        nonlocal began, ended
        began = time.perf_counter()
        (await http.post(f"{url}/fleet/move", json={"session": "s", "to": to})).raise_for_status()
        ended = time.perf_counter()

    body = {"input": [5], "max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    async for at, _ in deltas(http, f"{url}/v1/sessions/s/turns", body):
        times.append(at)
        if len(times) == QUIET and to is not None:
            moving = asyncio.ensure_future(move())
    if moving is not None:
        await moving
    if times[-1] < ended + SETTLING:
        raise RuntimeError("the turn ended before its session had moved")
    (await http.post(f"{url}/v1/sessions/s/rewind", json={"position": length})).raise_for_status()
    return times, began, ended


def _show_gaps(measured: Sequence[tuple[list[float], list[float], float, float]]) -> None:
    quiet: list[float] = []
    copying: list[float] = []
    longest: list[float] = []
    usual: list[float] = []
    at_end: list[float] = []
    for without, times, began, ended in measured:
        pairs = [pair for pair in pairwise(times) if pair[1] > began and pair[0] < ended + SETTLING]
        still = [late - early for early, late in pairwise(without[QUIET:])]
        quiet += still
        copying += [late - early for early, late in pairs if late < ended - HANDING_OVER]
        at_end.append(max(late - early for early, late in pairs if early < ended and late > ended - HANDING_OVER))
        longest.append(max(late - early for early, late in pairs))
        usual.append(max(still[: len(pairs)]))
    _show("while nothing moves", quiet)
    _show("while state is copied", copying)
    took = statistics.median(ended - began for *_, began, ended in measured)
    print(f"longest in each move: {_listed(longest)} ms; a move takes {1000 * took:.0f} ms")
    print(f"longest of as many without a move: {_listed(usual)} ms")
    print(f"longest while the owner changes: {_listed(at_end)} ms")
    usually = statistics.median(quiet)
    by_end, by_move, without_move = (1000 * (statistics.median(most) - usually) for most in (at_end, longest, usual))
    print(
        f"added to a step, medians: {by_end:.1f} ms while the owner changes (goal: 20), {by_move:.1f} ms at the "
        f"longest in each move, {without_move:.1f} ms without a move",
        flush=True,
    )


def _listed(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1000 * each:.1f}" for each in seconds)


def _show(when: str, seconds: Sequence[float]) -> None:
    middle, most = 1000 * statistics.median(seconds), 1000 * max(seconds)
    print(f"between two tokens {when}: median {middle:.1f} ms, longest {most:.1f} ms of {len(seconds)}")


async def restart(fleet: Replicas, clients: int, *, resumes: bool) -> None:
    """Restarts all replicas while clients stream."""
    urls = [server.url for server in fleet.servers]
    streams = Streams(lambda: urls, clients, RESTART_TOKENS, resumes=resumes)
    await streams.all_begun()
    began = time.perf_counter()
    for number in range(len(urls)):
        fleet.servers[number].process.terminate()
        status = await asyncio.to_thread(fleet.servers[number].process.wait, 600)
        took = time.perf_counter() - began
        await asyncio.to_thread(fleet.restart, number)
        print(f"replica {number + 1} has ended with status {status} {took:.1f} s after the beginning", flush=True)
    show(await streams.stop(), clients)


async def redeploy(cluster: Cluster, clients: int) -> None:
    """Deploys a fleet on Ray again while clients stream."""
    server = {"model": f"witness:{RAY_STEP}", "max_running": clients, "drain_seconds": 300.0}

    def deploy() -> list[Replica]:
        cluster.run(server=server)
        with cluster.client() as http:
            return cluster.replicas(http, 2)

    before = await asyncio.to_thread(deploy)
    streams = Streams(lambda: [cluster.url], clients, RAY_TOKENS, resumes=True)
    await streams.all_begun()
    began = time.perf_counter()
    deploying = asyncio.ensure_future(asyncio.to_thread(deploy))
    left = list(before)
    while left or not deploying.done():
        for each in [each for each in left if not is_running(each.server)]:
            left.remove(each)
            print(f"a replica has ended {time.perf_counter() - began:.1f} s after the beginning", flush=True)
        await asyncio.sleep(0.1)
    after = await deploying
    if {each.url for each in before} & {each.url for each in after}:
        raise RuntimeError("a replica was not replaced")
    print(f"the fleet was deployed again after {time.perf_counter() - began:.1f} s", flush=True)
    show(await streams.stop(), clients)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("gap", "restart", "outlive", "ray"))
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=7600)
    parser.add_argument("--moves", type=int, default=8)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--haproxy", action="store_true")
    given = parser.parse_args()
    configure_interpreter()
    exempt_existing_objects()  # otherwise collections in this client take 0.1 s, and look like gaps of the servers
    if given.only in (None, "gap"):
        model = ("--model", given.model) if given.model else ()
        with replicas(database(), 2, *model, "--context-length", "8192", "--speculate", "off") as fleet:
            asyncio.run(gap(fleet, given.tokens, given.moves))
    for kind, seconds in (("restart", 300), ("outlive", 2)):
        if given.only in (None, kind):
            options = ("--model", f"witness:{RESTART_STEP}", "--context-length", "8192")
            ends = ("--max-running", str(given.streams), "--drain-seconds", str(seconds))
            with replicas(database(), 3, *options, *ends) as fleet:
                asyncio.run(restart(fleet, given.streams, resumes=kind == "outlive"))
    if given.only == "ray":
        with clusters(database(), haproxy={} if given.haproxy else None) as cluster:
            cluster.wait()
            asyncio.run(redeploy(cluster, given.streams))


if __name__ == "__main__":
    main()
