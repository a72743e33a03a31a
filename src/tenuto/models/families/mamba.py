"""Mamba and Mamba-2: models with recurrent layers only, so that a session's memory is their state."""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.base.errors import ModelError
from tenuto.models.config import Layer, Mamba, Mamba2, Mixer, ModelConfig
from tenuto.models.families.family import Family, Named, each, replaced
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight

_CONTEXT = 2**20
"""Context in tokens: the architecture sets no bound, and files do not record the length used in training."""
_NAMES = {
    "backbone.embedding.": "model.embed_tokens.",  # in older files
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
}
_PARTS = {"norm.": "input_layernorm.", "mixer.": "mamba."}


def _read(settings: Settings, eos: tuple[int, ...], mixer: Mixer, *, tied: bool) -> ModelConfig:
    settings.only({"hidden_act": ("silu",)})
    layers = (Layer(mixer, None),) * settings.get("num_hidden_layers", int)
    epsilon = settings.get("layer_norm_epsilon", float, 1e-5)
    return ModelConfig(layers, **settings.facts(eos, tied=tied, norm_eps=epsilon, context=_CONTEXT))


def _read_mamba(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    hidden = settings.get("hidden_size", int)
    mixer = Mamba(
        settings.get("intermediate_size", int, settings.get("expand", int, 2) * hidden),
        state=settings.get("state_size", int, 16),
        rank=settings.automatic("time_step_rank", -(-hidden // 16)),
        kernel=settings.get("conv_kernel", int, 4),
        conv_bias=settings.get("use_conv_bias", bool, default=True),
        proj_bias=settings.get("use_bias", bool, default=False),
    )
    return _read(settings, eos, mixer, tied=True)


def _read_mamba2(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    channels = settings.get("expand", int, 2) * settings.get("hidden_size", int)
    heads, head_dim = settings.get("num_heads", int, 128), settings.get("head_dim", int, 64)
    if heads * head_dim != channels:
        raise ModelError(
            f"{settings.source} has {heads} Mamba-2 heads of {head_dim}; expected: {channels} channels in all"
        )
    least, most = settings.limits("time_step_limit")
    mixer = Mamba2(
        heads,
        head_dim,
        state=settings.get("state_size", int, 128),
        groups=settings.get("n_groups", int, 8),
        kernel=settings.get("conv_kernel", int, 4),
        conv_bias=settings.get("use_conv_bias", bool, default=True),
        proj_bias=settings.get("use_bias", bool, default=False),
        least_step=least,
        most_step=most,
    )
    return _read(settings, eos, mixer, tied=False)


def _translate(_: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    match name.split(".", 3):
        case ["backbone", "layers", number, part]:
            yield f"model.layers.{number}.{replaced(part, _PARTS)}", weight
        case _:
            yield replaced(name, _NAMES), weight


FAMILIES = (
    Family("Mamba", ("MambaForCausalLM",), _read_mamba, each(_translate)),
    Family("Mamba-2", ("Mamba2ForCausalLM",), _read_mamba2, each(_translate)),
)
