"""A server on a GPU with clients: sessions take turns, break off, rewind, fork and leave the device, and get the tokens
that plain PyTorch gives them there."""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.gpu.report import Check, Verdict
from bench.restart import VOCABULARY, make_model
from bench.server import server

SESSIONS, TURNS, INPUT, OUTPUT = 16, 4, 70, 48
CONTEXT = 2048
MEMORY = "6MiB"
"""For the state of sessions: about a fifth of what all of them have in the end, so that idle ones leave the device."""
SECONDS, REQUEST_SECONDS = 110.0, 20.0
"""The most time for both servers, and for a request."""
COUNTED = ("steps", "moved_units", "guessed_tokens", "aborts", "preemptions", "failed_steps")


def conversations(seconds: float, *arguments: str) -> Check:
    """Runs the conversations on a server with our kernels, and on one with PyTorch's, in at most `seconds`; the detail
    is what each counted, and the sessions whose tokens differ. `arguments`: of both servers, by default those for a
    GPU."""
    end = time.perf_counter() + min(seconds - REQUEST_SECONDS, SECONDS)
    try:
        return _compared(end, arguments or ("--device", "cuda"))
    except (TimeoutError, httpx.TimeoutException) as error:
        return Check(Verdict.LEFT_OUT, f"not done in time: {type(error).__name__} {error}")


def _compared(end: float, arguments: Sequence[str]) -> Check:
    found: dict[str, Any] = {}
    tokens: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_model(model)
        for kernels in ("auto", "torch"):
            more = ("--kernels", kernels, "--dtype", "float32", "--memory", MEMORY, "--host-tier", "1GiB")
            began = time.perf_counter()
            with (
                server(str(model), CONTEXT, *arguments, *more, "--overlap", "1", "--speculate", "suffix") as processes,
                httpx.Client(base_url=processes.url, timeout=REQUEST_SECONDS) as http,
            ):
                started = time.perf_counter() - began
                with ThreadPoolExecutor(SESSIONS) as clients:
                    tokens[kernels] = dict(clients.map(lambda i, at=http: _conversation(at, i, end), range(SESSIONS)))
                metrics, audit = http.get("/metrics").text, http.get("/audit").json()["summary"]
            counted: dict[str, Any] = {name: _total(metrics, name) for name in COUNTED}
            counted |= {"start_s": started, "seconds": time.perf_counter() - began - started, "audit": audit}
            found[kernels] = counted
    differing = [name for name, each in tokens["auto"].items() if tokens["torch"][name] != each]
    shown = "; ".join(f"{name}: {each}" for name, each in found.items())
    if differing:
        return Check(Verdict.DIFFERS, f"sessions {', '.join(differing)} of {SESSIONS}; {shown}")
    return Check(Verdict.SAME, f"tokens of {SESSIONS} sessions; {shown}")


def _conversation(http: httpx.Client, number: int, end: float) -> tuple[str, object]:
    """Runs a session, which ends with all that can happen to one; returns its name and its turns as exported. Raises
    `TimeoutError` at `end`."""
    draw, name = random.Random(number), f"s{number}"
    http.post("/v1/sessions", json={"id": name}).raise_for_status()
    for turn in range(TURNS):
        if time.perf_counter() >= end:
            raise TimeoutError(f"{name} has taken {turn} of {TURNS} turns")
        _turn(http, name, draw, turn)
        if turn == 0:
            _turn(http, name, draw, turn, keep=9)
            _turn(http, name, draw, turn, keep=0)
        elif turn == 1:
            http.post(f"/v1/sessions/{name}/fork", json={"id": f"{name}-fork"}).raise_for_status()
            _turn(http, f"{name}-fork", draw, turn)
        elif turn == 2:
            http.post(f"/v1/sessions/{name}/rewind", json={"turn": 2}).raise_for_status()
    exported = [http.get(f"/v1/sessions/{each}/export").raise_for_status().json() for each in (name, f"{name}-fork")]
    return name, [each["turns"] for each in exported]


def _turn(http: httpx.Client, name: str, draw: random.Random, number: int, keep: int | None = None) -> None:
    """Runs a turn; with `keep`, it is broken off as soon as so many tokens have come, and keeps them."""
    phrase = [draw.randrange(2, VOCABULARY) for _ in range(10)]
    body: dict[str, Any] = {
        "input": phrase * (INPUT // 20) + [draw.randrange(2, VOCABULARY) for _ in range(INPUT // 2)],
        "max_new_tokens": OUTPUT,
        "ignore_eos": True,
    }
    if number % 2:
        body |= {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": number}
    if keep is None:
        http.post(f"/v1/sessions/{name}/turns", json=body | {"stream": False}).raise_for_status()
        return
    seen, asked = 0, False
    with http.stream("POST", f"/v1/sessions/{name}/turns", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data:"):
                seen += len(json.loads(line[5:]).get("tokens", ()))
            if seen > keep and not asked:
                asked = True
                http.post(f"/v1/sessions/{name}/abort", json={"keep": keep}).raise_for_status()


def _total(metrics: str, name: str) -> float:
    """Returns the sum of a counter over its labels."""
    return sum(float(value) for value in re.findall(rf"^tenuto_{name}_total(?:{{.*}})? (\S+)$", metrics, re.MULTILINE))
