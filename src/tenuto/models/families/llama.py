"""Llama (Touvron et al., arXiv:2302.13971), and Mistral (arXiv:2310.06825), whose layers may have a window."""

from __future__ import annotations

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.config import Layer, Mlp, ModelConfig
from tenuto.models.families import gguf_family
from tenuto.models.families.family import Family, attention
from tenuto.models.families.gguf_family import GgufFamily, facts, head_dim, layer_count, rope, window
from tenuto.models.settings import Settings


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"sliding_window": (None,)})
    return _read_mistral(settings, eos)


def _read_mistral(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "mlp_bias": (None, False), "partial_rotary_factor": (None, 1.0)})
    biased = settings.get("attention_bias", bool, default=False)
    rope = settings.rope(settings.head_dim())
    heads = attention(settings, rope, window=settings.window(), bias=biased, out_bias=biased)
    layer = Layer(heads, Mlp(settings.get("intermediate_size", int)))
    return ModelConfig((layer,) * settings.get("num_hidden_layers", int), **settings.facts(eos))


def _read_gguf(file: GgufFile) -> ModelConfig:
    if file.integer("llama.expert_count", 0):
        raise ModelError(f"{file.path} is a mixture of experts; supported: Llama without experts")
    rotary = rope(file, "llama", head_dim(file, "llama"))
    heads = gguf_family.attention(file, "llama", rotary, window=window(file, "llama"))
    layer = Layer(heads, Mlp(file.integer("llama.feed_forward_length")))
    return ModelConfig((layer,) * layer_count(file, "llama"), **facts(file, "llama"))


FAMILY = Family("Llama", ("LlamaForCausalLM",), _read)
MISTRAL = Family("Mistral", ("MistralForCausalLM",), _read_mistral)
GGUF_FAMILY = GgufFamily("Llama", "llama", _read_gguf, interleaved=True)
