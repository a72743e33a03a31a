"""The forward pass on a GPU computes what plain PyTorch computes, also in captured steps."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.gpu.models import Eager, Rows
from bench.random_models import TYPES, attention, model, stored
from tenuto.base.errors import StepFailed
from tenuto.base.plan import (
    InputVectors,
    PageCopies,
    Plan,
    RowSampling,
    StepResult,
    TableChanges,
    TokenMasks,
    Words,
)
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.gpu import buckets
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.gpu.ring import CHANGES
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.row_options import RowOptions
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.gpu.adapters import SLOTS
from tenuto.kernels.gpu.fused import FUSED
from tenuto.kernels.quantized import Numbers, Quantized
from tenuto.models.config import Experts, GatedDelta, ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.weights import StoredWeight
from tests.exec.driver import Driver, Work
from tests.exec.gpu.conftest import DEVICE
from tests.exec.gpu.queue import HostQueue, Nothing, host_left_alone, watched
from tests.exec.gpu.steps import KNOWN, P, carried_out

MODELS = {
    "full attention": model(1, 32, [attention(2, 1, 16)], 48, 101, 128),
    "windows, sinks, norms": model(2, 32, [attention(2, 1, 16, window=20, sinks=True, qk_norm=True)], 48, 101, 128),
    "gated delta net": model(2, 32, [GatedDelta(1, 2, 16, 16, 4), attention(2, 1, 16, gated=True)], 48, 101, 128),
    "experts": model(1, 32, [attention(2, 1, 16)], Experts(5, 2, 16, normalised=True), 101, 128),
}
EXPERTS = Experts(3, 2, 32, normalised=True)
DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)


def decoder(config: ModelConfig, *, fused: bool) -> Decoder:
    torch.manual_seed(0)
    with torch.inference_mode():
        return Decoder(config, None, DEVICE, torch.float32, FUSED if fused else None)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("full attention", DRAWN),
        ("windows, sinks, norms", GREEDY),
        ("gated delta net", DRAWN),
        ("experts", GREEDY),
    ],
)
def test_captured_steps_sample_what_plain_pytorch_samples(name: str, sampling: Sampling) -> None:
    config, queue = MODELS[name], HostQueue()
    prompts = np.random.default_rng(1).integers(0, config.vocab, (2, 33)).astype(np.int32)
    results = []
    for forward in (
        TorchForward(decoder(config, fused=False), 32),
        Eager(decoder(config, fused=True), 32, queue),
        GpuForward(decoder(config, fused=True), 32, queue),
    ):
        executor = ModelExecutor(forward)
        results.append(Rows(executor, 2, 128, sampling).turns(prompts, 3).tolist())
        executor.close()
    assert results[0] == results[1] == results[2]
    assert (queue.captured, queue.runs) == (2, 4), "the prompts, and the decodes"


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 101, count).tolist()


STEPS: list[list[Work]] = [
    [(0, prompt(0, 20), 0), (1, prompt(1, 1), 0)],
    [(0, prompt(2, 13), 1), (1, prompt(3, 19), 1)],
    [(2, prompt(4, 22), 0), (0, [P], 1), (1, [P], 1)],
    [(2, prompt(5, 31), 1), (0, [P], 1), (1, [P], 1)],  # too long to be captured
    [(0, [P], 1), (1, [P], 1), (2, [P], 1)],
    [(1, [P], 1), (3, prompt(6, 33), 1)],  # too long to be captured
    [(1, [P], 1), (3, [P], 1)],
    [(3, [P], 1), (1, [P], 1), (0, [KNOWN], 1), (2, [KNOWN, *prompt(7, 4)], 1)],
    [(0, [P], 1), (2, [P, *prompt(8, 3)], 1)],
]
"""Rows compute chunks of prompts, of which some sample, beside others' decodes; rows pause and go on."""
LONGEST = 32


