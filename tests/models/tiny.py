"""Small random Llama models, made with transformers, as Hugging Face directories and as GGUF files."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.quantize import quantize

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Makes a float32 model of 3 layers, 6 query heads on 2 key heads of 16, and 101 tokens; `changes` go to its
    config."""
    torch.manual_seed(7)
    shape = {
        "vocab_size": 101,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(shape | changes))).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which would hide mistakes
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def save_hf(directory: Path, model: LlamaForCausalLM, shard_bytes: int = 10**9) -> Path:
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    return directory


def save_gguf(
    path: Path,
    model: LlamaForCausalLM,
    stored: Kind = Kind.F32,
    others: Mapping[str, Kind] = MappingProxyType({}),
    **metadata: tuple[str, Any],
) -> Path:
    """Writes the model as llama.cpp's converter does, matrices as `stored`, or as `others` gives for parts such as
    `ffn_down`. `metadata` values are (key, value) pairs to add."""
    c: Any = model.config  # its fields may be missing in other models
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_bos_token_id(1)
    for key, value in metadata.values():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if c.rope_parameters["rope_type"] == "llama3":
        plain = c.rope_parameters["rope_theta"] ** -(np.arange(0, c.head_dim, 2) / c.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        values = _interleaved(name, tensor.numpy(), c)
        own = _gguf_name(name)
        kind = others.get(own.split(".")[-2], stored) if values.ndim == 2 else Kind.F32
        writer.add_tensor(own, values if kind is Kind.F32 else quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{GGUF_NAMES['.'.join(parts[2:-1])]}.{parts[-1]}"
    return "output_norm.weight" if parts[0] == "norm" else f"{GGUF_NAMES[parts[0]]}.{parts[-1]}"


def _interleaved(name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, config.head_dim // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
