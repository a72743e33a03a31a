"""Granite 4: Mamba-2 layers and a few full attention layers, with or without experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tenuto.models.config import Experts, Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family, Named, attention, each, halves, split_layer
from tenuto.models.families.mamba2_settings import mamba2
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight

_RECURRENT = ("mamba", "linear_attention")
_ATTENDING = ("attention", "full_attention")
_PROJECTIONS = ("gate_proj.weight", "up_proj.weight")


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "position_embedding_type": ("rope", "nope", None)})
    rotated = settings.optional("position_embedding_type", str) == "rope"
    rope = settings.rope(settings.head_dim()) if rotated else None
    heads = attention(settings, rope, scale=settings.get("attention_multiplier", float, 1.0))
    count = settings.get("num_hidden_layers", int)
    kinds = settings.kinds("layer_types", [_RECURRENT[0]] * count, _RECURRENT + _ATTENDING)
    recurrent, feed_forward = mamba2(settings), _feed_forward(settings)
    return ModelConfig(
        tuple(Layer(heads if kind in _ATTENDING else recurrent, feed_forward) for kind in kinds),
        **settings.facts(eos),
        **multipliers(settings),
    )


def multipliers(settings: Settings) -> dict[str, Any]:
    """Reads the multipliers of embeddings, residual additions and logits."""
    return {
        "embedding_scale": settings.get("embedding_multiplier", float, 1.0),
        "residual_scale": settings.get("residual_multiplier", float, 1.0),
        "logit_scale": 1 / settings.get("logits_scaling", float, 1.0),
    }


def _feed_forward(settings: Settings) -> Mlp | Experts:
    shared = settings.get("shared_intermediate_size", int)
    if not (experts := settings.get("num_local_experts", int, 0)):
        return Mlp(shared)
    return Experts(
        experts,
        settings.get("num_experts_per_tok", int),
        settings.get("intermediate_size", int),
        normalised=True,
        shared=shared,
    )


def translate(config: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    """Splits tensors that hold both gate and up projection, or the matrices of all experts. In models without experts,
    the shared network becomes the feed-forward network."""
    layer, part = split_layer(name)
    shared = "mlp." if isinstance(config.layers[0].feed_forward, Mlp) else "mlp.shared_expert."
    match part:
        case "shared_mlp.input_linear.weight":
            yield from halves(layer + shared, weight, *_PROJECTIONS)
        case "shared_mlp.output_linear.weight":
            yield f"{layer}{shared}down_proj.weight", weight
        case "block_sparse_moe.router.layer.weight":
            yield f"{layer}mlp.gate.weight", weight
        case "block_sparse_moe.input_linear.weight":
            for i, expert in enumerate(weight.each()):
                yield from halves(f"{layer}mlp.experts.{i}.", expert, *_PROJECTIONS)
        case "block_sparse_moe.output_linear.weight":
            for i, expert in enumerate(weight.each()):
                yield f"{layer}mlp.experts.{i}.down_proj.weight", expert
        case _:
            yield name, weight


FAMILY = Family("Granite 4", ("GraniteMoeHybridForCausalLM",), _read, each(translate))
