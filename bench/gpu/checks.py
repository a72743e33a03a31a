"""Checks of what computes on a GPU: kernels, turns, memory, and that no step waits."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from bench.gpu import children
from bench.gpu.guesses import GuessingRows, prompts_of
from bench.gpu.models import HALF, NOTHING, RECURRENT, SMALL, Eager, Rows, executor
from bench.gpu.report import Check, Verdict
from bench.random_models import TYPES, attention, model, random_adapter, stored
from tenuto.base.plan import Ints, RowSampling
from tenuto.base.sampling import GREEDY, MAX_LOGPROBS, Sampling
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.native.grouped import Grouped
from tenuto.models.adapter import Adapter
from tenuto.models.config import ModelConfig

DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)
EDITED = replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3, logit_bias=((5, 1.5),))
HOW = {"any token": (DRAWN, False), "grammar": (DRAWN, True), "penalties": (EDITED, False)}
"""Options of rows that guess, and whether they have a grammar."""
PROMPTS, SAMPLED = (5, 150), 200
"""Rows and tokens of prompts, and the steps that follow, where turns are compared."""
GUESSING, LOOKAHEAD, GUESSED = [150, 1, 40, 220, 90], 4, 60
"""The tokens of prompts, the most guesses of a row in a step, and how many tokens rows sample, where they guess."""
WIDE = {
    "heads of 128": model(4, 2048, [attention(16, 4, 128)], 5632, 8000, 4096),
    "windows": model(4, 2048, [attention(16, 4, 64, window=300)], 5632, 8000, 4096),
}
"""Models whose logits are compared in 16 bits."""
LONG_PROMPTS, DECODED = (3, 700), 16
"""Rows and tokens of prompts whose logits are compared, and how many of the tokens are decoded one by one."""
APART = 1.5
KERNELS_TESTS = ["tests/kernels/gpu", "tests/exec/gpu", "--ignore", "tests/kernels/gpu/test_compiled.py"]
PROCESSES = "8"
"""The kernels' tests that need a GPU, and how many processes share them."""
KERNELS_SECONDS, SANITIZER_SECONDS = 150.0, 80.0
"""The most time for the kernels' tests, and for the memory checker, which runs everything many times slower."""
COMPUTED = "computed"


def turns() -> dict[str, Callable[[], Check]]:
    """Returns comparisons of turns of small models in float32, greedy and sampled, with plain and quantized weights."""
    found: dict[str, Callable[[], Check]] = {}
    for name, config in SMALL.items():
        found[f"{name}, greedy"] = partial(_compared, config, GREEDY)
        found[f"{name}, sampled"] = partial(_compared, config, DRAWN)
    plain = SMALL["full attention"]
    for name, kind in TYPES.items():
        found[f"{name}, sampled"] = partial(_compared, plain, DRAWN, kind)
        found[f"experts of {name}, sampled"] = partial(_compared, SMALL["experts"], DRAWN, kind)
    adapters = [random_adapter(plain, rank, rank) for rank in (8, 64)]
    found["adapters, sampled"] = partial(_compared, plain, DRAWN, adapters=adapters)
    return found


def _compared(
    config: ModelConfig,
    sampling: Sampling,
    numbers: Grouped | Kind | None = None,
    adapters: Sequence[Adapter] = (),
) -> Check:
    """Compares the tokens that each way of computing samples. With `numbers`, the weights are quantized."""
    prompts = np.random.default_rng(1).integers(0, config.vocab, PROMPTS).astype(np.int32)
    results: dict[str, Ints] = {}
    for name, kind in {"PyTorch": TorchForward, "queued": Eager, "captured": GpuForward}.items():
        weights = stored(config, numbers) if numbers is not None else None
        with executor(config, torch.float32, kind, weights) as made:
            results[name] = Rows(made, len(prompts), 512, sampling, adapters).turns(prompts, SAMPLED)
    expected, apart = results.pop("PyTorch"), []
    for name, tokens in results.items():
        differing = (tokens != expected).any(axis=1)
        if differing.any():
            apart.append(f"{name} steps differ from PyTorch from step {int(differing.argmax())} on")
    if apart:
        return Check(Verdict.DIFFERS, "; ".join(apart))
    return Check(Verdict.SAME, f"{expected.size} tokens of captured and of queued steps are PyTorch's")


