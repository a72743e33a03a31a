"""State after `kill -9`, and the cost of keeping it: `python -m bench.restart [LENGTH...]`.

A server with a journal and a disk tier gets one session of each length, on a small model of random weights with a long
context. The same turn is timed up to its first token with its state in memory, after `kill -9` and a start with the
state on disk (read from the system's cache, and from the disk), and after a start without it.

Then conversations run on the default model with and without saving, by turns, in this process. The figures are the
tokens a second, the CPU time, the gaps between two steps that give tokens, and the bytes written for each
committed token. On a machine that others use, too, the ratio of the CPU times says more than that of the speeds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import httpx
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from bench.server import Processes, server
from bench.tiers import uncache
from tenuto.base.config import WorkerSettings, engine_config
from tenuto.base.interpreter import configure_interpreter
from tenuto.base.options import TurnParams
from tenuto.runtime.models import Model, build_engine, load_model

LENGTHS = (8192, 65_536, 112_640)
CONTEXT = 131_072
NEW_TOKENS = 16
VOCABULARY = 258  # all bytes, the first and the last token
SESSIONS, TURNS, INPUT, OUTPUT = 4, 24, 48, 32
ROUNDS = 12


def make_model(directory: Path) -> None:
    """Writes a model with 1 KiB of keys and values a token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    special = ["<s>", "</s>"]
    tokenizer = Tokenizer(
        BPE(dict(zip([*special, *sorted(ByteLevel.alphabet())], range(VOCABULARY), strict=False)), [])
    )
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": special[0], "eos_token": special[1]}))


def first_token(http: httpx.Client, name: str, tokens: list[int]) -> tuple[float, int]:
    """Runs a turn of `tokens`; returns the seconds to its one output token and the number of cached tokens. The session
    is as before afterwards."""
    turns = http.get(f"/v1/sessions/{name}").raise_for_status().json()["turns"]
    began = time.perf_counter()
    body = {"input": tokens, "max_new_tokens": 1, "ignore_eos": True, "stream": False}
    answer = http.post(f"/v1/sessions/{name}/turns", json=body).raise_for_status().json()
    seconds = time.perf_counter() - began
    http.post(f"/v1/sessions/{name}/rewind", json={"turn": turns}).raise_for_status()
    return seconds, int(answer["usage"]["cached_tokens"])


@contextmanager
def running(model: Path, place: Path, *more: str) -> Iterator[tuple[Processes, httpx.Client, float]]:
    """Yields a server, a client of it, and the seconds that its start took."""
    began = time.perf_counter()
    arguments = ("--journal", str(place / "journal"), *more)
    with (
        server(str(model), CONTEXT, *arguments) as processes,
        httpx.Client(base_url=processes.url, timeout=3600) as http,
    ):
        yield processes, http, time.perf_counter() - began


def kill(processes: Processes) -> None:
    """Kills both processes at once."""
    for process in (processes.edge, processes.engine):
        os.kill(process, signal.SIGKILL)


