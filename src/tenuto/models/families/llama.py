"""Llama (Touvron et al., arXiv:2302.13971), and Mistral (arXiv:2310.06825), whose layers may have a window."""

from __future__ import annotations

from tenuto.base.errors import ModelError
from tenuto.models.config import Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family, attention
from tenuto.models.families.gguf_family import GgufFamily, GgufSettings
from tenuto.models.settings import Settings


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"sliding_window": (None,)})
    return _read_mistral(settings, eos)


def _read_mistral(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "mlp_bias": (None, False), "partial_rotary_factor": (None, 1.0)})
    heads = attention(settings, settings.rope(settings.head_dim()), window=settings.window())
    layer = Layer(heads, Mlp(settings.get("intermediate_size", int)))
    return ModelConfig((layer,) * settings.get("num_hidden_layers", int), **settings.facts(eos))


def _read_gguf(settings: GgufSettings) -> ModelConfig:
    if settings.integer("expert_count", 0):
        raise ModelError(f"{settings.file.path} is a mixture of experts; supported: Llama without experts")
    heads = settings.attention(settings.rope(settings.head_dim()), window=settings.window())
    layer = Layer(heads, Mlp(settings.integer("feed_forward_length")))
    return ModelConfig((layer,) * settings.layer_count(), **settings.facts())


FAMILY = Family("Llama", ("LlamaForCausalLM",), _read)
MISTRAL = Family("Mistral", ("MistralForCausalLM",), _read_mistral)
GGUF_FAMILY = GgufFamily("Llama", "llama", _read_gguf, interleaved=True)
