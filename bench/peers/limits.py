"""Bounds of the figures: steps of Tenuto's and llama.cpp's engines by themselves, and the limit set by memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.kernels import DECODES, Decode, Figures, Prefill, Turn, executor_of
from bench.peers.catalog import LLAMA_PROGRAMS, Setting
from bench.peers.workload import NEW_TOKENS

CHUNKS = (16, 48, 128, 512)
"""Tokens of the prefills."""
TURNS = (80, 800, 1600, 3120)
"""Contexts of turns: those of the workload's second and last turn, and two between."""
TIMES = 15
LLAMA_TOKENS = 16
"""Number of tokens that llama.cpp's benchmark decodes at each point."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured steps of Tenuto's engine. `llama_decodes`: milliseconds of llama.cpp's steps, by rows and context.
    `llama_prefills`: its tokens per second, by number of tokens. Both are empty if llama.cpp is not installed."""

    kernels: str
    weight_bytes: int
    token_bytes: int
    decodes: tuple[Decode, ...]
    prefills: tuple[Prefill, ...]
    turns: tuple[Turn, ...]
    llama_decodes: dict[tuple[int, int], float]
    llama_prefills: dict[int, float]


def limits(setting: Setting) -> Limits:
    """Measures the steps of both engines. Raises `subprocess.CalledProcessError` if llama.cpp's benchmark fails."""
    with executor_of("auto") as executor:
        figures = Figures(executor, TIMES)
        decodes = tuple(figures.decode(rows, context) for rows, context in DECODES)
        prefills = tuple(figures.prefill(tokens) for tokens in CHUNKS)
        turns = figures.turns(TURNS, NEW_TOKENS)
        kernels, weights, token = figures.description, figures.weight_bytes, figures.token_bytes
    steps, rates = _llama(setting) if (setting.peers / LLAMA_PROGRAMS).exists() else ({}, {})
    return Limits(kernels, weights, token, decodes, prefills, turns, steps, rates)


def _llama(setting: Setting) -> tuple[dict[tuple[int, int], float], dict[int, float]]:
    """Runs llama.cpp's own benchmark at the same points. It cannot decode with an empty context, so the smallest
    prefill is used instead."""
    alone = sorted({context or CHUNKS[0] for rows, context in DECODES if rows == 1} | set(CHUNKS))
    together: dict[int, list[int]] = {}
    for rows, context in DECODES:
        if rows > 1:
            together.setdefault(context, []).append(rows)
    found = _batched_bench(setting, alone, [1])
    rates = {one["pp"]: one["speed_pp"] for one in found if one["pp"] in CHUNKS}
    for context, rows_there in together.items():
        found += _batched_bench(setting, [context], rows_there)
    steps = {(one["pl"], one["pp"]): 1e3 * one["t_tg"] / one["tg"] for one in found}
    return {(rows, context): steps[rows, context or CHUNKS[0]] for rows, context in DECODES}, rates


def _batched_bench(setting: Setting, prompts: Sequence[int], rows: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the lines of `llama-batched-bench`. All sequences have the same prompt, which is computed once and
    copied."""
    room = (max(prompts) + 2 * LLAMA_TOKENS) * max(rows)
    command = [
        str(setting.peers / LLAMA_PROGRAMS / "llama-batched-bench"),
        "--model",
        str(setting.gguf),
        "--threads",
        str(setting.threads),
    ]
    command += ["--flash-attn", "off", "--ctx-size", str(room), "-ntg", str(LLAMA_TOKENS), "-pps"]
    command += ["-npp", ",".join(map(str, prompts)), "-npl", ",".join(map(str, rows)), "--output-format", "jsonl"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - a peer's benchmark
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
