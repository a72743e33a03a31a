"""Bamba: Mamba-2 layers and a few full attention layers."""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.models.config import Attention, Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family, Named, each, renamed
from tenuto.models.families.mamba2_settings import mamba2
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight

_NAMES = {
    "model.final_layernorm.": "model.norm.",
    "pre_ff_layernorm.": "post_attention_layernorm.",
    "feed_forward.": "mlp.",
}
_ROTATED = 0.5
"""Default fraction of a head that is rotated; older files do not record it."""


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "mlp_bias": (None, False)})
    heads, head_dim = settings.get("num_attention_heads", int), settings.head_dim()
    attention = Attention(
        heads,
        settings.get("num_key_value_heads", int, heads),
        head_dim,
        settings.rope(head_dim, share=_ROTATED),
        scale=head_dim**-0.5,
        bias=settings.get("attention_bias", bool, default=False),
        out_bias=settings.get("attention_bias", bool, default=False),
    )
    mlp, attending = Mlp(settings.get("intermediate_size", int)), settings.numbers("attn_layer_indices")
    recurrent = mamba2(settings)
    layers = tuple(
        Layer(attention if i in attending else recurrent, mlp) for i in range(settings.get("num_hidden_layers", int))
    )
    return ModelConfig(layers, **settings.facts(eos))


def _translate(_: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    yield renamed(name, _NAMES), weight


FAMILY = Family("Bamba", ("BambaForCausalLM",), _read, each(_translate))
