"""Small random models with attention in every layer, made with transformers, also as GGUF files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.models.quantize import quantize
from tests.models.tiny_hybrids import WINDOW, made

_HEADS = {"hidden_size": 64, "num_hidden_layers": 3}


def tiny_qwen2(**changes: Any) -> PreTrainedModel:
    """Has biases of queries, keys and values."""
    return made(Qwen2ForCausalLM, Qwen2Config, _HEADS | changes)


def tiny_qwen3(**changes: Any) -> PreTrainedModel:
    """Has heads that are not the hidden size divided by their number."""
    return made(Qwen3ForCausalLM, Qwen3Config, _HEADS | {"hidden_size": 48, "head_dim": 16} | changes)


def tiny_qwen3_moe(**changes: Any) -> PreTrainedModel:
    """Has 6 experts of which 2 are chosen."""
    shape = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return made(Qwen3MoeForCausalLM, Qwen3MoeConfig, _HEADS | {"hidden_size": 64, "head_dim": 16} | shape | changes)


def tiny_smollm3(**changes: Any) -> PreTrainedModel:
    """Has no rope in the last of its four layers."""
    return made(SmolLM3ForCausalLM, SmolLM3Config, _HEADS | {"num_hidden_layers": 4} | changes)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 200,
}
"""For heads of 16 of which 12 elements are rotated."""


def tiny_phi3(**changes: Any) -> PreTrainedModel:
    """Has a window, rotates three quarters of a head, and has another rope for contexts of more than 200 tokens."""
    shape = {"sliding_window": WINDOW, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 200}
    return made(Phi3ForCausalLM, Phi3Config, _HEADS | shape | changes)


def tiny_granite3(**changes: Any) -> PreTrainedModel:
    """Has a multiplier in every possible place."""
    shape = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    }
    return made(GraniteForCausalLM, GraniteConfig, _HEADS | shape | changes)


def tiny_granite3_moe(**changes: Any) -> PreTrainedModel:
    """Has 5 experts of which 2 are chosen."""
    shape = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32, "attention_multiplier": 0.2}
    return made(GraniteMoeForCausalLM, GraniteMoeConfig, _HEADS | shape | changes)


def tiny_gemma2(**changes: Any) -> PreTrainedModel:
    """Caps scores low enough to matter; heads and the query scale do not follow from the hidden size."""
    shape = {
        "num_hidden_layers": 4,
        "hidden_size": 48,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 2,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    }
    return made(Gemma2ForCausalLM, Gemma2Config, shape | changes, norms_at=0.0)


_INTERLEAVED = ("llama", "smollm3", "granite", "granitemoe")
_ADDED_ONE = ("gemma2",)


def save_dense_gguf(
    path: Path, model: PreTrainedModel, architecture: str, kind: Kind = Kind.F32, split: int = 0
) -> Path:
    """Writes the model as llama.cpp's converter does, with matrices except routers as `kind`, in files of `split`
    tensors, or in one if it is 0."""
    c: Any = model.config  # its fields may be missing in other models
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if head_dim := getattr(c, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_own(writer, architecture, c)
    for name, values in _tensors(model, architecture):
        stored = kind if values.ndim > 1 and "ffn_gate_inp" not in name else Kind.F32
        encoded = values if stored is Kind.F32 else quantize(values.reshape(-1, values.shape[-1]), stored)
        writer.add_tensor(name, encoded.reshape(*values.shape[:-1], -1), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_own(writer: gguf.GGUFWriter, architecture: str, c: Any) -> None:
    """Adds the metadata of a single architecture."""
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    match architecture:
        case "qwen3moe":
            writer.add_expert_count(c.num_experts)
            writer.add_expert_used_count(c.num_experts_per_tok)
            writer.add_expert_feed_forward_length(c.moe_intermediate_size)
        case "phi3":
            writer.add_rope_dimension_count(int(c.rope_parameters["partial_rotary_factor"] * head))
            writer.add_sliding_window(c.sliding_window or 0)
            original = c.rope_parameters.get("original_max_position_embeddings", c.max_position_embeddings)
            writer.add_rope_scaling_orig_ctx_len(original)
            if c.rope_parameters["rope_type"] == "longrope":
                scale = c.max_position_embeddings / original
                writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
                for length in ("long", "short"):
                    factors = np.array(c.rope_parameters[f"{length}_factor"], np.float32)
                    writer.add_tensor(f"rope_factors_{length}.weight", factors)
        case "granite" | "granitemoe":
            writer.add_attention_scale(c.attention_multiplier)
            writer.add_embedding_scale(c.embedding_multiplier)
            writer.add_residual_scale(c.residual_multiplier)
            writer.add_logit_scale(c.logits_scaling)
            if architecture == "granitemoe":
                writer.add_expert_count(c.num_local_experts)
                writer.add_expert_used_count(c.num_experts_per_tok)
            writer.add_rope_dimension_count(head)
        case "gemma2":
            writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
            writer.add_final_logit_softcapping(c.final_logit_softcapping)
            writer.add_sliding_window(c.sliding_window)
        case "llama" | "smollm3":
            writer.add_rope_dimension_count(head)
            if window := getattr(c, "sliding_window", None):
                writer.add_sliding_window(window)


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """Returns all tensors by their names in the file."""
    c: Any = model.config
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        values = (tensor + 1 if architecture in _ADDED_ONE and name.endswith("norm.weight") else tensor).numpy()
        part = name.split(".")[-2]
        if architecture in _INTERLEAVED and part in ("q_proj", "k_proj"):
            heads = c.num_attention_heads if part == "q_proj" else c.num_key_value_heads
            halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if name.endswith("experts.gate_up_proj"):  # as transformers stores them
            layer = name.split(".")[2]
            gate, up = np.split(values, 2, axis=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(gate)
            yield f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(up)
        elif name.endswith("experts.down_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", values
        else:
            whole, _, suffix = name.rpartition(".")
            yield f"{names.get_name(whole) or names.get_name(f'{whole}.layer')}.{suffix}", values
