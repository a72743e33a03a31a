"""Qwen2 and Qwen2.5 (arXiv:2407.10671), with biases for queries, keys and values; Qwen3 (arXiv:2505.09388), with
normalised queries and keys; and Qwen3-MoE, which adds experts."""

from __future__ import annotations

from typing import Any

from tenuto.models.config import Attention, Experts, Layer, Mlp, ModelConfig
from tenuto.models.families.family import KINDS, Family, by_kind, each
from tenuto.models.families.gguf_family import (
    EXPERT_NAMES,
    LAYER_NAMES,
    QK_NORMS,
    GgufFamily,
    GgufSettings,
    unstacked_experts,
)
from tenuto.models.settings import Settings

_FIRST_WINDOWED = 28
"""Default index of the first layer with a window."""


def _read_qwen2(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    return _read_dense(settings, eos, _attentions(settings, settings.head_dim(), bias=True, out_bias=False))


def _read_qwen3(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    return _read_dense(settings, eos, _attentions(settings, settings.get("head_dim", int, 128), qk_norm=True))


def _read_qwen3_moe(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    made = _attentions(settings, settings.head_dim(), qk_norm=True)
    mixer = made[KINDS[0] if settings.get("use_sliding_window", bool, default=False) else KINDS[1]]
    count = settings.get("num_hidden_layers", int)
    return ModelConfig(tuple(Layer(mixer, _feed_forward(settings, i)) for i in range(count)), **settings.facts(eos))


def _attentions(settings: Settings, size: int, **more: bool) -> dict[str, Attention]:
    """Returns the attention of windowed and of full layers, by kind. Files have a window size even if it is unused;
    `use_sliding_window` decides."""
    settings.only({"hidden_act": ("silu",)})
    windowed = settings.get("use_sliding_window", bool, default=False)
    return by_kind(settings, settings.rope(size), settings.window() if windowed else 0, head_dim=size, **more)


def _read_dense(settings: Settings, eos: tuple[int, ...], made: dict[str, Attention]) -> ModelConfig:
    count, first = settings.get("num_hidden_layers", int), settings.get("max_window_layers", int, _FIRST_WINDOWED)
    default = [KINDS[i < first or not made[KINDS[0]].window] for i in range(count)]
    mlp = Mlp(settings.get("intermediate_size", int))
    kinds = settings.kinds("layer_types", default, KINDS)
    return ModelConfig(tuple(Layer(made[kind], mlp) for kind in kinds), **settings.facts(eos))


def _feed_forward(settings: Settings, layer: int) -> Mlp | Experts:
    experts = settings.optional("num_experts", int) or settings.get("num_local_experts", int)  # transformers 5
    return feed_forward(settings, layer, experts, normalised=settings.get("norm_topk_prob", bool, default=False))


def feed_forward(settings: Settings, layer: int, experts: int, **more: Any) -> Mlp | Experts:
    """Reads layer number `layer`, which has no experts if the settings say so; `more` are further fields of
    `Experts`."""
    step = settings.get("decoder_sparse_step", int, 1)
    if not experts or layer in settings.numbers("mlp_only_layers") or (layer + 1) % step:
        return Mlp(settings.get("intermediate_size", int))
    chosen, width = settings.get("num_experts_per_tok", int), settings.get("moe_intermediate_size", int)
    return Experts(experts, chosen, width, **more)


def _read_qwen2_gguf(settings: GgufSettings) -> ModelConfig:
    return _gguf_layers(settings, Mlp(settings.integer("feed_forward_length")), qk_norm=False)


def _read_qwen3_gguf(settings: GgufSettings) -> ModelConfig:
    return _gguf_layers(settings, Mlp(settings.integer("feed_forward_length")), qk_norm=True)


def _read_qwen3_moe_gguf(settings: GgufSettings) -> ModelConfig:
    return _gguf_layers(settings, settings.experts("expert_feed_forward_length"), qk_norm=True)


def _gguf_layers(settings: GgufSettings, feed_forward: Mlp | Experts, *, qk_norm: bool) -> ModelConfig:
    layer = Layer(settings.attention(settings.rope(settings.head_dim()), qk_norm=qk_norm), feed_forward)
    return ModelConfig((layer,) * settings.layer_count(), **settings.facts())


_NORMED_NAMES = {**LAYER_NAMES, **QK_NORMS}
FAMILIES = (
    Family("Qwen2", ("Qwen2ForCausalLM",), _read_qwen2),
    Family("Qwen3", ("Qwen3ForCausalLM",), _read_qwen3),
    Family("Qwen3-MoE", ("Qwen3MoeForCausalLM",), _read_qwen3_moe),
)
GGUF_FAMILIES = (
    GgufFamily("Qwen2", "qwen2", _read_qwen2_gguf),
    GgufFamily("Qwen3", "qwen3", _read_qwen3_gguf, _NORMED_NAMES),
    GgufFamily("Qwen3-MoE", "qwen3moe", _read_qwen3_moe_gguf, _NORMED_NAMES | EXPERT_NAMES, each(unstacked_experts)),
)
