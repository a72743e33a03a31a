"""Qwen3-Next: gated delta nets with gated full attention in every fourth layer, experts, and a head for multi-token
prediction, which is one more layer of attention."""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.models.config import Experts, GatedDelta, Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family, Named, attention, each, plus_one
from tenuto.models.families.qwen import feed_forward
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight

_KINDS = ("linear_attention", "full_attention")
_PERIOD = 4
_PRE_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_ROTATED = 0.25
"""Default fraction of a head that is rotated."""


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",)})
    head_dim = settings.get("head_dim", int, 256)
    rope = settings.rope(head_dim, share=_ROTATED)
    heads = attention(settings, rope, head_dim=head_dim, qk_norm=True, gated=True)
    recurrent = GatedDelta(
        settings.get("linear_num_key_heads", int),
        settings.get("linear_num_value_heads", int),
        settings.get("linear_key_head_dim", int),
        settings.get("linear_value_head_dim", int),
        settings.get("linear_conv_kernel_dim", int),
    )
    count, period = settings.get("num_hidden_layers", int), settings.get("full_attention_interval", int, _PERIOD)
    default = [_KINDS[(i + 1) % period == 0] for i in range(count)]
    kinds = settings.kinds("layer_types", default, _KINDS)
    layers = tuple(
        Layer(heads if kind == _KINDS[1] else recurrent, _feed_forward(settings, i)) for i, kind in enumerate(kinds)
    )
    predictor = Layer(heads, _feed_forward(settings, 0))
    return ModelConfig(layers, **settings.facts(eos), predictor=(predictor,))


def _feed_forward(settings: Settings, layer: int) -> Mlp | Experts:
    experts = settings.get("num_experts", int, 0)
    return feed_forward(
        settings,
        layer,
        experts,
        normalised=settings.get("norm_topk_prob", bool, default=True),
        shared=settings.get("shared_expert_intermediate_size", int) if experts else 0,
        shared_gate=True,
    )


def _translate(_: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    """Adds 1 to norm weights, which are stored as their difference from 1 except in the gated delta nets."""
    zero_centred = name.endswith(("norm.weight", *_PRE_NORMS)) and ".linear_attn." not in name
    yield name, plus_one(weight) if zero_centred else weight


FAMILY = Family("Qwen3-Next", ("Qwen3NextForCausalLM",), _read, each(_translate))
