"""Guesses and grammars on a GPU: captured steps, steps queued kernel by kernel, and plain PyTorch without guesses give
rows the same tokens."""

from dataclasses import replace

import pytest
import torch

from bench.gpu.guesses import GuessingRows, prompts_of
from bench.gpu.models import Eager
from bench.random_models import attention, model
from tenuto.base.sampling import Sampling
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.gpu.fused import FUSED
from tenuto.models.config import GatedDelta, Mamba, Mamba2, ModelConfig
from tenuto.models.decoder import Decoder
from tests.exec.gpu.conftest import DEVICE
from tests.exec.gpu.queue import HostQueue

VOCAB, LOOKAHEAD, COUNT = 45, 3, 7
MODELS = {
    "attention": model(1, 32, [attention(2, 1, 16)], 48, VOCAB, 128),
    "window, gated delta net": model(2, 32, [GatedDelta(1, 2, 8, 8, 4), attention(2, 1, 16, window=7)], 48, VOCAB, 128),
    "Mamba-2": model(1, 32, [Mamba2(4, 8, 8, 2, 4, conv_bias=True, proj_bias=False)], 48, VOCAB, 128),
    "Mamba": model(1, 32, [Mamba(24, 8, 4, 3, conv_bias=True, proj_bias=True)], 48, VOCAB, 128),
}


DRAWN = Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=3)
EDITED = replace(DRAWN, repetition_penalty=1.4, presence_penalty=0.2, frequency_penalty=0.3, logit_bias=((5, 1.5),))


def rows_of(
    config: ModelConfig, kind: type[GpuForward] | None, queue: HostQueue, sampling: Sampling, *, grammar: bool
) -> GuessingRows:
    """Returns rows of a model that PyTorch computes, or forwards of this `kind`."""
    torch.manual_seed(0)
    with torch.inference_mode():
        decoder = Decoder(config, None, DEVICE, torch.float32, None if kind is None else FUSED)
    forward = TorchForward(decoder, 32) if kind is None else kind(decoder, 32, queue)
    return GuessingRows(ModelExecutor(forward), sampling, LOOKAHEAD, grammar=grammar)


@pytest.mark.parametrize(
    ("name", "grammar", "sampling"),
    [
        ("attention", True, DRAWN),
        ("attention", False, EDITED),
        ("window, gated delta net", False, DRAWN),
        ("Mamba-2", True, EDITED),
        ("Mamba", False, DRAWN),
    ],
)
def test_guesses_change_no_token_in_captured_steps(
    name: str, grammar: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_host = 2 if name == "window, gated delta net" else 0
    if by_host:  # PyTorch computes two prompts, and absorbs what other rows kept before
        monkeypatch.setattr("tenuto.exec.gpu.forward.MOST_STEPPED", LOOKAHEAD + 1)
    queue, prompts = HostQueue(), prompts_of(VOCAB, [9, 1, 14])
    expected = rows_of(MODELS[name], None, queue, sampling, grammar=grammar).turns(prompts, COUNT)
    if grammar:
        positions = [len(prompt) for prompt in prompts]
        assert all((t + i + at + n) % 3 == 0 for i, at in enumerate(positions) if i for n, t in enumerate(expected[i]))
    for kind in (Eager, GpuForward):
        rows = rows_of(MODELS[name], kind, queue, sampling, grammar=grammar)
        assert rows.turns(prompts, COUNT, expected) == expected
        assert 0 < rows.right < rows.guessed
        assert rows.steps < COUNT + len(prompts) - 1, "right guesses save steps"
    parts = 2 if grammar or sampling is EDITED else 1
    assert rows.steps - by_host <= queue.runs <= parts * rows.steps, "every other step ran as captured"
    assert queue.runs == rows.steps - by_host or parts == 2
