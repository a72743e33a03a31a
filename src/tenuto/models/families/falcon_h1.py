"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in every layer, and multipliers of most inputs and
outputs."""

from __future__ import annotations

from dataclasses import replace

from tenuto.base.errors import ModelError
from tenuto.models.config import Attention, Layer, Mamba2, Mlp, ModelConfig
from tenuto.models.families.bamba import NAMES
from tenuto.models.families.family import Family, attention, renaming
from tenuto.models.families.mamba2_settings import mamba2
from tenuto.models.settings import Settings


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only(
        {
            "hidden_act": ("silu",),
            "mlp_bias": (None, False),
            "attention_bias": (None, False),
            "mamba_proj_bias": (None, False),
            "projectors_bias": (None, False),
        }
    )
    gate, down = _multipliers(settings, "mlp_multipliers", 2)
    mlp = Mlp(settings.get("intermediate_size", int), gate_scale=gate, out_scale=down)
    layer = Layer(_attention(settings), mlp, beside=_mamba2(settings))
    return ModelConfig(
        (layer,) * settings.get("num_hidden_layers", int),
        **settings.facts(eos),
        embedding_scale=settings.get("embedding_multiplier", float, 1.0),
        logit_scale=settings.get("lm_head_multiplier", float, 1.0),
    )


def _attention(settings: Settings) -> Attention:
    """Reads the attention. The input multiplier scales queries, keys and values, so it multiplies scores twice and the
    output once; the key multiplier multiplies scores once."""
    head_dim, entering = settings.head_dim(), settings.get("attention_in_multiplier", float, 1.0)
    return attention(
        settings,
        settings.rope(head_dim),
        scale=head_dim**-0.5 * entering**2 * settings.get("key_multiplier", float, 1.0),
        out_scale=entering * settings.get("attention_out_multiplier", float, 1.0),
    )


def _mamba2(settings: Settings) -> Mamba2:
    entering = settings.get("ssm_in_multiplier", float, 1.0)
    gate, inputs, into, out_of, steps = (entering * m for m in _multipliers(settings, "ssm_multipliers", 5))
    return replace(
        mamba2(settings, settings.optional("mamba_d_ssm", int)),
        normed=settings.get("mamba_rms_norm", bool, default=False),
        gate_first=not settings.get("mamba_norm_before_gate", bool, default=True),
        gate_scale=gate,
        step_scale=steps,
        input_scales=(inputs, into, out_of),
        out_scale=settings.get("ssm_out_multiplier", float, 1.0),
    )


def _multipliers(settings: Settings, key: str, count: int) -> list[float]:
    """Returns `count` numbers, by default all 1. Raises `ModelError` if the value is anything else."""
    value = settings.get(key, list, [1.0] * count)
    if len(value) != count or any(type(one) not in (int, float) for one in value):
        raise ModelError(f"{settings.source} has {key} = {value!r}; expected: {count} numbers")
    return [float(one) for one in value]


FAMILY = Family("Falcon-H1", ("FalconH1ForCausalLM",), _read, renaming(NAMES))
