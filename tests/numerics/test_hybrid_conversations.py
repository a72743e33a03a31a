"""Random conversations on models with sliding-window and recurrent layers: every token a session samples equals the one
sampled from scratch.

Like `test_conversations`, on small random models in float32 with every mix of memory groups, in pools that begin full
of garbage and are too small for all sessions; steps also fail at random. In PyTorch another token is allowed if its
logit is less than 1e-3 below the highest: logits of one sequence, cut differently, differ by up to 2e-4
(`test_families`).
"""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tenuto.base.config import EngineConfig, cache_dir
from tenuto.base.groups import Kind
from tenuto.base.plan import Ints, Plan
from tenuto.exec.forward import Forward
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.logits import Outputs
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tenuto.models.store import resolve
from tests.exec.kernels import HERE, needs_variant
from tests.exec.mixed_driver import MixedDriver
from tests.exec.spoil import spoil
from tests.models.tiny_hybrids import (
    VOCABULARY,
    tiny_bamba,
    tiny_falcon_h1,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_granite,
    tiny_mistral,
    tiny_nemotron_h,
    tiny_qwen3_next,
)
from tests.numerics.real import real_engine
from tests.numerics.test_conversations import (
    CONTEXT,
    PAGE,
    SESSIONS,
    Comparison,
    Conversations,
    assert_covered,
    compare,
    longest,
)

CLOSE = 1e-3
STEPS = 250
UNITS = {Kind.FULL: 90, Kind.SLIDING: 70, Kind.STATE: 34}


class Spoiled(TorchForward):
    """A forward pass whose memory begins filled with garbage."""

    def prepare(self, units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        super().prepare(units, rows, most_kept)
        for group, count in enumerate(units):
            spoil(self, group, range(count))


class Flaky:
    """A layer that sometimes fails after earlier layers have written their states."""

    def __init__(self, layer: Callable[..., None]) -> None:
        self._layer = layer
        self._rng = Random(0)
        self.failures = 0

    def __call__(self, *args: Any) -> None:
        if self._rng.random() < 0.03:
            self.failures += 1
            raise RuntimeError("told to fail")
        self._layer(*args)


class SpoiledNative(NativeForward):
    """The same for the native kernels, which sometimes fail after a step has been computed."""

    failures = 0

    def prepare(self, units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        super().prepare(units, rows, most_kept)
        self._rng = Random(1)
        for group, count in enumerate(units):
            spoil(self, group, range(count))

    def run(self, plan: Plan, tokens: Ints, outputs: Ints, *, best_only: bool = False) -> Outputs:
        found = super().run(plan, tokens, outputs, best_only=best_only)
        if self._rng.random() < 0.03:
            self.failures += 1
            raise RuntimeError("told to fail")
        return found


def conversations(forward: Forward, overlap: int) -> Conversations:
    """Runs random conversations in a pool too small for all sessions."""
    config = EngineConfig(
        context_length=CONTEXT, max_running=8, max_sessions=SESSIONS, token_budget=48, overlap=overlap, audit_every=1
    )
    text = np.random.default_rng(2).integers(3, VOCABULARY, 600).tolist()
    with real_engine(forward, config, units=tuple(UNITS[group.kind] for group in forward.spec.groups)) as engine:
        running = Conversations(engine, text, seed=overlap)
        running.run(STEPS)
    return running


def assert_all_compared(comparison: Comparison, running: Conversations, *, close: float) -> None:
    print(comparison, dict(running.engine.transitions), sep="\n")
    assert comparison.compared > 500
    assert all(behind < close for behind in comparison.behind), str(comparison)
    assert_covered(running)


FAMILIES = (
    (tiny_mistral, 1),
    (tiny_gemma3, 0),
    (tiny_bamba, 1),
    (tiny_granite, 0),
    (tiny_qwen3_next, 1),
    (tiny_gpt_oss, 0),
)
"""Models, with whether steps overlap in PyTorch."""

NATIVE_MODELS = [
    *((make, "auto") for make in (*(make for make, _ in FAMILIES), tiny_falcon_h1, tiny_nemotron_h)),
    *((make, "int8") for make in (tiny_gemma3, tiny_bamba)),
]
"""Models, with what the native kernels keep keys and values as."""


@pytest.mark.parametrize(("make", "overlap"), FAMILIES)
def test_every_turn_of_random_conversations_samples_what_is_sampled_from_scratch(
    tmp_path: Path, make: Callable[[], PreTrainedModel], overlap: int
) -> None:
    reference = make()
    reference.save_pretrained(tmp_path)
    checkpoint = HfCheckpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    flaky = decoder._layers[-1] = Flaky(decoder._layers[-1])  # type: ignore[call-overload]
    running = conversations(Spoiled(decoder, PAGE), overlap)
    comparison = compare(reference, longest(running.sampled))
    assert flaky.failures > 4
    assert_all_compared(comparison, running, close=CLOSE)


@needs_variant
@pytest.mark.parametrize(
    ("make", "kept_as", "variant"),
    [(*each, variant) for each, variant in zip(NATIVE_MODELS, cycle(HERE.variants() or ["none"]), strict=False)],
)
def test_overlapped_steps_of_native_kernels_sample_what_they_sample_from_scratch(
    tmp_path: Path, make: Callable[[], PreTrainedModel], kept_as: str, variant: str
) -> None:
    """Bit for bit: from scratch means every sequence at once, in its own memory. The variants take turns;
    `tests/models/test_families.py` compares texts cut and mixed at random in every variant of every model."""
    make().save_pretrained(tmp_path)
    files = resolve(str(tmp_path), tmp_path)
    executor = load_executor(files, ExecutorOptions(PAGE, kernels=variant, kv_cache_dtype=kept_as, cache=cache_dir()))
    forward = executor.forward
    assert isinstance(forward, NativeForward)
    spoiled = SpoiledNative(forward._library, forward._model, threads=2)
    running = conversations(spoiled, overlap=1)
    driver, comparison = MixedDriver(executor, rows=1, units=200), Comparison()
    for tokens, positions in longest(running.sampled):
        logits = driver.logits({0: tokens})
        comparison.add(logits[torch.tensor(positions) - 1], tokens, positions)
        driver.release(0)
    executor.close()
    assert spoiled.failures > 4
    assert_all_compared(comparison, running, close=1e-9)
