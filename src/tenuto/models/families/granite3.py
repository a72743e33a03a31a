"""Granite 3: like Llama, with a multiplier wherever there may be one."""

from __future__ import annotations

from dataclasses import replace

from tenuto.formats.gguf_file import GgufFile
from tenuto.models.config import Layer, Mlp, ModelConfig
from tenuto.models.families import gguf_family
from tenuto.models.families.family import Family, attention
from tenuto.models.families.gguf_family import GgufFamily, facts, head_dim, layer_count, rope
from tenuto.models.settings import Settings


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "mlp_bias": (None, False)})
    biased = settings.get("attention_bias", bool, default=False)
    scale = settings.get("attention_multiplier", float, 1.0)
    heads = attention(settings, settings.rope(settings.head_dim()), scale=scale, bias=biased, out_bias=biased)
    layer = Layer(heads, Mlp(settings.get("intermediate_size", int)))
    return ModelConfig(
        (layer,) * settings.get("num_hidden_layers", int),
        **settings.facts(eos),
        embedding_scale=settings.get("embedding_multiplier", float, 1.0),
        residual_scale=settings.get("residual_multiplier", float, 1.0),
        logit_scale=1 / settings.get("logits_scaling", float, 1.0),
    )


def _read_gguf(file: GgufFile) -> ModelConfig:
    """A multiplier of 0 means what none means; without one for scores they are multiplied as in Llama."""
    turning = rope(file, "granite", head_dim(file, "granite"))
    heads = gguf_family.attention(file, "granite", turning)
    scale = file.number("granite.attention.scale", 0.0) or heads.scale
    layer = Layer(replace(heads, scale=scale), Mlp(file.integer("granite.feed_forward_length")))
    return ModelConfig(
        (layer,) * layer_count(file, "granite"),
        **facts(file, "granite"),
        embedding_scale=file.number("granite.embedding_scale", 0.0) or 1.0,
        residual_scale=file.number("granite.residual_scale", 0.0) or 1.0,
        logit_scale=1 / (file.number("granite.logit_scale", 0.0) or 1.0),
    )


FAMILY = Family("Granite 3", ("GraniteForCausalLM",), _read)
GGUF_FAMILY = GgufFamily("Granite 3", "granite", _read_gguf, interleaved=True)
