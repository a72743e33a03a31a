"""SmolLM3: like Llama, but every fourth layer has no rope."""

from __future__ import annotations

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.config import Layer, Mlp, ModelConfig
from tenuto.models.families import gguf_family
from tenuto.models.families.family import Family, attention
from tenuto.models.families.gguf_family import GgufFamily, facts, head_dim, layer_count, rope
from tenuto.models.settings import Settings

_THETA = 2_000_000.0
_PERIOD = 4
"""Default period of layers without rope: the last of each period has none."""
_KINDS = ("sliding_attention", "full_attention")


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "mlp_bias": (None, False)})
    count, period = settings.get("num_hidden_layers", int), settings.get("no_rope_layer_interval", int, _PERIOD)
    flags = settings.numbers("no_rope_layers") or _rope_flags(count, period)
    if len(flags) != count:
        raise ModelError(f"{settings.source} has no_rope_layers = {flags!r}; expected: {count} numbers, each 0 or 1")
    windowed = settings.get("use_sliding_window", bool, default=False)
    window = settings.window() if windowed else 0
    kinds = settings.kinds("layer_types", [_KINDS[bool(rotated) or not window] for rotated in flags], _KINDS)
    rope, biased = settings.rope(settings.head_dim(), theta=_THETA), settings.get("attention_bias", bool, default=False)
    mlp = Mlp(settings.get("intermediate_size", int))
    layers = (
        Layer(
            attention(
                settings,
                rope if rotated else None,
                window=window if kind == _KINDS[0] else 0,
                bias=biased,
                out_bias=biased,
            ),
            mlp,
        )
        for rotated, kind in zip(flags, kinds, strict=True)
    )
    return ModelConfig(tuple(layers), **settings.facts(eos, tied=True))


def _rope_flags(count: int, period: int) -> list[int]:
    """Returns a number for each of `count` layers: 1 with a rope, 0 without."""
    return [int((i + 1) % max(period, 1) != 0) for i in range(count)]


def _read_gguf(file: GgufFile) -> ModelConfig:
    """Files do not record which layers have no rope; the default period applies."""
    rotary = rope(file, "smollm3", head_dim(file, "smollm3"), _THETA)
    mlp = Mlp(file.integer("smollm3.feed_forward_length"))
    layers = (
        Layer(gguf_family.attention(file, "smollm3", rotary if rotated else None), mlp)
        for rotated in _rope_flags(layer_count(file, "smollm3"), _PERIOD)
    )
    return ModelConfig(tuple(layers), **facts(file, "smollm3"))


FAMILY = Family("SmolLM3", ("SmolLM3ForCausalLM",), _read)
GGUF_FAMILY = GgufFamily("SmolLM3", "smollm3", _read_gguf, interleaved=True)
