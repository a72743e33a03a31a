"""Our own models: Mamba-2, sliding windows and full attention in any order, with other families' tensor names, and
perhaps a head for multi-token prediction. `python -m tests.hybrid.train` trains one."""

from __future__ import annotations

from tenuto.models.config import Layer, Mlp, ModelConfig
from tenuto.models.families.family import Family, attention
from tenuto.models.families.mamba2_settings import mamba2
from tenuto.models.settings import Settings

_KINDS = ("mamba", "sliding_attention", "full_attention")


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    """Reads the configuration. Only layers with windows have a rope, so full attention extends to texts longer than
    those of training."""
    settings.only({"hidden_act": ("silu",)})
    rope, window = settings.rope(settings.head_dim()), settings.get("sliding_window", int)
    made = {
        "sliding_attention": attention(settings, rope, window=window),
        "full_attention": attention(settings, rope=None),
    }
    kinds = settings.kinds("layer_types", ["mamba"] * settings.get("num_hidden_layers", int), _KINDS)
    recurrent, mlp = mamba2(settings), Mlp(settings.get("intermediate_size", int))
    width = settings.optional("mtp_intermediate_size", int)
    predictor = (Layer(made["full_attention"], Mlp(width)),) if width is not None else ()
    layers = tuple(Layer(made.get(kind, recurrent), mlp) for kind in kinds)
    return ModelConfig(layers, **settings.facts(eos), predictor=predictor)


FAMILY = Family("Tenuto", ("TenutoForCausalLM",), _read)
