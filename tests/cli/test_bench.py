from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tenuto.cli.bench import TOKEN_IDS, Timed, Workload, figures_of, quantile, timing, totals_of
from tenuto.cli.bench_apis import Counts
from tests.cli.inside import run_inside
from tests.serve.server import Server

WORKLOAD = Workload(sessions=3, turns=3, first_input=9, input=4, output=6, think=0.1, concurrency=3, seed=7)
SMALL = ["--sessions=3", "--turns=3", "--first-input-tokens=30", "--input-tokens=10", "--output-tokens=8"]


@pytest.fixture(scope="module", autouse=True)
def _no_sessions_are_left(witness: Server) -> Iterator[None]:
    yield
    assert httpx.get(f"{witness.url}/v1/sessions", timeout=60).json()["data"] == []


def bench(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_inside("bench", "--url", url, *arguments)


def figures(url: str, *arguments: str) -> dict[str, Any]:
    done = bench(url, *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_workload_depends_only_on_its_seed_and_session() -> None:
    assert WORKLOAD.inputs(0) == WORKLOAD.inputs(0) != WORKLOAD.inputs(1)
    assert [len(tokens) for tokens in WORKLOAD.inputs(2)] == [9, 4, 4]
    assert set().union(*WORKLOAD.inputs(0)) <= set(TOKEN_IDS)
    pauses = WORKLOAD.pauses(0)
    assert pauses == WORKLOAD.pauses(0)
    assert pauses[0] == 0
    assert all(0.05 <= pause <= 0.15 for pause in pauses[1:])


def test_tokens_that_arrive_together_share_the_time_since_the_previous_ones() -> None:
    assert timing(1.0, {3.0: 2, 4.0: 1, 4.5: 0, 6.0: 4}) == (2.0, [0.0, 1.0, 0.5, 0.5, 0.5, 0.5])
    assert timing(1.0, {}) == (None, [])


def test_figures_leave_out_failed_turns_and_totals_count_them() -> None:
    turns = [
        Timed(1, 9, 0.2, [0.1, 0.3], Counts(9, 0, 3)),
        Timed(1, 9, 0.4, [0.2], Counts(9, None, 2)),
        Timed(1, 9, error="busy"),
    ]
    first, second = figures_of(1, turns), figures_of(2, turns)
    assert (first.ended, first.context, first.new, first.cached) == (2, 9, 9, 0)
    assert (first.ttft_p50, first.ttft_p95, first.itl_p50, first.itl_p95) == (0.2, 0.4, 0.2, 0.3)
    assert (second.ended, second.context, second.ttft_p50) == (0, None, None)
    totals = totals_of(turns, 2.0, WORKLOAD)
    assert (totals.turns, totals.turns_per_second, totals.output_tokens_per_second) == (2, 1, 2.5)
    assert (totals.errors, totals.left_out) == ({"busy": 1}, 6)
    assert quantile(range(1, 101), 0.95) == 95


@pytest.mark.parametrize("api", ["tenuto", "sglang"])
def test_sessions_in_tokens_are_exact_and_compute_only_new_tokens(witness: Server, api: str) -> None:
    seed = {"tenuto": "1", "sglang": "2"}[api]  # output of other runs is cached
    said = figures(witness.url, "--api", api, "--seed", seed, *SMALL)
    assert [one["context"] for one in said["turns"]] == [30, 48, 66]
    assert [one["new"] for one in said["turns"]] == [30, 10, 10]
    assert [one["cached"] for one in said["turns"]] == [0, 37, 55]
    assert all(one["ended"] == 3 and one["ttft_p50"] <= one["ttft_p95"] for one in said["turns"])
    assert (said["totals"]["turns"], said["totals"]["output_tokens"], said["totals"]["errors"]) == (9, 72, {})
    resent = figures(witness.url, "--api", api, "--history", "resend", "--seed", f"{seed}0", *SMALL)
    assert [one["context"] for one in resent["turns"]] == [30, 48, 66]
    assert [one["cached"] for one in resent["turns"]] == [0, 37, 55]


@pytest.mark.parametrize("history", ["resend", "session"])
def test_chat_completions_are_measured_in_text(witness: Server, history: str) -> None:
    said = figures(witness.url, "--api", "openai", "--history", history, *SMALL, "--concurrency", "2")
    contexts = [one["context"] for one in said["turns"]]
    assert contexts == sorted(contexts)
    assert said["totals"]["output_tokens"] == 72
    assert said["turns"][2]["cached"] > 0


def test_the_table_is_plain_in_a_pipe(witness: Server) -> None:
    done = bench(witness.url, "--sessions", "2", "--turns", "2", "--output-tokens", "4", "--seed", "3")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].split()[:5] == ["turn", "ended", "context", "new", "cached"]
    assert [line.split()[:5] for line in lines[1:3]] == [["1", "2", "64", "64", "0"], ["2", "2", "132", "64", "67"]]
    assert "4 turns in " in lines[-1]
    assert "0 errors, 0 turns left out" in lines[-1]
    assert "\x1b" not in done.stdout


def test_errors_are_counted_and_the_status_is_1_only_if_all_turns_fail(witness: Server) -> None:
    some = bench(witness.url, "--sessions", "1", "--turns", "3", "--first-input-tokens", "10", "--input-tokens", "5000")
    assert some.returncode == 0
    assert "1 errors, 1 turns left out" in some.stdout
    assert "1 x " in some.stderr
    every = bench(witness.url, *SMALL, "--first-input-tokens", "5000")
    assert every.returncode == 1
    assert "3 errors, 6 turns left out" in every.stdout
    assert every.stderr.splitlines()[-1].startswith("tenuto: no turn succeeded: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--url", "http://127.0.0.1:9"], "no turn succeeded"),
        (["--url", "nowhere"], "not the address"),
        (["--api", "smtp"], "allowed: tenuto, openai, sglang"),
        (["--history", "oral"], "allowed: session, resend"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(witness: Server, arguments: list[str], complaint: str) -> None:
    done = bench(witness.url, *SMALL, *arguments)
    assert done.returncode == 1
    assert complaint in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("tenuto: ")


@pytest.mark.parametrize("api", ["tenuto", "openai", "sglang"])
def test_a_server_of_another_kind_fails_every_turn(api: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - as the base class has them

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        done = bench(f"http://127.0.0.1:{server.server_port}", "--api", api, *SMALL)
        server.shutdown()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tenuto: ")
    assert "Traceback" not in done.stderr