def restarts(lengths: tuple[int, ...]) -> None:
    """Prints a row for each length."""
    draw = random.Random(1)
    print(
        f"{'tokens':>8} {'in memory':>10} {'killed':>8} {'uncached':>9} {'computed':>9}   cached tokens, saved within"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_model(model)
        for length in lengths:
            place = Path(folder, str(length))
            place.mkdir()
            tier = ("--disk-tier", str(place / "tier"))
            tokens = [draw.randrange(2, VOCABULARY) for _ in range(NEW_TOKENS)]
            with running(model, place, *tier) as (processes, http, _):
                history = [draw.randrange(2, VOCABULARY) for _ in range(length)]
                http.post("/v1/sessions", json={"id": "s"}).raise_for_status()
                http.post("/v1/sessions/s/append", json={"input": history}).raise_for_status()
                began = time.perf_counter()
                while "tenuto_unsaved_sessions 0.0" not in http.get("/metrics").text:
                    time.sleep(0.01)
                saved = time.perf_counter() - began
                here = [first_token(http, "s", tokens)[0] for _ in range(3)]
                kill(processes)
            found = []
            for uncached in (False, True):
                if uncached:
                    uncache(place / "tier")
                with running(model, place, *tier) as (processes, http, _):
                    found.append(first_token(http, "s", tokens))
                    kill(processes)
            with running(model, place) as (processes, http, _):
                computed = first_token(http, "s", tokens)[0]
                kill(processes)
            seconds = f"{median(here):>10.3f} {found[0][0]:>8.3f} {found[1][0]:>9.3f} {computed:>9.3f}"
            print(f"{length:>8} {seconds}   {found[0][1]}, {found[1][1]}; {saved:.2f} s", flush=True)


class Figures(NamedTuple):
    """What the conversations gave and took: `speed` in generated tokens a second, `cpu` in seconds of CPU, the 99th
    percentile of the gaps between tokens and the longest one in seconds, and the bytes `written` for each committed
    token."""

    speed: float
    cpu: float
    most_gaps: float
    longest_gap: float
    written: float


def conversations(model: Model, rate: int, directory: str) -> Figures:
    """Runs the conversations."""
    given = {"context_length": 2048, "disk_tier": directory, "checkpoint_rate": rate, "snapshot_seconds": 0.0}
    engine = build_engine(model, engine_config(given, model.max_context), 1 << 30)  # type: ignore[arg-type]
    engine.sessions.recover()
    draw, gaps = random.Random(3), list[float]()
    names = [engine.sessions.open(None).id for _ in range(SESSIONS)]
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(TURNS):
        for name in names:
            tokens = [draw.randrange(1000, 20000) for _ in range(INPUT)]
            engine.turns.submit(name, tokens, TurnParams(max_new_tokens=OUTPUT, ignore_eos=True))
        last = 0.0
        while not engine.idle:
            progressed, now = engine.step().progressed, time.perf_counter()
            if progressed:
                gaps += [now - last] if last else []
                last = now
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    saves = engine.idle_memory.saves
    committed = sum(len(engine.registry.get(name).history) for name in names)
    engine.end()
    speed, written = SESSIONS * TURNS * OUTPUT / seconds, saves.saved_bytes / committed
    return Figures(speed, cpu, quantiles(gaps, n=100)[-1], max(gaps), written)


def costs() -> None:
    """Prints the cost of saving."""
    configure_interpreter()
    model = load_model(WorkerSettings(page_size=16))
    rates = {"not saved": 0, "saved": 2**28}
    found: dict[str, list[Figures]] = {name: [] for name in rates}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + 1):
            for name, rate in rates.items() if number % 2 else reversed(rates.items()):
                figures = conversations(model, rate, str(Path(folder, f"{name} {number}")))
                if number:  # the first is for warming up
                    found[name].append(figures)
    model.executor.close()
    print(f"{SESSIONS} conversations of {TURNS} turns, {INPUT} tokens in and {OUTPUT} out; medians of {ROUNDS}")
    for name, rounds in found.items():
        speed, cpu, most, longest, written = (median(each) for each in zip(*rounds, strict=True))
        print(
            f"{name:<10} {speed:>7.1f} tokens/s, {cpu:.2f} s of CPU, 99 % of gaps below {1000 * most:.1f} ms, the"
            f" longest {1000 * longest:.1f} ms, {written:,.0f} bytes a token"
        )
    pairs = list(zip(found["saved"], found["not saved"], strict=True))
    speed, cpu = median(a.speed / b.speed for a, b in pairs), median(a.cpu / b.cpu for a, b in pairs)
    print(f"saved / not saved: {speed:.3f} of the tokens a second, {cpu:.3f} of the CPU time")


def main() -> None:
    """Prints both tables."""
    restarts(tuple(map(int, sys.argv[1:])) or LENGTHS)
    costs()


if __name__ == "__main__":
    main()
