from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree as ET

import httpx
import pytest

from bench.peers.__main__ import parse
from bench.peers.catalog import PEERS, Peer, Setting
from bench.peers.conversations import CompletionsConversation, IkLlamaConversation, LlamaConversation
from bench.peers.picture import draw
from bench.peers.processes import started
from bench.peers.report import Results, document, table
from bench.peers.rounds import Rounds, order
from bench.peers.workload import Outcome, Shape, figures, workload
from bench.spread import Spread, repeated
from tenuto.cli.bench import Timed, measure
from tenuto.cli.bench_apis import BenchConversation, Counts
from tenuto.kernels.native.build import Machine

WORDS = tuple(range(200, 300))
SHAPE = Shape(2, 3)
USUAL = tuple(peer for peer in PEERS if not peer.asked)
OURS = tuple(peer for peer in USUAL if not peer.home and "-8" not in peer.name)  # the witness has no keys


def setting(peers: Path) -> Setting:
    return Setting("witness", Path("no.gguf"), peers, 1)


def fails(*_: object) -> list[str]:
    return [sys.executable, "-c", "raise SystemExit('there is no room')"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs Tenuto with the witness in both processes, beside a peer that does not start and one that is absent."""
    here = setting(tmp_path_factory.mktemp("peers"))
    peers = (*OURS, Peer("broken", "Broken", fails))
    samples = tuple(Rounds(here, WORDS, lambda _: None).run(peers, [SHAPE], 1))
    versions = {peer.name: peer.version(here) or "" for peer in peers}
    without = Machine(frozenset(), None)
    absent = tuple(filter(None, (peer.absence(here, without) for peer in PEERS)))
    return Results("a machine", "a command", 1, peers, (SHAPE,), samples, versions, absent, None)


def test_every_peer_is_measured_and_each_round_begins_with_another(results: Results) -> None:
    peers = results.peers
    assert [sample.peer for sample in results.samples] == [peer.name for peer in peers]
    assert order(peers, 0) == list(peers)
    assert order([], 1) == []
    assert order(peers, len(peers) + 2) == [*peers[2:], *peers[:2]]


def test_a_peer_may_be_measured_in_the_first_round_only(tmp_path: Path) -> None:
    peers = (Peer("every", "Every", fails), Peer("first", "First", fails, single=True))
    samples = Rounds(setting(tmp_path), WORDS, lambda _: None).run(peers, [SHAPE], 3)
    assert [sample.peer for sample in samples] == ["every", "first", "every", "every"]


def test_sessions_and_resent_histories_compute_only_new_tokens(results: Results) -> None:
    computed = {sample.peer: sample.figures.computed for sample in results.samples if sample.figures is not None}
    assert computed == dict.fromkeys(("tenuto", "tenuto-resend", "tenuto-inside", "tenuto-inside-plain"), 49)
    for sample in results.samples:
        if sample.figures is not None:
            assert len(sample.figures.ttft_by_turn) == SHAPE.turns
            assert sample.resident > 10_000_000
            assert sample.first_token > sample.figures.ttft / 1000


def test_the_document_lists_failed_and_missing_peers(results: Results) -> None:
    text = document(results, "picture.svg")
    assert "Broken: 1 of 1 runs failed: it ended (status" in text
    assert "| Broken | failed |" in text
    assert "Not installed here: vLLM, bfloat16 (`bench/install/vllm.sh`)." in text
    assert "Not on this CPU, which lacks avx512_bf16: OpenVINO GenAI, in process, 16-bit KV." in text
    assert "## 2 sessions at once, 3 turns each: up to 240 tokens" in text
    row = next(line for line in text.splitlines() if line.startswith("| Tenuto, sessions |"))
    assert row.split(" | ")[7] == "49"


def test_the_end_of_a_failing_peers_log_is_in_its_error(results: Results) -> None:
    assert all("there is no room" in sample.error for sample in results.samples if sample.peer == "broken")


def test_equal_results_are_drawn_as_equal_pictures(results: Results, tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(results, first)
    draw(results, second)
    assert first.read_bytes() == second.read_bytes()
    assert ET.parse(first).getroot().tag.endswith("svg")


def test_rates_come_from_the_middle_third_and_growth_from_the_last_turn() -> None:
    turns = [Timed(n, 48, n / 10, [0.1, 0.3], Counts(100 * n, 100 * n - 50 - n, 3)) for n in range(1, 10)]
    told = figures(Outcome(turns, 3.0))
    assert told.tokens_per_second == 9
    assert [told.ttft, told.itl, told.growth] == pytest.approx([500, 200, 4.5])
    assert told.computed == 55
    assert told.ttft_by_turn == pytest.approx([100 * n for n in range(1, 10)])


def test_the_rate_of_all_together_leaves_out_what_the_last_sessions_do_alone() -> None:
    """Two sessions of two turns, of 3 tokens each: one runs ahead, and the other goes on alone for 6 seconds."""
    counts = Counts(48, 0, 3)
    ahead = [Timed(n, 48, 0.5, [0.25, 0.25], counts, began=began) for n, began in ((1, 10.0), (2, 11.0))]
    behind = [Timed(n, 48, 2.0, [1.0, 1.0], counts, began=began) for n, began in ((1, 10.0), (2, 14.0))]
    told = figures(Outcome([*ahead, *behind], 8.0))
    assert told.tokens_per_second == 12 / 8
    assert told.together == 7 / 2
    assert [told.ttft, told.late_ttft] == pytest.approx([1250, 1850])


def test_a_run_with_a_failed_turn_has_no_figures() -> None:
    good = Timed(1, 48, 0.1, [0.1], Counts(48, 0, 2))
    with pytest.raises(RuntimeError, match="1 turns failed: busy"):
        Outcome([good, Timed(2, 48, error="busy")], 1.0)


def test_a_figure_is_the_median_with_its_extremes() -> None:
    values = iter([99.0, 3.0, 1.0, 2.0])
    assert repeated(lambda: next(values), 3) == Spread(2.0, 1.0, 3.0)
    assert Spread(2.0, 1.0, 3.0).scaled(10).shown(".0f") == "20 (10-30)"
    assert Spread(2.0, 2.0, 2.0).shown() == "2.0"
    assert table(["", "a"], [["b", "1"]]) == "|  | a |\n| --- | ---: |\n| b | 1 |"


def test_seeds_and_sessions_have_different_inputs() -> None:
    one = workload(SHAPE, 1, WORDS)
    assert one.inputs(0) == one.inputs(0)
    assert one.inputs(0) != one.inputs(1) != workload(SHAPE, 2, WORDS).inputs(1)
    assert {len(tokens) for tokens in one.inputs(0)} == {48}


def test_a_group_ends_with_the_processes_it_started(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 1000 & echo $!; sleep 1000"]
    with started(command, {}, tmp_path / "log", piped=True) as group:
        assert group.process.stdout is not None
        child = int(group.process.stdout.readline())
        group.freeze()
        assert group.resident_bytes() > 0
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or " Z " in status.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "tenuto,nobody"], "unknown nobody; known: tenuto, "),
        (["--shapes", "4"], "allowed: SESSIONSxTURNS"),
        (["--shapes", "0x4"], "at least 1 session and 2 turns"),
        (["--rounds", "0"], "0; allowed: at least 1"),
    ],
)
def test_an_invalid_command_line_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    assert said in capsys.readouterr().err


def test_peers_and_shapes_can_be_selected() -> None:
    chosen: Namespace = parse(["--peers", "llamacpp,tenuto", "--shapes", "1x2,3x4"])
    assert [peer.name for peer in chosen.peers] == ["llamacpp", "tenuto"]
    assert chosen.shapes == (Shape(1, 2), Shape(3, 4))
    assert parse([]).peers == USUAL


def test_kernels_that_another_cpu_would_use_are_measured_if_they_are_asked_for(tmp_path: Path) -> None:
    [peer] = parse(["--peers", "tenuto-inside-avx512_vnni-8"]).peers
    *_, kept_as, kernels, speculate = peer.command(setting(tmp_path), SHAPE)
    assert (kept_as, kernels, speculate) == ("int8", "avx512_vnni", "auto")
    assert "lacks avx512_vnni" in peer.absence(setting(tmp_path), Machine(frozenset({"avx2"}), None))


@pytest.mark.skipif("cpuid_fault" not in Machine.this().features, reason="CPUID cannot be intercepted here")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("cpu", ["avx512_vnni", "avx512", "avx2_vnni", "avx2"])
def test_a_peer_finds_a_lesser_cpu_if_that_is_asked_for(cpu: str, tmp_path: Path) -> None:
    widest = "AVX512" if cpu.startswith("avx512") and "avx512bw" in Machine.this().features else "AVX2"
    vnni = cpu == "avx512_vnni" and "avx512_vnni" in Machine.this().features
    [peer] = parse(["--peers", f"openvino-inside-8-{cpu}"]).peers
    asks = "from torch import backends, cpu; print(backends.cpu.get_cpu_capability(), "
    asks += "cpu._is_vnni_supported(), cpu._is_amx_tile_supported())"
    environment = {**os.environ, **peer.environment(setting(tmp_path))}
    said = subprocess.run([sys.executable, "-c", asks], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [widest, str(vnni), "False"]


class Scripted(BaseHTTPRequestHandler):
    """Answers like llama.cpp's server and vLLM: three tokens, in two pieces."""

    prompts: list[list[int | str]] = []  # noqa: RUF012 - of the one server there is

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "model"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = asked["prompt"]
        self.prompts.append(list(prompt))
        pieces: list[dict[str, Any]]
        if self.path == "/completion":
            last = {"tokens": [], "stop": True, "tokens_evaluated": len(prompt), "tokens_predicted": 3}
            timings = {"cache_n": len(prompt) - 5, "prompt_n": 5}
            pieces = [{"tokens": [1], "content": "One "}, {"tokens": [2, 3], "content": "two"}]
            pieces.append({**last, "timings": timings})
        else:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 3}
            details = {"prompt_tokens_details": {"cached_tokens": len(prompt) - 5}}
            pieces = [{"choices": [{"token_ids": ids}]} for ids in ([1], [2, 3])]
            pieces.append({"choices": [], "usage": {**usage, **details}})
        self._send("".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = Thread(target=server.serve_forever)
    thread.start()
    Scripted.prompts.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", [LlamaConversation, CompletionsConversation])
def test_peers_receive_the_whole_history_as_token_ids(scripted: str, kind: type[BenchConversation]) -> None:
    work = workload(Shape(1, 2), 0, WORDS, output=3)
    timed, _ = asyncio.run(measure(httpx.URL(scripted), None, kind, "resend", work, lambda: None))
    first, second = work.inputs(0)
    assert Scripted.prompts == [first, [*first, 1, 2, 3, *second]]
    assert [turn.counts for turn in timed] == [Counts(48, 43, 3), Counts(99, 94, 3)]
    assert [len(turn.gaps) for turn in timed] == [2, 2]


def test_a_peer_that_streams_only_text_receives_the_text_again(scripted: str) -> None:
    work = workload(Shape(1, 2), 0, WORDS, output=3)
    timed, _ = asyncio.run(measure(httpx.URL(scripted), None, IkLlamaConversation, "resend", work, lambda: None))
    first, second = work.inputs(0)
    assert Scripted.prompts == [first, [*first, "One two", *second]]
    assert [turn.counts for turn in timed] == [Counts(48, 43, 3), Counts(97, 92, 3)]
