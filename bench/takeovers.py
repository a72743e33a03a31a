"""The first token after a replica was killed: `python -m bench.takeovers [--tokens N] [--times N] [--model NAME]`.

Two replicas of the model share a PostgreSQL server that does not flush its files. A session of `--tokens` tokens is
opened at one of them, which is killed, processes and all. Once its lease has ended, the session's next turn goes to the
other one. The figure is the time from this request to its first token, with a disk tier in a directory that both share,
and without. Both kinds of fleets take turns, and the ratio is the median of the pairs. Files are in the system's cache.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx

from bench.spread import Spread
from tenuto.memory.tiers.state_index import StateIndex
from tenuto.memory.tiers.unit_files import INDEX
from tests.eventually import eventually
from tests.postgres import database
from tests.serve.replicas import Replicas, replicas

VOCABULARY = 40_000


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


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=7600)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--model")
    given = parser.parse_args()
    model = ("--model", given.model) if given.model else ()
    found: dict[str, list[float]] = {"computed again": [], "saved state": []}
    for number in range(given.times):
        for name, times in found.items():
            with TemporaryDirectory() as directory:
                shared = Path(directory) if name == "saved state" else None
                tier = ("--disk-tier", directory) if shared is not None else ()
                with replicas(database(), 2, *model, "--context-length", "8192", *tier) as fleet:
                    times.append(once(fleet, given.tokens, number, shared))
                    print(f"{name}: {times[-1]:.2f} s", flush=True)
    for name, times in found.items():
        print(f"{name + ', seconds to the first token':<46}{Spread.of_median(times).shown('.2f')}")
    ratios = [before / after for before, after in zip(*found.values(), strict=True)]
    print(f"{'ratio':<46}{Spread.of_median(ratios).shown('.1f')}")


if __name__ == "__main__":
    main()
