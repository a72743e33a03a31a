"""Phi-3 (arXiv:2404.14219) and Phi-4: query, key and value projections are one matrix, gate and up projections another.
Long contexts have a separate rope (LongRoPE), and heads may be rotated partly."""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.models.config import Attention, Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family, Named, attention, each, split, split_layer
from tenuto.models.families.gguf_family import LAYER_NAMES, GgufFamily, GgufSettings
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "attention_bias": (None, False)})
    heads = attention(settings, settings.rope(settings.head_dim()), window=settings.window())
    layer = Layer(heads, Mlp(settings.get("intermediate_size", int)))
    return ModelConfig((layer,) * settings.get("num_hidden_layers", int), **settings.facts(eos))


def _read_gguf(settings: GgufSettings) -> ModelConfig:
    rotary = settings.rope(settings.integer("rope.dimension_count", settings.head_dim(partly=True)))
    layer = Layer(settings.attention(rotary, window=settings.window()), Mlp(settings.integer("feed_forward_length")))
    return ModelConfig((layer,) * settings.layer_count(), **settings.facts())


def _translate(config: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    layer, part = split_layer(name)
    match part, config.layers[0]:
        case "self_attn.qkv_proj.weight", Layer(mixer=Attention() as a):
            widths = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
            yield from split(name, weight, {f"{layer}self_attn.{n}_proj.weight": size for n, size in widths.items()})
        case "mlp.gate_up_proj.weight", Layer(feed_forward=Mlp() as mlp):
            yield from split(name, weight, {f"{layer}mlp.{half}_proj.weight": mlp.width for half in ("gate", "up")})
        case _:
            yield name, weight


_GGUF_NAMES = {**LAYER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_NAME = "Phi-3"
FAMILY = Family(_NAME, ("Phi3ForCausalLM",), _read, each(_translate))
GGUF_FAMILY = GgufFamily(_NAME, "phi3", _read_gguf, _GGUF_NAMES, each(_translate))
