"""The default model twice: ours, and the reference, which reads the same file independently."""

import os
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tenuto.models.decoder import Decoder
from tenuto.models.gguf import GgufCheckpoint
from tenuto.text.load import load_tokenizer

LICENCE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="session")
def reference(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """The default model in transformers, float32. It reads GGUF slowly: the first process of a run leaves a copy."""
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
    with no_init_weights():  # all weights are loaded anyway
        model = LlamaForCausalLM(shape).eval()
    shared = tmp_path_factory.getbasetemp()
    copy = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "reference.safetensors"
    with FileLock(copy.with_suffix(".lock")):
        if not copy.exists():
            with pytest.MonkeyPatch.context() as patched:
                # otherwise called 400 times
                patched.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
                weights = load_gguf_checkpoint(smollm2_path, return_tensors=True, model_to_load=model)["tensors"]
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, copy)
    weights = load_file(copy)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.fixture(scope="session")
def model(smollm2_path: Path) -> Decoder:
    """The default model as we read it, float32."""
    checkpoint = GgufCheckpoint(smollm2_path)
    return Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def licence_tokens(smollm2_path: Path) -> list[int]:
    """Real text of more than 2,000 tokens: our licence."""
    return load_tokenizer(smollm2_path).encode(LICENCE.read_text(encoding="utf-8"))
