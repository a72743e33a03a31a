"""Small random models with sliding-window and recurrent layers, made with transformers, of sizes that the native
kernels also run."""

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 101
WINDOW = 10

_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MAMBA2 = {
    "hidden_size": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}


def tiny_mistral(**changes: Any) -> PreTrainedModel:
    """Has three layers, all with a window."""
    shape = {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": WINDOW}
    return made(MistralForCausalLM, MistralConfig, shape | changes)


def tiny_gemma3(**changes: Any) -> PreTrainedModel:
    """Has local and global layers with different ropes; heads are not the hidden size divided by their number."""
    shape = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        },
    }
    return made(Gemma3ForCausalLM, Gemma3TextConfig, shape | changes, norms_at=0.0)


def tiny_bamba(**changes: Any) -> PreTrainedModel:
    """Has two Mamba-2 layers, one of attention, and another Mamba-2 layer."""
    shape = {"num_hidden_layers": 4, "attn_layer_indices": [2], **_MAMBA2}
    return made(BambaForCausalLM, BambaConfig, shape | changes)


def tiny_granite(**changes: Any) -> PreTrainedModel:
    """Like `tiny_bamba`, with 5 experts of which 2 are chosen, no rope, and a multiplier in every possible place."""
    shape = {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "shared_intermediate_size": 48,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        **_MAMBA2,
        "mamba_n_groups": 1,
    }
    return made(GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, shape | changes)


_RECURRENT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 8,
    "conv_kernel": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def tiny_mamba(**changes: Any) -> PreTrainedModel:
    """Has three layers of Mamba and nothing else."""
    return made(MambaForCausalLM, MambaConfig, changes, shared=_RECURRENT)


def tiny_mamba2(**changes: Any) -> PreTrainedModel:
    """Has three layers of Mamba-2 and nothing else."""
    shape = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}
    return made(Mamba2ForCausalLM, Mamba2Config, shape | changes, shared=_RECURRENT)


def tiny_qwen3_next(**changes: Any) -> PreTrainedModel:
    """Has three gated delta nets and one layer of attention, with 6 experts of which 3 are chosen in all layers but
    one."""
    shape = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
    }
    return made(Qwen3NextForCausalLM, Qwen3NextConfig, shape | changes, norms_at=0.0)


def save_gemma3_gguf(path: Path, model: PreTrainedModel, **metadata: tuple[str, Any]) -> Path:
    """Writes the model as llama.cpp's converter does. `metadata` values are (key, value) pairs to add."""
    c: Any = model.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(c.sliding_window)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if c.rope_parameters["full_attention"]["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(c.rope_parameters["full_attention"]["factor"])
    for key, value in metadata.values():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            stored = tensor + 1 if name.endswith("norm.weight") else tensor
            writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gpt_oss(**changes: Any) -> PreTrainedModel:
    """Has alternating layers with and without a window, YaRN, and 6 experts of which 2 are chosen."""
    shape = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 32,
        "sliding_window": WINDOW,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    }
    return made(GptOssForCausalLM, GptOssConfig, shape | changes)


def tiny_falcon_h1(**changes: Any) -> PreTrainedModel:
    """Has attention and Mamba-2 side by side, and a multiplier in every possible place."""
    shape = {
        "num_hidden_layers": 3,
        "mamba_d_ssm": 96,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.7, 1.3],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_multipliers": [0.9, 1.3, 0.7, 1.2, 0.8],
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.75,
        **_MAMBA2,
        "mamba_n_heads": 6,
    }
    return made(FalconH1ForCausalLM, FalconH1Config, shape | changes)


def tiny_nemotron_h(**changes: Any) -> PreTrainedModel:
    """Has layers of each kind, and 5 experts of which 2 are chosen."""
    shape = {
        "hidden_size": 64,
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 5,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.7,
    }
    model = made(NemotronHForCausalLM, NemotronHConfig, shape | changes)
    for name, correction in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(correction, 0.0, 0.2)
    return model


def made(
    kind: type[PreTrainedModel],
    config: type[Any],
    shape: dict[str, Any],
    norms_at: float = 1.0,
    shared: dict[str, Any] = _SHARED,
) -> PreTrainedModel:
    """Returns a float32 model. Vectors begin as ones and zeros, which would hide mistakes: norms are drawn around
    `norms_at`, and decay rates of states so that a token matters for dozens of later ones."""
    torch.manual_seed(7)
    model = kind(config(**(shared | shape))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.normal_(parameter, -2.0, 1.0)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            torch.nn.init.normal_(parameter, -1.0, 0.5)
        elif parameter.dim() == 1:
            around = norms_at if name.endswith("norm.weight") and "linear_attn" not in name else 1.0
            torch.nn.init.normal_(parameter, around, 0.2)
    return model
