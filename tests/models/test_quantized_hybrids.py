"""Weights of any layer may be quantized: the native kernels compute what PyTorch computes in float32 from the same
weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from tenuto.base.config import cache_dir
from tenuto.exec.forward import Forward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.native.build import library
from tenuto.kernels.native.library import loaded
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tenuto.models.native.program import NativeProgram
from tenuto.models.weights import StoredWeight
from tests.exec.kernels import HERE, every_variant
from tests.exec.mixed_driver import MixedDriver
from tests.models.quantize import quantize
from tests.models.tiny_hybrids import VOCABULARY, tiny_gemma3, tiny_granite, tiny_qwen3_next

LENGTH, PAGE = 90, 4


def quantized(name: str, stored: StoredWeight) -> StoredWeight:
    if len(stored.shape) != 2 or stored.shape[1] % 32:
        return stored
    kind = Kind.Q5_1 if "experts" in name else Kind.Q8_0
    data = quantize(stored.decode(), kind).view(np.uint8)
    return StoredWeight(kind, stored.shape, lambda: data)


def logits(forward: Forward, texts: list[list[int]]) -> torch.Tensor:
    """Returns the logits after each token, float32 [texts, LENGTH, vocab], from texts computed side by side, in the
    same pieces for every `forward`."""
    executor = ModelExecutor(forward)
    driver = MixedDriver(executor, rows=len(texts), units=120)
    found = [
        driver.logits({row: text[a:b] for row, text in enumerate(texts)}).view(len(texts), b - a, -1).clone()
        for a, b in ((0, 40), (40, 41), (41, 58), (58, LENGTH))
    ]
    executor.close()
    return torch.cat(found, dim=1)


@every_variant
@pytest.mark.parametrize(("make", "close"), [(tiny_gemma3, 0.02), (tiny_granite, 0.02), (tiny_qwen3_next, 0.1)])
def test_quantized_hybrids_compute_what_pytorch_computes(
    variant: str, make: Callable[..., PreTrainedModel], close: float, tmp_path: Path
) -> None:
    """Except for rounding inputs to 8 bits a block, which affects every token in small random gated delta nets."""
    make(hidden_size=64, initializer_range=0.1).save_pretrained(tmp_path)
    checkpoint = HfCheckpoint(tmp_path)
    weights = [(name, quantized(name, stored)) for name, stored in checkpoint.weights()]
    texts = np.random.default_rng(1).integers(3, VOCABULARY, (3, LENGTH)).tolist()
    decoder = Decoder(checkpoint.config, weights, torch.device("cpu"), torch.float32)
    expected = logits(TorchForward(decoder, PAGE), texts)
    kernels = loaded(library(cache_dir(), HERE, variant, print))
    found, again = (
        logits(NativeForward(kernels, NativeProgram(checkpoint.config, weights, PAGE), threads), texts)
        for threads in (2, 1)
    )
    assert torch.equal(found, again)
    assert (found - expected).abs().median() < close * expected.abs().median()