def guesses() -> dict[str, Callable[[], Check]]:
    """Returns comparisons of rows with guesses, with grammars, penalties or neither: captured steps and steps queued
    kernel by kernel with plain PyTorch that does not guess."""
    return {
        f"{name}, {how}": partial(_guessed, config, sampling, grammar=grammar)
        for name, config in (SMALL | RECURRENT).items()
        for how, (sampling, grammar) in HOW.items()
    }


def _guessed(config: ModelConfig, sampling: Sampling, *, grammar: bool) -> Check:
    prompts, shown = prompts_of(config.vocab, GUESSING), []
    with executor(config, torch.float32, TorchForward) as made:
        expected = GuessingRows(made, sampling, LOOKAHEAD, grammar=grammar).turns(prompts, GUESSED)
    apart = []
    for name, kind in {"queued": Eager, "captured": GpuForward}.items():
        with executor(config, torch.float32, kind) as made:
            rows = GuessingRows(made, sampling, LOOKAHEAD, grammar=grammar)
            if rows.turns(prompts, GUESSED, expected) != expected:
                apart.append(f"{name} steps differ from PyTorch")
        shown.append(f"{name}: {rows.right} of {rows.guessed} guesses right")
    return Check(Verdict.DIFFERS if apart else Verdict.SAME, "; ".join(apart + shown))


def in_16_bits() -> dict[str, Callable[[], Check]]:
    """Returns comparisons of our kernels in 16 bits with PyTorch in float32: logits of prompts, and likeliest
    log-probabilities of captured decodes. They may differ `APART` times as much as PyTorch's in 16 bits do."""
    return {
        f"{what}, {name}": partial(_near, config, values)
        for what, values in {"logits of prompts": _logits, "captured decodes": _likeliest}.items()
        for name, config in WIDE.items()
    }


def _near(config: ModelConfig, values: Callable[[ModelExecutor], np.ndarray]) -> Check:
    """Compares `values` by the length of their difference from those in float32, over the length of these."""
    results = []
    for kind, dtype in ((TorchForward, torch.float32), (TorchForward, HALF), (GpuForward, HALF)):
        with executor(config, dtype, kind, stored(config, None)) as made:
            results.append(values(made))
    exact, theirs, ours = results
    own, other = (float(np.linalg.norm(each - exact) / np.linalg.norm(exact)) for each in (ours, theirs))
    near = own <= APART * other  # not if one is NaN
    return Check(Verdict.SAME if near else Verdict.DIFFERS, f"{own:.4f} from float32, and PyTorch {other:.4f}")


def _logits(made: ModelExecutor) -> np.ndarray:
    prompts = np.random.default_rng(2).integers(0, made.forward.config.vocab, LONG_PROMPTS).astype(np.int32)
    plan = Rows(made, len(prompts), 1024).plan(prompts)
    return made.logits(replace(plan, samples=plan.counts))


def _likeliest(made: ModelExecutor) -> np.ndarray:
    """Returns the likeliest tokens' log-probabilities in decodes of given tokens."""
    given = np.random.default_rng(2).integers(0, made.forward.config.vocab, LONG_PROMPTS).astype(np.int32)
    rows = Rows(made, len(given), 1024, RowSampling(GREEDY, top=MAX_LOGPROBS))
    rows.run(given[:, :-DECODED])
    found = []
    for tokens in given.T[-DECODED:]:
        made.submit(rows.plan(np.ascontiguousarray(tokens)[:, None]))
        sampled = made.collect().sampled
        assert sampled is not None
        found.append(sampled.top)
    return np.stack(found)


def kernels(folder: Path, seconds: float) -> Check:
    """Runs the kernels' tests on the device; the detail is pytest's last line."""
    log, seconds = folder / "kernels.txt", min(seconds, KERNELS_SECONDS)
    options = [
        "-q",
        "-n",
        PROCESSES,
        "--maxfail",
        "5",
        "--no-header",
        "--noconftest",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
    ]
    status = children.run(
        {log: [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *KERNELS_TESTS]}, seconds
    )[log]
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    if status is None:
        failed = any(re.match(r"^[.FEsxX]*[FE][.FEsxX]*( +\[|$)", line) for line in lines)
        return Check(Verdict.FAILED if failed else Verdict.LEFT_OUT, f"not done in {seconds:.0f} s: {lines[-1]}")
    return Check(Verdict.FAILED if status else Verdict.SAME, lines[-1])


