"""SmolLM3: like Llama, but every fourth layer has no rope."""

from __future__ import annotations

from tenuto.base.errors import ModelError
from tenuto.models.config import Layer, Mlp, ModelConfig
from tenuto.models.families.family import KINDS, Family, attention
from tenuto.models.families.gguf_family import GgufFamily, GgufSettings
from tenuto.models.settings import Settings

_THETA = 2_000_000.0
_PERIOD = 4
"""Default period of layers without rope: the last of each period has none."""


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "mlp_bias": (None, False)})
    count, period = settings.get("num_hidden_layers", int), settings.get("no_rope_layer_interval", int, _PERIOD)
    flags = settings.numbers("no_rope_layers") or _rope_flags(count, period)
    if len(flags) != count:
        raise ModelError(f"{settings.source} has no_rope_layers = {flags!r}; expected: {count} numbers, each 0 or 1")
    windowed = settings.get("use_sliding_window", bool, default=False)
    window = settings.window() if windowed else 0
    kinds = settings.kinds("layer_types", [KINDS[bool(rotated) or not window] for rotated in flags], KINDS)
    rope, mlp = settings.rope(settings.head_dim(), theta=_THETA), Mlp(settings.get("intermediate_size", int))
    layers = (
        Layer(attention(settings, rope if rotated else None, window=window if kind == KINDS[0] else 0), mlp)
        for rotated, kind in zip(flags, kinds, strict=True)
    )
    return ModelConfig(tuple(layers), **settings.facts(eos, tied=True))


def _rope_flags(count: int, period: int) -> list[int]:
    """Returns a number for each of `count` layers: 1 with a rope, 0 without."""
    return [int((i + 1) % max(period, 1) != 0) for i in range(count)]


def _read_gguf(settings: GgufSettings) -> ModelConfig:
    """Files do not record which layers have no rope; the default period applies."""
    rope, mlp = settings.rope(settings.head_dim(), _THETA), Mlp(settings.integer("feed_forward_length"))
    layers = (
        Layer(settings.attention(rope if rotated else None), mlp)
        for rotated in _rope_flags(settings.layer_count(), _PERIOD)
    )
    return ModelConfig(tuple(layers), **settings.facts())


FAMILY = Family("SmolLM3", ("SmolLM3ForCausalLM",), _read)
GGUF_FAMILY = GgufFamily("SmolLM3", "smollm3", _read_gguf, interleaved=True)
