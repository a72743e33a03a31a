"""Our own models: Mamba-2, sliding windows and full attention in any order, with other families' tensor names. `python
-m tests.hybrid.train` trains one."""

from __future__ import annotations

from tenuto.models.config import Attention, Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family
from tenuto.models.families.mamba2_settings import mamba2
from tenuto.models.settings import Settings

_KINDS = ("mamba", "sliding_attention", "full_attention")


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    """Reads the configuration. Only layers with windows have a rope, so full attention extends to texts longer than
    those of training."""
    settings.only({"hidden_act": ("silu",)})
    heads, head_dim = settings.get("num_attention_heads", int), settings.head_dim()
    made = {
        kind: Attention(
            heads,
            settings.get("num_key_value_heads", int, heads),
            head_dim,
            rope,
            scale=head_dim**-0.5,
            window=window,
        )
        for kind, rope, window in (
            ("sliding_attention", settings.rope(head_dim), settings.get("sliding_window", int)),
            ("full_attention", None, 0),
        )
    }
    kinds = settings.kinds("layer_types", ["mamba"] * settings.get("num_hidden_layers", int), _KINDS)
    recurrent, mlp = mamba2(settings), Mlp(settings.get("intermediate_size", int))
    return ModelConfig(tuple(Layer(made.get(kind, recurrent), mlp) for kind in kinds), **settings.facts(eos))


FAMILY = Family("Tenuto", ("TenutoForCausalLM",), _read)
