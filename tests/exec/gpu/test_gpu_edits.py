"""Biases, masked and allowed ids, penalties and log-probabilities on a GPU are those of the host's logits, also in
captured steps."""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gpu.models import Eager
from bench.random_models import attention, model
from tenuto.base.plan import RowSampling
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.gpu import buckets
from tenuto.exec.gpu.edits import GpuEdits
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.row_edits import HostEdits
from tenuto.exec.token_counts import NO_GUESS
from tenuto.exec.torch_forward import TorchForward, TorchLogits
from tenuto.kernels.gpu.fused import FUSED
from tenuto.models.decoder import Decoder
from tests.exec.driver import Work
from tests.exec.gpu.conftest import DEVICE
from tests.exec.gpu.queue import HostQueue
from tests.exec.gpu.steps import KNOWN, P, carried_out

T = TypeVar("T")
ROWS, VOCAB = 4, 1100  # in two blocks
token = st.one_of(st.integers(0, 4), st.integers(VOCAB - 3, VOCAB - 1), st.integers(0, VOCAB - 1))
beyond = st.integers(VOCAB, VOCAB + 9)  # ids that the model does not have


@st.composite
def row_samplings(draw: st.DrawFn) -> RowSampling:
    """Options of a row: all of them, some, or none."""

    def some(values: st.SearchStrategy[T], none: T) -> T:
        return draw(st.one_of(st.just(none), values))

    ids = st.lists(st.one_of(token, beyond), max_size=6, unique=True)
    biases = [(each, draw(st.floats(-3, 3, width=32))) for each in draw(ids)]
    sampling = Sampling(
        repetition_penalty=some(st.sampled_from([0.5, 1.5]), 1.0),
        presence_penalty=some(st.sampled_from([-1.0, 0.25]), 0.0),
        frequency_penalty=some(st.sampled_from([-0.5, 0.75]), 0.0),
        logit_bias=tuple(biases),
        allowed_ids=tuple(some(ids, [])),
    )
    history = [np.array(draw(st.lists(token, max_size=8)), np.int32) for _ in range(2)]
    prompt, output = (np.unique(history[0]), history[1]) if sampling.penalised else (None, None)
    return RowSampling(sampling, prompt, output, tuple(some(ids, [])), draw(st.integers(0, 4)))


steps = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, ROWS - 1), row_samplings(), max_size=2),
        st.lists(st.tuples(st.integers(0, ROWS - 1), st.lists(token, max_size=3)), unique_by=lambda each: each[0]),
    ),
    min_size=1,
    max_size=3,
)
"""Rows that start, and rows that sample, with guesses."""


@settings(max_examples=40, deadline=None)
@given(steps=steps, position=st.integers(0, 5), seed=st.integers(0, 9))
def test_logits_are_edited_as_on_the_host(steps, position, seed) -> None:
    draw, host, device = np.random.default_rng(seed), HostEdits(VOCAB), GpuEdits(ROWS, VOCAB, DEVICE)
    for started, sampling in steps:
        for row, new in started.items():
            host.start(row, new)
            device.start(row, new)
        many = [len(guesses) + 1 for _, guesses in sampling]
        rows = np.array([row for row, _ in sampling], np.int64).repeat(many)
        guesses = np.array([each for _, after in sampling for each in (NO_GUESS, *after)], np.int64)
        positions = np.array([position + i for n in many for i in range(n)], np.int64)
        logits = torch.from_numpy(draw.normal(size=(len(rows), VOCAB)).astype(np.float32))
        expected, found = TorchLogits(logits.clone()), TorchLogits(logits.to(DEVICE))
        host.edit(expected, rows, positions, guesses)
        for place, words in host.allowed(rows):
            bits = np.unpackbits(words.view(np.uint8), count=VOCAB, bitorder="little")
            if bits.any():
                expected.values[place, torch.from_numpy(bits == 0)] = -torch.inf
        device.edit(found, rows, positions, guesses)
        torch.testing.assert_close(found.values.cpu(), expected.values, rtol=1e-6, atol=1e-6)
        tokens = np.where(draw.random(len(rows)) < 0.6, np.append(guesses[1:], 0), draw.integers(0, VOCAB, len(rows)))
        tokens = np.maximum(tokens, 0)
        host.add(rows, tokens, guesses)
        device.add(rows, tokens, guesses)
        assert not device.allowed(rows)


