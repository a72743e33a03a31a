"""The forward pass on a GPU computes what plain PyTorch computes, also in captured steps."""

import numpy as np
import pytest
import torch

from bench.gpu.models import Eager, Rows
from bench.random_models import TYPES, attention, model, stored
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.gpu.fused import FUSED
from tenuto.models.config import GatedDelta, ModelConfig
from tenuto.models.decoder import Decoder
from tests.exec.gpu.conftest import DEVICE
from tests.exec.gpu.queue import HostQueue

MODELS = {
    "full attention": model(2, 32, [attention(2, 1, 16)], 48, 101, 128),
    "windows, sinks, norms": model(2, 32, [attention(2, 1, 16, window=20, sinks=True, qk_norm=True)], 48, 101, 128),
    "gated delta net": model(2, 32, [GatedDelta(1, 2, 16, 16, 4), attention(2, 1, 16, gated=True)], 48, 101, 128),
}
DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)


def decoder(config: ModelConfig, *, fused: bool) -> Decoder:
    torch.manual_seed(0)
    with torch.inference_mode():
        return Decoder(config, None, DEVICE, torch.float32, FUSED if fused else None)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("full attention", DRAWN), ("windows, sinks, norms", GREEDY), ("gated delta net", DRAWN)],
)
def test_captured_steps_sample_what_plain_pytorch_samples(name: str, sampling: Sampling) -> None:
    config, queue = MODELS[name], HostQueue()
    prompts = np.random.default_rng(1).integers(0, config.vocab, (3, 33)).astype(np.int32)
    results = []
    for forward in (
        TorchForward(decoder(config, fused=False), 32),
        Eager(decoder(config, fused=True), 32, queue),
        GpuForward(decoder(config, fused=True), 32, queue),
    ):
        executor = ModelExecutor(forward)
        results.append(Rows(executor, 3, 128, sampling).turns(prompts, 5).tolist())
        executor.close()
    assert results[0] == results[1] == results[2]
    assert (queue.captured, queue.runs) == (1, 5)


@pytest.mark.parametrize("name", TYPES)
def test_quantized_weights_in_their_bits_give_the_tokens_of_decoded_ones(name: str) -> None:
    config = model(2, 64, [attention(2, 1, 32)], 96, 101, 128)
    prompts = np.random.default_rng(1).integers(0, config.vocab, (3, 33)).astype(np.int32)
    results = []
    for fused in (None, FUSED):
        with torch.inference_mode():
            made = Decoder(config, stored(config, TYPES[name]), DEVICE, torch.float32, fused)
        executor = ModelExecutor(TorchForward(made, 32) if fused is None else GpuForward(made, 32, HostQueue()))
        results.append(Rows(executor, 3, 128, DRAWN).turns(prompts, 4).tolist())
        executor.close()
    assert results[0] == results[1]
