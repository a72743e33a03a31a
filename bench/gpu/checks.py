"""Checks of what computes on a GPU: kernels, turns, memory, and that no step waits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from bench.gpu.guesses import GuessingRows, prompts_of
from bench.gpu.models import NOTHING, RECURRENT, SMALL, Eager, Rows, executor
from bench.random_models import TYPES, attention, model, random_adapter, stored
from tenuto.base.plan import Ints, RowSampling
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.native.grouped import Grouped
from tenuto.models.adapter import Adapter
from tenuto.models.config import ModelConfig

DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)
EDITED = replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3, logit_bias=((5, 1.5),))
HOW = {"any token": (DRAWN, False), "grammar": (DRAWN, True), "penalties": (EDITED, False)}
"""Options of rows that guess, and whether they have a grammar."""
LOOKAHEAD, GUESSED = 4, 60
"""The most guesses of a row in a step, and the number of tokens that rows sample, where they guess."""
SANITIZER_SECONDS = 80.0
"""Time for the memory checker, which runs everything many times slower."""


def same_turns() -> dict[str, str]:
    """Compares turns of small models in float32, greedy and sampled."""
    found: dict[str, str] = {}
    for name, config in SMALL.items():
        for sampling in (GREEDY, DRAWN):
            how = "greedy" if sampling is GREEDY else "sampled"
            found |= _compared(f"{name}, {how}", config, sampling)
    plain = SMALL["full attention"]
    for name, kind in TYPES.items():
        found |= _compared(f"{name}, sampled", plain, DRAWN, kind)
        found |= _compared(f"experts of {name}, sampled", SMALL["experts"], DRAWN, kind)
    adapters = [random_adapter(plain, rank, rank) for rank in (8, 64)]
    return found | _compared("adapters, sampled", plain, DRAWN, adapters=adapters)


def _compared(
    name: str,
    config: ModelConfig,
    sampling: Sampling,
    numbers: Grouped | Kind | None = None,
    adapters: Sequence[Adapter] = (),
) -> dict[str, str]:
    """Compares the tokens that each way of computing samples. With `numbers`, the weights are quantized."""
    prompts = np.random.default_rng(1).integers(0, config.vocab, (5, 150)).astype(np.int32)
    results: dict[str, Ints] = {}
    found: dict[str, str] = {}
    for kind in (TorchForward, Eager, GpuForward):
        weights = stored(config, numbers) if numbers is not None else None
        with executor(config, torch.float32, kind, weights) as made:
            results[kind.__name__] = Rows(made, 5, 512, sampling, adapters).turns(prompts, 200)
    captured = results["GpuForward"]
    for other in ("Eager", "TorchForward"):
        differing = (results[other] != captured).any(axis=1)
        at = int(differing.argmax()) if differing.any() else None
        shown = "same tokens" if at is None else f"differ from step {at} of {len(captured)}"
        found[f"{name}: captured steps and {other}"] = shown
        print(f"{name}: captured steps and {other}: {shown}", flush=True)
    return found


def same_guesses() -> dict[str, str]:
    """Compares rows with guesses, with grammars, penalties or neither: captured steps and steps queued kernel by kernel
    with plain PyTorch that does not guess."""
    found: dict[str, str] = {}
    for name, config in (SMALL | RECURRENT).items():
        prompts = prompts_of(config.vocab, [150, 1, 40, 220, 90])
        for how, (sampling, grammar) in HOW.items():
            with executor(config, torch.float32, TorchForward) as made:
                expected = GuessingRows(made, sampling, LOOKAHEAD, grammar=grammar).turns(prompts, GUESSED)
            for kind in (Eager, GpuForward):
                with executor(config, torch.float32, kind) as made:
                    rows = GuessingRows(made, sampling, LOOKAHEAD, grammar=grammar)
                    same = rows.turns(prompts, GUESSED, expected) == expected
                shown = f"{'same tokens' if same else 'tokens differ'}, {rows.right} of {rows.guessed} guesses right"
                found[f"{name}, {how}: {kind.__name__}"] = shown
                print(f"{name}, {how}, {kind.__name__}: {shown}", flush=True)
    return found


def prompts_in_bfloat16() -> dict[str, dict[str, float]]:
    """Compares the logits of a prompt in bfloat16, by our kernels and by PyTorch, with those in float32: the length of
    the difference over that of the logits, and how many tokens have another likeliest one."""
    found = {}
    for name, one in {"heads of 128": attention(16, 4, 128), "windows": attention(16, 4, 64, window=300)}.items():
        config = model(4, 2048, [one], 5632, 8000, 4096)
        prompts = np.random.default_rng(2).integers(0, config.vocab, (3, 700)).astype(np.int32)
        results = {}
        for what, kind, dtype in (
            ("float32", TorchForward, torch.float32),
            ("PyTorch", TorchForward, torch.bfloat16),
            ("our kernels", GpuForward, torch.bfloat16),
        ):
            with executor(config, dtype, kind, stored(config, None)) as made:
                plan = Rows(made, len(prompts), 1024).plan(prompts)
                results[what] = made.logits(replace(plan, samples=plan.counts))
        exact = results.pop("float32")
        for what, logits in results.items():
            apart = float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
            others = float((logits.argmax(axis=1) != exact.argmax(axis=1)).mean())
            found[f"{name}: {what}"] = {"difference": apart, "other tokens": others}
    return found


def kernels(folder: Path) -> str:
    """Runs the kernels' tests on the device; returns pytest's last line."""
    log = folder / "kernels.txt"
    options = ["-q", "-n", "8", "--maxfail", "5", "--no-header", "--noconftest", "-c", os.devnull, "--rootdir", "."]
    paths = ["tests/kernels/gpu", "tests/exec/gpu", "--ignore", "tests/kernels/gpu/test_compiled.py"]  # needs no GPU
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *paths]
    with log.open("w") as file:
        subprocess.run(  # noqa: S603 - our own command
            command, stdout=file, stderr=subprocess.STDOUT, timeout=200, check=False
        )
    return log.read_text().strip().splitlines()[-1]


def memory_checker(folder: Path) -> dict[str, str]:
    """Runs a few steps of small models under `compute-sanitizer`, queued kernel by kernel and captured; returns its
    last lines. Without PyTorch's cache of memory, which captures need, it knows where every tensor ends."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return {"not run": "there is no compute-sanitizer"}
    runs = {"kernel by kernel": ("Eager", "1"), "captured": ("GpuForward", "0")}
    logs = {name: folder / f"sanitizer-{kind}.txt" for name, (kind, _) in runs.items()}
    children = {}
    for name, (kind, uncached) in runs.items():
        child = [sys.executable, "-c", f"import bench.gpu.checks as c; c.few_steps(c.{kind})"]
        with logs[name].open("w") as file:
            children[name] = subprocess.Popen(  # noqa: S603 - our own command
                [tool, "--tool", "memcheck", *child],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": uncached},
            )
    end, found = time.monotonic() + SANITIZER_SECONDS, {}
    for name, process in children.items():
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        lines = logs[name].read_text().strip().splitlines() or ["no output"]
        found[name] = " | ".join(lines[-3:]) if process.returncode else lines[-1]
    return found


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
        print(name, "computed", flush=True)


def steps_without_waiting() -> str:
    """Computes prompts, decodes and guesses, captured before, while PyTorch raises an error for every call that waits
    for the device."""
    for asked in (RowSampling(GREEDY), RowSampling(EDITED, NOTHING, NOTHING, top=5)):
        with executor(SMALL["full attention"], torch.bfloat16, GpuForward) as made:
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
        with executor(SMALL["gated delta net"], torch.bfloat16, GpuForward) as made:
            guessing = GuessingRows(made, sampling, LOOKAHEAD, grammar=grammar)
            given = prompts_of(made.forward.config.vocab, [40, 9, 70])
            expected = guessing.turns(given, 20)
            guessing.turns(given, 20, expected)
            torch.cuda.set_sync_debug_mode("error")
            try:
                guessing.turns(given, 20, expected)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return "no call waited for the device"
