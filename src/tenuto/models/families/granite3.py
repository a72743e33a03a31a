"""Granite 3: like Llama, with multipliers of embeddings, residuals, scores and logits, and with or without experts."""

from __future__ import annotations

from dataclasses import replace

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.config import Experts, Layer, Mlp, ModelConfig
from tenuto.models.families import gguf_family
from tenuto.models.families.family import Family, attention, each
from tenuto.models.families.gguf_family import (
    EXPERT_NAMES,
    LAYER_NAMES,
    GgufFamily,
    facts,
    head_dim,
    layer_count,
    rope,
    unstacked_experts,
)
from tenuto.models.families.granite import translate
from tenuto.models.settings import Settings


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"mlp_bias": (None, False)})
    return _layers(settings, eos, Mlp(settings.get("intermediate_size", int)))


def _read_moe(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    count, chosen = settings.get("num_local_experts", int), settings.get("num_experts_per_tok", int)
    return _layers(settings, eos, _experts(count, chosen, settings.get("intermediate_size", int)))


def _layers(settings: Settings, eos: tuple[int, ...], feed_forward: Mlp | Experts) -> ModelConfig:
    settings.only({"hidden_act": ("silu",)})
    biased = settings.get("attention_bias", bool, default=False)
    scale = settings.get("attention_multiplier", float, 1.0)
    heads = attention(settings, settings.rope(settings.head_dim()), scale=scale, bias=biased, out_bias=biased)
    return ModelConfig(
        (Layer(heads, feed_forward),) * settings.get("num_hidden_layers", int),
        **settings.facts(eos),
        embedding_scale=settings.get("embedding_multiplier", float, 1.0),
        residual_scale=settings.get("residual_multiplier", float, 1.0),
        logit_scale=1 / settings.get("logits_scaling", float, 1.0),
    )


def _experts(count: int, chosen: int, width: int) -> Experts:
    return Experts(count, chosen, width, normalised=True, shared=0, shared_gate=False)


def _read_gguf(file: GgufFile) -> ModelConfig:
    return _gguf_layers(file, "granite", Mlp(file.integer("granite.feed_forward_length")))


def _read_moe_gguf(file: GgufFile) -> ModelConfig:
    if file.integer("granitemoe.expert_shared_feed_forward_length", 0):
        raise ModelError(f"{file.path} has a network that all tokens share; supported: Granite 3 without one")
    names = ("expert_count", "expert_used_count", "feed_forward_length")
    return _gguf_layers(file, "granitemoe", _experts(*(file.integer(f"granitemoe.{name}") for name in names)))


def _gguf_layers(file: GgufFile, architecture: str, feed_forward: Mlp | Experts) -> ModelConfig:
    """Reads the configuration. A multiplier of 0 counts as missing; scores are then scaled as in Llama."""
    heads = gguf_family.attention(file, architecture, rope(file, architecture, head_dim(file, architecture)))
    scale = file.number(f"{architecture}.attention.scale", 0.0) or heads.scale
    return ModelConfig(
        (Layer(replace(heads, scale=scale), feed_forward),) * layer_count(file, architecture),
        **facts(file, architecture),
        embedding_scale=file.number(f"{architecture}.embedding_scale", 0.0) or 1.0,
        residual_scale=file.number(f"{architecture}.residual_scale", 0.0) or 1.0,
        logit_scale=1 / (file.number(f"{architecture}.logit_scale", 0.0) or 1.0),
    )


FAMILIES = (
    Family("Granite 3", ("GraniteForCausalLM",), _read),
    Family("Granite 3 MoE", ("GraniteMoeForCausalLM",), _read_moe, each(translate)),
)
GGUF_FAMILIES = (
    GgufFamily("Granite 3", "granite", _read_gguf, interleaved=True),
    GgufFamily(
        "Granite 3 MoE",
        "granitemoe",
        _read_moe_gguf,
        LAYER_NAMES | EXPERT_NAMES,
        each(unstacked_experts),
        interleaved=True,
    ),
)
