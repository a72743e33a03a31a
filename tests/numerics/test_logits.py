"""On the default model in float32, every position's logits match transformers, however the prompt is cut and paged.

Tolerance: 3e-3 at most and 5e-5 on average, on logits that reach 36. On the first 400 of these tokens transformers in
float32 differs from itself in float64 by 5e-4 at most and 9e-6 on average, and so do we.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tenuto.exec.torch_executor import TorchExecutor
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.llama import Llama
from tests.exec.driver import Driver

LONGEST = 1500
TOKENS = np.random.default_rng(0).integers(0, 49152, LONGEST).tolist()


@pytest.fixture(scope="session")
def expected_logits(smollm2_path: Path) -> torch.Tensor:
    """float32 [1500, vocab] from transformers, which reads the file itself; a prefix has the prefix's logits."""
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    oracle = LlamaForCausalLM(shape).eval()
    weights = load_gguf_checkpoint(smollm2_path, return_tensors=True, model_to_load=oracle)["tensors"]
    missing, unexpected = oracle.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    with torch.inference_mode():
        return oracle(torch.tensor([TOKENS])).logits[0]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Llama:
    checkpoint = GgufCheckpoint(smollm2_path)
    return Llama(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)


@pytest.fixture(params=[1, 16, 64], ids=lambda size: f"page{size}")
def driver(model: Llama, request: pytest.FixtureRequest) -> Iterator[Driver]:
    executor = TorchExecutor(model, request.param)
    yield Driver(executor, pages=-(-LONGEST // request.param) + 3, rows=1)
    executor.close()


@pytest.mark.parametrize(("chunk", "length"), [(512, LONGEST), (64, 600), (7, 150), (1, 40)])
def test_logits_match_transformers_at_every_position(
    driver: Driver, expected_logits: torch.Tensor, chunk: int, length: int
) -> None:
    total = 0.0
    for start in range(0, length, chunk):
        tokens = TOKENS[start : min(start + chunk, length)]
        ours = driver.executor.logits(driver.plan([(0, tokens, len(tokens))]))
        theirs = expected_logits[start : start + len(tokens)]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-3)
        total += (ours - theirs).abs().mean().item() * len(tokens)
    assert total / length < 5e-5
