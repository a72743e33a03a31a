"""What request routers of Ray Serve cost a fleet: `python -m bench.ray_routing [--rounds N]`, in an environment with
`tenuto[ray]` (`make test-ray` makes one).

Two replicas of the witness run on a Ray cluster of this machine, behind Ray's proxy. They serve the same conversations
with each router, in turn, and then in the opposite order: Ray's own power of two choices, Ray's ring of consistent
hashes, and the router by owners. Ray starts the replicas anew for each. *Sessions*: a conversation is a session, which
its requests name in their path. *Resent*: a client sends the whole history each time, and names the conversation in
`x-session-id`.

Figures of each router are the tokens that a request had computed, the time to its first event, as a median with an
interval in brackets, and the share of requests that a replica forwarded. Clients, Ray and replicas share the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import httpx

from bench.spread import Spread
from tests.postgres import database
from tests.ray.cluster import Cluster, Replica, clusters

ROUTERS = {
    "power of two choices": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "consistent hashes": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
    "by owners": "tenuto.ray.router:SessionRouter",
}
CONVERSATIONS = 12
TURNS = 6
AT_ONCE = 4
INPUT_WORDS = 60
OUTPUT_TOKENS = 16
STATS_SECONDS = 1.0
SETTLING_SECONDS = 5.0
"""How long the router has to hear of the replicas."""


def first_event(http: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[float, str]:
    """Returns the seconds to the first event of an answer, and the whole answer."""
    began = time.perf_counter()
    with http.stream("POST", path, json=body, headers=headers) as answer:
        pieces = answer.iter_text()
        first = next(pieces, "")
        seconds = time.perf_counter() - began
        rest = "".join(pieces)
    if answer.status_code != 200:
        raise RuntimeError(f"{path}: {answer.status_code} {first}{rest}")
    return seconds, first + rest


def with_session(http: httpx.Client, number: int) -> list[float]:
    """Holds a conversation on a session. Returns the seconds to the first events."""
    session = http.post("/v1/sessions", json={}).raise_for_status().json()["id"]
    seconds = []
    for turn in range(TURNS):
        said = [{"role": "user", "content": words(number, turn)}]
        body = {"input": said, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        seconds.append(first_event(http, f"/v1/sessions/{session}/turns", body, {})[0])
    return seconds


def resent(http: httpx.Client, number: int) -> list[float]:
    """Holds a conversation whose client resends it. Returns the seconds to the first events."""
    messages: list[dict[str, str]] = []
    named = {"x-session-id": secrets.token_hex(8)}
    seconds = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": words(number, turn)})
        body = {"model": "default", "messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": True}
        took, events = first_event(http, "/v1/chat/completions", {**body, "ignore_eos": True}, named)
        seconds.append(took)
        parts = [json.loads(found) for found in re.findall(r"^data: (\{.*)$", events, re.MULTILINE)]
        said = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
        messages.append({"role": "assistant", "content": said})
    return seconds


def words(number: int, turn: int) -> str:
    """Returns what a client says."""
    return " ".join(f"w{(number * 7919 + turn * 104729 + word * 31) % 500}" for word in range(INPUT_WORDS))


KINDS = {"sessions": with_session, "resent": resent}


def total(replicas: list[Replica], metric: str) -> float:
    """Returns the sum of a counter over the replicas."""
    texts = [httpx.get(f"{each.url}/metrics", timeout=60).text for each in replicas]
    return sum(float(value) for text in texts for value in re.findall(rf"^{metric}_total (\S+)", text, re.MULTILINE))


Figures = dict[tuple[str, str], tuple[list[float], list[float], list[float]]]
"""Of each router and kind: seconds to the first events, and of each round tokens computed and shares forwarded."""


def measure(cluster: Cluster, rounds: int) -> Figures:
    """Runs all conversations with each router."""
    found: Figures = {}
    numbers = count()
    with cluster.client() as http:
        for turn in range(rounds):
            for router in list(ROUTERS)[:: 1 if turn % 2 == 0 else -1]:
                told = {"request_router_class": ROUTERS[router], "request_routing_stats_period_s": STATS_SECONDS}
                cluster.run(f"fleet-{next(numbers)}", request_router_config=told)  # proxies keep a router by its name
                replicas = cluster.replicas(http, 2)
                time.sleep(SETTLING_SECONDS)
                for kind, hold in KINDS.items():
                    computed = total(replicas, "tenuto_computed_tokens")
                    forwarded = total(replicas, "tenuto_forwarded_requests")
                    with ThreadPoolExecutor(AT_ONCE) as clients:
                        held = list(clients.map(partial(hold, http), range(CONVERSATIONS)))
                    seconds, tokens, shares = found.setdefault((router, kind), ([], [], []))
                    seconds += [each for one in held for each in one]
                    requests = CONVERSATIONS * TURNS
                    tokens.append((total(replicas, "tenuto_computed_tokens") - computed) / requests)
                    shares.append((total(replicas, "tenuto_forwarded_requests") - forwarded) / requests)
    return found


def main() -> None:
    """Prints the figures as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="Every other one is in the opposite order.")
    given = parser.parse_args()
    with clusters(database()) as cluster:
        cluster.wait()
        found = measure(cluster, given.rounds)
    print("| conversations | router | tokens computed a request | first event | forwarded |\n|---|---|---|---|---|")
    for kind in KINDS:
        for router in ROUTERS:
            seconds, tokens, shares = found[router, kind]
            first = Spread.of_median(seconds).scaled(1000).shown(".0f")
            cells = (f"{Spread.of(tokens).shown('.0f')}", f"{first} ms", f"{Spread.of(shares).shown('.0%')}")
            print(f"| {kind} | {router} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