def test_rows_without_edits_take_no_memory() -> None:
    device = GpuEdits(ROWS, VOCAB, DEVICE)
    device.start(0, RowSampling(GREEDY, top=3))
    logits = TorchLogits(torch.zeros(1, VOCAB, device=DEVICE))
    device.edit(logits, *np.zeros((3, 1), np.int64) - [[0], [0], [1]])
    device.add(*np.zeros((3, 1), np.int64) - [[0], [0], [1]])
    assert device._edited is None
    assert not logits.host().any()


SMALL = 101
DRAWN = Sampling(temperature=0.8, seed=3)
ASKED = [
    RowSampling(GREEDY),
    RowSampling(
        replace(DRAWN, repetition_penalty=1.5, presence_penalty=0.5, logit_bias=((7, 1.0), (SMALL, 9.0))),
        np.array([1, 2, 3], np.int32),
        np.zeros(0, np.int32),
        masked=(4, 5),
        masked_before=26,
        top=3,
    ),
    RowSampling(replace(DRAWN, frequency_penalty=1.2, seed=5), None, np.array([9, 9], np.int32)),
    RowSampling(replace(DRAWN, allowed_ids=tuple(range(20, 60)), seed=6), top=0),
]
"""Row 0 asks for nothing."""


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SMALL, count).tolist()


PROMPTS: list[Work] = [(row, prompt(row, 20 + row), 1) for row in range(4)]
STEPS: list[list[Work]] = [
    PROMPTS,
    [(row, [P], 1) for row in range(4)],
    [(row, [P], 1) for row in range(4)],
    [(0, [P], 1)],  # nobody in the step asks
    [(0, [P], 1), (2, [KNOWN], 1)],  # only edits
    [(3, [KNOWN], 1), (1, [KNOWN], 1), (0, prompt(8, 98), 0)],  # too long to be captured
    [(3, [P], 1), (1, [P], 1)],
    [(3, [P], 1), (1, [P], 1), (2, [KNOWN], 1)],
]


def test_captured_steps_edit_and_report_as_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MOST_TOKENS", 96)
    queue = HostQueue()

    def decoder(*, fused: bool) -> Decoder:
        torch.manual_seed(0)
        with torch.inference_mode():
            config = model(1, 32, [attention(2, 1, 16)], 48, SMALL, 128)
            return Decoder(config, None, DEVICE, torch.float32, FUSED if fused else None)

    expected = carried_out(TorchForward(decoder(fused=False), 32), STEPS, ASKED, overlap=1)
    by_kernels = carried_out(Eager(decoder(fused=True), 32, queue), STEPS, ASKED, overlap=1)
    assert queue.runs == 0
    captured = carried_out(GpuForward(decoder(fused=True), 32, queue), STEPS, ASKED, overlap=1)
    for results in (by_kernels, captured):
        for found, one in zip(results, expected, strict=True):
            assert found.tokens.tolist() == one.tokens.tolist()
            assert (found.sampled is None) == (one.sampled is None)
            if found.sampled is not None and one.sampled is not None:
                assert found.sampled.places.tolist() == one.sampled.places.tolist()
                assert found.sampled.top_tokens.tolist() == one.sampled.top_tokens.tolist()
                assert np.allclose(found.sampled.chosen, one.sampled.chosen, atol=1e-4)
                assert np.allclose(found.sampled.top, one.sampled.top, atol=1e-4)
                assert found.sampled.named.shape == one.sampled.named.shape
    assert len({token for one in expected for token in one.tokens.tolist()}) > 8
    assert queue.runs == 2 * (len(STEPS) - 2) + 1, "two parts of every step but two"
