"""The cost of a killed replica: `python -m bench.takeovers [--only state|streams] [--tokens N] [--times N]`.

Two replicas of the model share a PostgreSQL server that does not flush its files.

`state`: a session of `--tokens` tokens is opened at one of them, which is killed, processes and all. Once its lease has
ended, the session's next turn goes to the other one. The figure is the time from this request to its first token, with
a disk tier in a directory that both share, and without. Both kinds of fleets take turns, and the ratio is the median of
the pairs. Files are in the system's cache.

`streams`: one of them is killed while it streams a turn, with a grammar every other time. The client asks the other one
for the rest at once, until it answers. The figure is the time from the kill to the next token. Computing is the time
that the other replica takes for the first token of a new session of the same length. The tokens have to be those of the
same turn in a session that is left alone; so the kernels are ones whose bits do not depend on the size of a step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from bench.spread import Spread
from tenuto.memory.tiers.state_index import StateIndex
from tenuto.memory.tiers.unit_files import INDEX
from tests.eventually import eventually
from tests.exec.kernels import EXACT
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas

VOCABULARY = 40_000
OUTPUT = 160
"""Tokens of a turn whose replica is killed, once it has streamed `SEEN` of them."""
SEEN = 40
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 100, "maxItems": 100}


def first_token(url: str, given: list[int]) -> float:
    """Returns the seconds until a turn of session `s` streams its first token. Waits for its end."""
    body = {"input": given, "max_new_tokens": 2, "ignore_eos": True}
    with httpx.Client(timeout=600) as http:
        began, took = time.perf_counter(), 0.0
        with http.stream("POST", f"{url}/v1/sessions/s/turns", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line == "event: delta" and not took:
                    took = time.perf_counter() - began
                if line == "event: committed":
                    return took
    raise RuntimeError("the turn was not committed")


def is_saved(path: Path, tokens: int) -> bool:
    """Whether some replica has saved the state of the session."""
    listed = [StateIndex.copy_of(each).find(("default", "s")) for each in path.glob(f"*/{INDEX}")]
    return any(found is not None and found.position >= tokens for found in listed)


def once(fleet: Replicas, tokens: int, seed: int, shared: Path | None) -> float:
    """Returns the time to the first token after the owner of a session was killed."""
    one, two = fleet.servers
    rng = Random(seed)
    httpx.post(f"{one.url}/v1/sessions", json={"id": "s"}, timeout=600).raise_for_status()
    first_token(one.url, [rng.randrange(1000, VOCABULARY) for _ in range(tokens)])
    if shared is not None:
        eventually(lambda: is_saved(shared, tokens))
    one.kill_all()
    time.sleep(2 * fleet.lease)
    return first_token(two.url, [rng.randrange(1000, VOCABULARY) for _ in range(8)])


class Stream:
    """A turn's stream: its `tokens` so far, and when the last ones came."""

    def __init__(self) -> None:
        self.turn = ""
        self.tokens: list[int] = []
        self.last = 0.0
        self.ended = False
        self._id = ""

    def begin(self, http: httpx.Client, url: str, body: dict[str, Any]) -> None:
        """Starts the turn at a replica, and reads `SEEN` tokens, or all if there are fewer."""
        with http.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            self.turn = answer.headers["x-turn-id"]
            for _ in self._read(answer.iter_lines()):
                if len(self.tokens) >= SEEN:
                    return

    def rest(self, http: httpx.Client, url: str) -> float:
        """Asks a replica for the rest until it answers, and reads it. Returns when the next token came."""
        first = 0.0
        while not self.ended:
            with http.stream("GET", f"{url}/{self.turn}/events", headers={"last-event-id": self._id}) as answer:
                if answer.status_code == httpx.codes.OK:
                    for _ in self._read(answer.iter_lines()):
                        first = first or self.last
        return first

    def _read(self, lines: Iterator[str]) -> Iterator[None]:
        """Yields after each delta. Raises `RuntimeError` if the turn failed."""
        name = ""
        for line in lines:
            kind, _, value = line.partition(": ")
            if kind == "id":
                self._id = value
            elif kind == "event":
                name, self.ended = value, value == "committed"
            elif kind == "data" and name in ("error", "aborted"):
                raise RuntimeError(value)
            elif kind == "data" and name == "delta":
                self.tokens += json.loads(value)["tokens"]
                self.last = time.perf_counter()
                yield


