"""`python -m bench.clients.replay`: a coding agent's requests, replayed to servers that keep state by other rules.

OpenCode, unmodified, talks to a server (`bench.clients.agents`): it asks a question, sends the result of a tool, and
asks again in a new process. Its requests, with their headers, are then sent to each server, which has been started
for them and answers with the default model: Tenuto as it is, without finding runs by the names that clients give
them, and also without a prefix cache; llama.cpp and vLLM where `bench/install` has put them. For every request it
prints the tokens of the prompt that the server computed, and the time to the first token.

Recorded answers are those of another model, so what a server has said itself differs from what is sent back to it: it
computes those few tokens again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.clients.agents import record_opencode
from bench.clients.fetching import Fetched
from bench.clients.recording import Asked, Counted, usage_of
from bench.peers.catalog import Setting, llama_server, vllm_server
from bench.peers.processes import free_port, started, wait_until_ready
from bench.server import server
from tenuto.base.config import DEFAULT_MODEL

CONTEXT = 8192
SAID = 16
"""The tokens of each answer."""
OURS = {
    "Tenuto": (),
    "Tenuto, --no-find-runs": ("--no-find-runs",),
    "Tenuto, nothing kept": ("--no-find-runs", "--no-prefix-cache"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request cost: tokens of its prompt, those of it that were computed, and seconds to the first token."""

    prompt: int
    computed: int
    seconds: float


def replay(url: str, requests: Sequence[Asked]) -> list[Cost]:
    """Sends the requests one after the other. Returns their costs."""
    costs = []
    with httpx.Client(base_url=url, timeout=600) as http:
        for asked in requests:
            chosen = {"model": http.get("/v1/models").json()["data"][0]["id"], "stream": True}
            body = {**asked.body, **chosen, "max_tokens": SAID, "stream_options": {"include_usage": True}}
            headers = {name: value for name, value in asked.headers.items() if name.startswith("x-")}
            whole, first, began = b"", 0.0, time.perf_counter()
            with http.stream("POST", asked.path, json=body, headers=headers) as answer:
                if not answer.is_success:
                    raise RuntimeError(f"{answer.status_code}: {answer.read().decode()[:500]}")
                for line in answer.iter_lines():
                    whole += line.encode() + b"\n"
                    first = first or (time.perf_counter() - began if _says(line) else 0.0)
            if (usage := usage_of(whole)) is None:
                raise RuntimeError(f"an answer without usage: {whole[-500:]!r}")
            counted = Counted.of(usage)
            costs.append(Cost(counted.prompt, counted.prompt - counted.cached, first))
    return costs


def _says(line: str) -> bool:
    """Whether a line of a stream has text or a part of a call."""
    if not line.startswith("data: {"):
        return False
    deltas = [choice["delta"] for choice in json.loads(line[6:]).get("choices", ())]
    return any(delta.get(part) for delta in deltas for part in ("content", "reasoning_content", "tool_calls"))


@contextmanager
def peer(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[str]:
    """Runs a peer's server during the block; yields its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    with started([*command, "--port", url.rpartition(":")[2]], environment, log) as group:
        wait_until_ready(group, f"{url}/health")
        yield url


def main(given: list[str]) -> None:
    """Records, replays, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.clients.replay", description=__doc__)
    parser.add_argument("--packages", type=Path, help="a directory that keeps the packages for the next run")
    chosen = parser.parse_args(given)
    setting = Setting.of_this_machine()
    with tempfile.TemporaryDirectory(prefix="tenuto-replay-") as made:
        place = Path(made)
        fetched = Fetched((chosen.packages or place / "packages").resolve())
        (place / "opencode").mkdir()
        record, version = record_opencode(fetched, place / "opencode")
        print(
            f"OpenCode {version}: {len(record.requests)} requests; tokens computed of each prompt, time to first token"
        )
        for name, options in OURS.items():
            with server(DEFAULT_MODEL, CONTEXT, *options) as running:
                _show(name, replay(running.url, record.requests))
        for name, served in (("llama.cpp", llama_server(setting, CONTEXT)), ("vLLM", vllm_server(setting, CONTEXT))):
            if served is None:
                print(f"{name}: not installed here")
                continue
            with peer(*served, place / "log") as url:
                _show(name, replay(url, record.requests))


def _show(name: str, costs: Sequence[Cost]) -> None:
    shown = ", ".join(f"{each.computed:,} of {each.prompt:,} in {each.seconds:.2f} s" for each in costs)
    total, seconds = sum(each.computed for each in costs), sum(each.seconds for each in costs)
    print(f"{name}: {shown}; in all {total:,} tokens, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
