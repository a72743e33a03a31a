"""The default model with its weights in other types: the native kernels are as good as float32 from the same weights.

Perplexity of so little text goes up or down with the rounding of inputs to 8 bits. Distributions are more sensitive:
they diverge by 0.001 to 0.002 nats a token from those of float32.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tenuto.base.config import cache_dir
from tenuto.exec.device import usable_cores
from tenuto.exec.forward import Forward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.native.build import library
from tenuto.kernels.native.library import loaded
from tenuto.models.decoder import Decoder
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.native.program import NativeProgram
from tenuto.models.weights import StoredWeight
from tests.exec.driver import Driver, logits_of
from tests.exec.kernels import HERE, every_variant
from tests.models.quantize import quantize

TOKENS = 200
Weights = list[tuple[str, StoredWeight]]


def kind_of(name: str) -> Kind:
    """Returns the type for a tensor: only `down_proj`, with rows of 1536 weights, can have types with blocks of 256."""
    match name.split("."):
        case [_, _, layer, _, "down_proj", _]:
            return (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS)[int(layer) % 4]
        case [_, _, _, "self_attn", _, _]:
            return Kind.Q5_1
        case [_, _, _, _, "up_proj", _]:
            return Kind.IQ4_NL
    return Kind.Q5_0


@pytest.fixture(scope="module")
def weights(smollm2_path: Path) -> Weights:
    return [(name, requantized(name, stored)) for name, stored in GgufCheckpoint(smollm2_path).weights()]


def requantized(name: str, stored: StoredWeight) -> StoredWeight:
    if len(stored.shape) == 1:
        return stored
    data = quantize(stored.decode(), kind_of(name)).view(np.uint8)
    return StoredWeight(kind_of(name), stored.shape, lambda: data)


def distributions(forward: Forward, tokens: list[int]) -> torch.Tensor:
    """Returns log-probabilities after each token, float32 [tokens, vocab]."""
    executor = ModelExecutor(forward)
    driver = Driver(executor, len(tokens) // 16 + 1, 1)
    found = logits_of(executor, driver.plan([(0, tokens, len(tokens))])).log_softmax(dim=1)
    executor.close()
    return found


@pytest.fixture(scope="module")
def exact(weights: Weights, smollm2_path: Path, licence_tokens: list[int]) -> torch.Tensor:
    model = Decoder(GgufCheckpoint(smollm2_path).config, weights, torch.device("cpu"), torch.float32)
    return distributions(TorchForward(model, 16), licence_tokens[:TOKENS])


@every_variant
def test_distributions_match_float32_from_the_same_weights(
    variant: str, weights: Weights, exact: torch.Tensor, smollm2_path: Path, licence_tokens: list[int]
) -> None:
    model = NativeProgram(GgufCheckpoint(smollm2_path).config, weights, 16)
    kernels = loaded(library(cache_dir(), HERE, variant, print))
    found = distributions(NativeForward(kernels, model, usable_cores()), licence_tokens[:TOKENS])
    divergence = torch.nn.functional.kl_div(found, exact, reduction="batchmean", log_target=True).item()
    assert divergence < 0.004