def continued(fleet: Replicas, tokens: int, seed: int) -> tuple[float, float]:
    """Kills the first replica while it streams a turn. Returns the seconds until the next token, and those of
    computing. Raises `RuntimeError` if a token is wrong."""
    one, two = fleet.servers
    rng = Random(seed)
    given = [rng.randrange(1000, VOCABULARY) for _ in range(tokens)]
    body: dict[str, Any] = {
        "input": given,
        "max_new_tokens": OUTPUT,
        "temperature": 1,
        "seed": seed,
        "on_disconnect": "continue",
    }
    body |= {"grammar": {"json_schema": LIST}} if seed % 2 else {"ignore_eos": True}
    with httpx.Client(timeout=600) as http:
        for name, server in (("alone", two), ("killed", one)):
            http.post(f"{server.url}/v1/sessions", json={"id": name}).raise_for_status()
        alone = http.post(f"{two.url}/v1/sessions/alone/turns", json={**body, "stream": False})
        right = alone.raise_for_status().json()["tokens"]
        stream = Stream()
        stream.begin(http, f"{one.url}/v1/sessions/killed/turns", body)
        one.kill_all()
        killed = time.perf_counter()
        went_on = stream.rest(http, f"{two.url}/v1/sessions/killed/turns") - killed
        if stream.tokens != right:
            raise RuntimeError(f"the stream has {stream.tokens}, not {right}")
        http.post(f"{two.url}/v1/sessions", json={"id": "s"}).raise_for_status()
    return went_on, first_token(two.url, [rng.randrange(1000, VOCABULARY) for _ in range(tokens + SEEN)])


def streams(times: int, tokens: int, *model: str) -> None:
    """Measures how soon streams go on."""
    measured = []
    for seed in range(times):
        with replicas(database(), 2, *model, "--kernels", EXACT, "--context-length", "8192") as fleet:
            measured.append(continued(fleet, tokens, seed))
            print("next token after {:.2f} s, of them computing {:.2f}".format(*measured[-1]), flush=True)
    went_on, computing = (Spread.of_median(each).shown(".2f") for each in zip(*measured, strict=True))
    most = max(whole - part for whole, part in measured)
    print(f"{'streams that went on with the right tokens':<46}{len(measured)}")
    print(f"{'seconds to the next token':<46}{went_on}")
    print(f"{'seconds of computing':<46}{computing}")
    print(f"{'most beside computing (goal: 2)':<46}{most:.2f}")


def states(times: int, tokens: int, *model: str) -> None:
    """Measures the first token with saved state, and without."""
    found: dict[str, list[float]] = {"computed again": [], "saved state": []}
    for number in range(times):
        for name, seconds in found.items():
            with TemporaryDirectory() as directory:
                shared = Path(directory) if name == "saved state" else None
                tier = ("--disk-tier", directory) if shared is not None else ()
                with replicas(database(), 2, *model, "--context-length", "8192", *tier) as fleet:
                    seconds.append(once(fleet, tokens, number, shared))
                    print(f"{name}: {seconds[-1]:.2f} s", flush=True)
    for name, seconds in found.items():
        print(f"{name + ', seconds to the first token':<46}{Spread.of_median(seconds).shown('.2f')}")
    ratios = [before / after for before, after in zip(*found.values(), strict=True)]
    print(f"{'ratio':<46}{Spread.of_median(ratios).shown('.1f')}")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("state", "streams"))
    parser.add_argument("--tokens", type=int, default=7600)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--model")
    given = parser.parse_args()
    model = ("--model", given.model) if given.model else ()
    if given.only in (None, "state"):
        states(given.times, given.tokens, *model)
    if given.only in (None, "streams"):
        streams(given.times, given.tokens, *model)


if __name__ == "__main__":
    main()
