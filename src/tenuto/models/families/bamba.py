"""Bamba: Mamba-2 layers and a few full attention layers."""

from __future__ import annotations

from tenuto.models.config import Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family, attention, renaming
from tenuto.models.families.mamba2_settings import mamba2
from tenuto.models.settings import Settings

NAMES = {
    "model.final_layernorm.": "model.norm.",
    "pre_ff_layernorm.": "post_attention_layernorm.",
    "feed_forward.": "mlp.",
}
_ROTATED = 0.5
"""Default fraction of a head that is rotated; older files do not record it."""


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "mlp_bias": (None, False)})
    heads = attention(settings, settings.rope(settings.head_dim(), share=_ROTATED))
    mlp, attending = Mlp(settings.get("intermediate_size", int)), settings.numbers("attn_layer_indices")
    recurrent = mamba2(settings)
    layers = tuple(
        Layer(heads if i in attending else recurrent, mlp) for i in range(settings.get("num_hidden_layers", int))
    )
    return ModelConfig(layers, **settings.facts(eos))


FAMILY = Family("Bamba", ("BambaForCausalLM",), _read, renaming(NAMES))
