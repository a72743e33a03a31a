"""Granite 3: like Llama, with multipliers of embeddings, residuals, scores and logits, and with or without experts."""

from __future__ import annotations

from dataclasses import replace

from tenuto.base.errors import ModelError
from tenuto.models.config import Experts, Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family, attention, each
from tenuto.models.families.gguf_family import EXPERT_NAMES, LAYER_NAMES, GgufFamily, GgufSettings, unstacked_experts
from tenuto.models.families.granite import multipliers, translate
from tenuto.models.settings import Settings


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"mlp_bias": (None, False)})
    return _layers(settings, eos, Mlp(settings.get("intermediate_size", int)))


def _read_moe(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    count, chosen = settings.get("num_local_experts", int), settings.get("num_experts_per_tok", int)
    return _layers(settings, eos, Experts(count, chosen, settings.get("intermediate_size", int), normalised=True))


def _layers(settings: Settings, eos: tuple[int, ...], feed_forward: Mlp | Experts) -> ModelConfig:
    settings.only({"hidden_act": ("silu",)})
    scale = settings.get("attention_multiplier", float, 1.0)
    layer = Layer(attention(settings, settings.rope(settings.head_dim()), scale=scale), feed_forward)
    layers = (layer,) * settings.get("num_hidden_layers", int)
    return ModelConfig(layers, **settings.facts(eos), **multipliers(settings))


def _read_gguf(settings: GgufSettings) -> ModelConfig:
    return _gguf_layers(settings, Mlp(settings.integer("feed_forward_length")))


def _read_moe_gguf(settings: GgufSettings) -> ModelConfig:
    if settings.integer("expert_shared_feed_forward_length", 0):
        raise ModelError(f"{settings.file.path} has a network that all tokens share; supported: Granite 3 without one")
    return _gguf_layers(settings, settings.experts("feed_forward_length"))


def _gguf_layers(settings: GgufSettings, feed_forward: Mlp | Experts) -> ModelConfig:
    """Reads the configuration. A multiplier of 0 counts as missing; scores are then scaled as in Llama."""
    heads = settings.attention(settings.rope(settings.head_dim()))
    scale = settings.number("attention.scale", 0.0) or heads.scale
    return ModelConfig(
        (Layer(replace(heads, scale=scale), feed_forward),) * settings.layer_count(),
        **settings.facts(),
        embedding_scale=settings.number("embedding_scale", 0.0) or 1.0,
        residual_scale=settings.number("residual_scale", 0.0) or 1.0,
        logit_scale=1 / (settings.number("logit_scale", 0.0) or 1.0),
    )


_MOE_NAMES = LAYER_NAMES | EXPERT_NAMES
FAMILIES = (
    Family("Granite 3", ("GraniteForCausalLM",), _read),
    Family("Granite 3 MoE", ("GraniteMoeForCausalLM",), _read_moe, each(translate)),
)
GGUF_FAMILIES = (
    GgufFamily("Granite 3", "granite", _read_gguf, interleaved=True),
    GgufFamily("Granite 3 MoE", "granitemoe", _read_moe_gguf, _MOE_NAMES, each(unstacked_experts), interleaved=True),
)