def memory_checker(folder: Path, seconds: float) -> Check | dict[str, Check]:
    """Runs a few steps of small models under `compute-sanitizer`, queued kernel by kernel and captured. Without
    PyTorch's cache of memory, which captures need, it knows where every tensor ends."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return Check(Verdict.LEFT_OUT, "there is no compute-sanitizer")
    seconds = min(seconds, SANITIZER_SECONDS)
    runs = {"kernel by kernel": ("Eager", "1"), "captured": ("GpuForward", "0")}
    logs = {name: folder / f"sanitizer-{kind}.txt" for name, (kind, _) in runs.items()}
    child = "import bench.gpu.checks as c; c.few_steps(c.{})"
    command = [tool, "--tool", "memcheck", sys.executable, "-c"]
    done = children.run(
        {logs[name]: [*command, child.format(kind)] for name, (kind, _) in runs.items()},
        seconds,
        {logs[name]: {"PYTORCH_NO_CUDA_MEMORY_CACHING": uncached} for name, (_, uncached) in runs.items()},
    )
    return {name: _sanitized(logs[name].read_text(errors="replace"), done[logs[name]], seconds) for name in runs}


def _sanitized(output: str, status: int | None, seconds: float) -> Check:
    """Returns what the memory checker found, which ended with `status`, or not in these `seconds`."""
    lines = output.strip().splitlines() or ["no output"]
    found = [line for line in lines if re.match(r"========= .*(Invalid|error|Error|hit|leak)", line)]
    summary = [line for line in found if "ERROR SUMMARY" in line]
    if summary[-1:] and summary[-1].split("ERROR SUMMARY:")[1].split()[0] == "0" and status == 0:
        return Check(Verdict.SAME, "no error")
    if status is None and not found:
        models = sum(line.endswith(COMPUTED) for line in lines)
        return Check(Verdict.LEFT_OUT, f"not done in {seconds:.0f} s; no error in {models} models")
    return Check(Verdict.FAILED, " / ".join((found or lines)[:1] + lines[-1:]))


def few_steps(kind: type[GpuForward]) -> None:
    """Computes a prompt, a few decodes with adapters and log-probabilities, and guesses with grammars, penalties or
    neither, of each small model, cut to two layers."""
    for name, config in (SMALL | RECURRENT).items():
        cut = replace(config, layers=config.layers[:2])
        with executor(cut, torch.float32, kind) as made:
            rows = Rows(made, 3, 256, RowSampling(GREEDY, top=2), [random_adapter(cut, 8, 0)])
            rows.turns(np.ones((3, 70), np.int32), 3, overlap=0)
        for sampling, grammar in HOW.values():
            with executor(cut, torch.float32, kind) as made:
                guessing = GuessingRows(made, sampling, LOOKAHEAD, grammar=grammar)
                guessing.turns(prompts_of(cut.vocab, [9, 70]), 4, [[1] * 4] * 2)
        torch.cuda.synchronize()
        print(name, COMPUTED, flush=True)


def steps_without_waiting() -> Check:
    """Computes prompts, decodes and guesses, captured before, while PyTorch raises an error for every call that waits
    for the device."""
    for asked in (RowSampling(GREEDY), RowSampling(EDITED, NOTHING, NOTHING, top=5)):
        with executor(SMALL["full attention"], HALF, GpuForward) as made:
            rows = Rows(made, 4, 512, asked)
            prompts = np.ones((4, 40), np.int32)
            tokens = rows.turns(prompts, 4)[-1]
            torch.cuda.set_sync_debug_mode("error")
            try:
                rows.turns(prompts, 4)
                rows.decode(tokens, 8)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    for sampling, grammar in HOW.values():
        with executor(SMALL["gated delta net"], HALF, GpuForward) as made:
            guessing = GuessingRows(made, sampling, LOOKAHEAD, grammar=grammar)
            given, count = prompts_of(made.forward.config.vocab, GUESSING), GUESSED // 3
            expected = guessing.turns(given, count)
            guessing.turns(given, count, expected)
            torch.cuda.set_sync_debug_mode("error")
            try:
                guessing.turns(given, count, expected)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return Check(Verdict.SAME, "no call waited for the device")
