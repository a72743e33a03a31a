"""`python -m bench.forks [LENGTH...]`: what it takes to begin a sub-agent's session as a fork of its parent's.

A parent's conversation of each length goes on, one message after the other. Between its messages, children, named by
OpenCode's headers, send the conversation's beginning with a message of the same length. A child's request takes a fork
and its own tokens; the parent's takes its own tokens alone. The time of a fork itself is that of
`POST /v1/sessions/ID/fork`, beside a request that only reads the session. Medians; the model is hand-made
(`bench.clients.caller`), with a token for each byte.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.clients.caller import CONTEXT, write_caller
from bench.server import server
from tenuto.serve.shared.answer_headers import SESSION

LENGTHS = (1024, 8192, 65_536)
ROUNDS = 40
OWN, CHILDS = "What is next, if anything?", "What shall a sub-agent do?"


def seconds(ask: Callable[..., httpx.Response], *given: Any, **more: Any) -> float:
    """Returns how long a request takes."""
    began = time.perf_counter()
    ask(*given, **more).raise_for_status()
    return time.perf_counter() - began


def measure(http: httpx.Client, length: int) -> str:
    """Returns a row with the times for a parent of about `length` tokens."""
    parent = f"parent-{length}"
    messages: list[dict[str, str]] = [{"role": "user", "content": "z" * length}]

    def ask(name: str, given: list[dict[str, str]], **headers: str) -> httpx.Response:
        body = {"model": "any", "messages": given, "max_tokens": 1, "temperature": 0}
        return http.post(
            "/v1/chat/completions", json=body, headers={"x-session-id": name, **headers}
        ).raise_for_status()

    answer = ask(parent, messages)
    said = {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
    own = [said, {"role": "user", "content": OWN}]
    beginning, session = [*messages, said, {"role": "user", "content": CHILDS}], answer.headers[SESSION]
    forked, alone, forks, reads, cached = [], [], [], [], 0
    for number in range(ROUNDS):
        messages += own
        alone.append(seconds(ask, parent, messages))
        name = f"{parent}-child-{number}"
        began = time.perf_counter()
        answer = ask(name, beginning, **{"x-parent-session-id": parent})
        forked.append(time.perf_counter() - began)
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        forks.append(seconds(http.post, f"/v1/sessions/{session}/fork", json={"id": f"{name}-copy"}))
        reads.append(seconds(http.get, f"/v1/sessions/{session}"))
        for each in (answer.headers[SESSION], f"{name}-copy"):
            http.delete(f"/v1/sessions/{each}").raise_for_status()
    times = [1000 * median(each) for each in (forked, alone, forks, reads)]
    return f"{length:>8} {cached:>8} {times[0]:>10.2f} {times[1]:>10.2f} {times[2]:>10.2f} {times[3]:>10.2f}"


def main() -> None:
    """Prints a row for each length."""
    print(f"{'tokens':>8} {'cached':>8} {'forked':>10} {'its own':>10} {'fork':>10} {'read':>10}   ms")
    with tempfile.TemporaryDirectory() as folder:
        write_caller(Path(folder), "none", {})
        with (
            server(folder, CONTEXT, "--any-model-name") as running,
            httpx.Client(base_url=running.url, timeout=600) as http,
        ):
            for length in tuple(map(int, sys.argv[1:])) or LENGTHS:
                print(measure(http, length), flush=True)


if __name__ == "__main__":
    main()