@pytest.mark.parametrize(("name", "overlap"), [("full attention", 1), ("windows, sinks, norms", 0)])
def test_captured_steps_with_prompts_sample_what_plain_pytorch_samples(
    name: str, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "MOST_TOKENS", LONGEST)
    config, queue = MODELS[name], HostQueue()
    sampling = [replace(DRAWN, seed=row) if row else GREEDY for row in range(4)]

    def sampled(forward: TorchForward) -> list[list[int]]:
        return [result.tokens.tolist() for result in carried_out(forward, STEPS, sampling, overlap)]

    expected = sampled(TorchForward(decoder(config, fused=False), 32))
    assert sampled(Eager(decoder(config, fused=True), 32, queue)) == expected
    assert queue.runs == 0
    assert sampled(GpuForward(decoder(config, fused=True), 32, queue)) == expected
    assert queue.runs == len(STEPS) - 2, "all but two run as captured"
    assert queue.captured == 5, "steps of about the same size are captured once"


def test_the_host_queues_a_captured_step_without_another_operation() -> None:
    queue = HostQueue()
    forward = GpuForward(decoder(MODELS["full attention"], fused=True), 32, queue)
    executor = ModelExecutor(forward)
    driver, options, known = Driver(executor, 40, 4), RowOptions(4, forward.edits(4)), Future[Words | None]()
    prompts = driver.plan([(0, prompt(0, 9), 1), (1, prompt(1, 4), 1)])
    decodes = driver.plan([(0, [5], 1), (1, [6], 1)])
    few = driver.plan([(0, [5, 6], 1), (1, [7], 1)])
    guesses = replace(few, samples=few.counts)
    known.set_result(np.ones((2, 4), np.uint32))
    masked = replace(guesses, masks=(TokenMasks(0, known),))
    penalised = RowSampling(replace(DRAWN, repetition_penalty=1.3, logit_bias=((5, 1.5),)), *np.ones((2, 1), np.int32))
    for asked, parts, plans in (
        (RowSampling(GREEDY), 1, [decodes, prompts, guesses]),
        (RowSampling(GREEDY, top=2), 2, [decodes]),
        (penalised, 2, [decodes, masked]),
    ):
        options.start(1, asked)
        for plan in plans:

            def queued(plan: Plan = plan) -> StepResult:
                wait = forward.decode(plan, lambda: plan.tokens, options)
                assert wait is not None, "it is captured"
                return wait()

            queue.idle = True  # captured now, and not run
            queued()
            runs = queue.runs
            with host_left_alone(), Nothing():
                result = queued()
            assert queue.runs == runs + parts
            assert len(result.tokens) == plan.samples.sum()
            assert (result.sampled is not None) == (asked.top is not None)
    executor.close()


def test_a_capture_that_fails_leaves_the_next_steps_right(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = HostQueue()
    executor = ModelExecutor(GpuForward(decoder(MODELS["full attention"], fused=True), 32, queue))
    driver = Driver(executor, 40, 4)
    first = driver.plan([(row, [1, 2, row], 1) for row in range(3)])
    executor.submit(first)
    expected = executor.collect().tokens.tolist()

    def fail(work: Callable[[], object]) -> Callable[[], None]:
        watched(work)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(queue, "capture", fail)
        executor.submit(driver.plan([(0, [5], 1)]))
        with pytest.raises(StepFailed, match="out of memory"):
            executor.collect()
    executor.submit(first)
    assert executor.collect().tokens.tolist() == expected
    executor.close()


def test_plans_that_a_captured_step_cannot_carry_out_are_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = GpuForward(decoder(MODELS["full attention"], fused=True), 32, HostQueue())
    executor = ModelExecutor(forward)
    driver = Driver(executor, 40, 4)
    plan = driver.plan([(0, prompt(0, 9), 1), (1, prompt(1, 1), 1)])
    known: Future[Words | None] = Future()
    known.set_result(None)
    options = RowOptions(4, forward.edits(4))

    def captured(plan: Plan) -> bool:
        return forward.decode(plan, lambda: plan.tokens, options) is not None

    assert captured(plan)
    assert captured(replace(plan, samples=plan.counts)), "guesses"
    assert captured(replace(plan, masks=(TokenMasks(0, known),)))
    options.start(1, RowSampling(GREEDY, top=2, named=(3,)))
    assert not captured(plan), "log-probabilities of named tokens"
    options.start(1, RowSampling(GREEDY, top=2))
    assert captured(plan)
    assert captured(replace(plan, adapters=np.ones(2, np.int32)))
    assert not captured(replace(plan, adapters=np.full(2, SLOTS, np.int32))), "a slot that the table has not"
    assert not captured(replace(plan, copies=(PageCopies(*np.zeros((3, 1), np.int32)),)))
    assert not captured(replace(plan, vectors=InputVectors(*np.ones((2, 1), np.int32))))
    assert not captured(replace(plan, tables=(TableChanges(*np.zeros((3, CHANGES + 1), np.int32)),)))
    monkeypatch.setattr(buckets, "MOST_SAMPLES", 9)
    assert not captured(replace(plan, samples=plan.counts)), "too many samples"
    monkeypatch.setattr("tenuto.exec.gpu.forward.MASKS", 1)
    assert captured(replace(plan, masks=(TokenMasks(0, known),)))
    assert not captured(replace(plan, masks=(TokenMasks(0, known), TokenMasks(1, known)))), "too many masks"
    executor.close()


def tokens_of_both(config: ModelConfig, weights: Mapping[str, StoredWeight], check: Callable[[Decoder], None]) -> None:
    """Has decoded weights and those that `check` looks at give the same tokens."""
    prompts = np.random.default_rng(1).integers(0, config.vocab, (2, 9)).astype(np.int32)
    results = []
    for fused in (None, FUSED):
        with torch.inference_mode():
            made = Decoder(config, weights.items(), DEVICE, torch.float32, fused)
        if fused is not None:
            check(made)
        executor = ModelExecutor(TorchForward(made, 32) if fused is None else GpuForward(made, 32, HostQueue()))
        results.append(Rows(executor, 2, 128, DRAWN).turns(prompts, 4).tolist())
        executor.close()
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("name", "network"), [*((name, 96) for name in TYPES), *((name, EXPERTS) for name in ("int4 with zeros", "mxfp4"))]
)
def test_quantized_weights_in_their_bits_give_the_tokens_of_decoded_ones(name: str, network: int | Experts) -> None:
    config = model(1, 64, [attention(2, 1, 32)], network, 101, 128)
    inner = "_inner" if isinstance(network, Experts) else "_gate_up"

    def check(made: Decoder) -> None:
        networks = [vars(layer._feed_forward) for layer in made._layers]
        assert all(isinstance(each, Quantized) for parts in networks for each in (parts["_down"], parts[inner]))

    tokens_of_both(config, dict(stored(config, TYPES[name])), check)


def test_matrices_of_several_types_that_share_their_input_keep_their_bits() -> None:
    config = model(1, 64, [attention(2, 1, 32)], 96, 101, 128)
    four, eight, plain = (dict(stored(config, TYPES.get(name))) for name in ("int4", "int8", "bfloat16"))
    weights = {name: (eight if ".v_proj" in name else plain if ".up_proj" in name else four)[name] for name in four}

    def check(made: Decoder) -> None:
        for layer in made._layers:
            qkv, inner = vars(layer._mixers[0])["_qkv"], vars(layer._feed_forward)["_gate_up"]
            assert [getattr(part, "numbers", None) for part in qkv.parts] == [Numbers.INT4, Numbers.INT8]
            assert [getattr(part, "numbers", None) for part in inner.parts] == [Numbers.INT4, None]

    tokens_of_both(config, weights, check)
