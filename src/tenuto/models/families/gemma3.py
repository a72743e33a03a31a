"""The text models of Gemma 3 (arXiv:2503.19786): local and global attention layers with separate ropes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tenuto.models.config import Attention, Layer, Mlp, ModelConfig
from tenuto.models.families.family import KINDS, Family, Named, attention, each, plus_one, renamed
from tenuto.models.families.gguf_family import LAYER_NAMES, QK_NORMS, GgufFamily, GgufSettings
from tenuto.models.rope import Rope, linear_divisors
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight

_NAMES = {
    "post_attention_layernorm.": "mixer_post_norm.",
    "pre_feedforward_layernorm.": "post_attention_layernorm.",
    "post_feedforward_layernorm.": "mlp_post_norm.",
}
PERIOD = 6
"""Default period of global layers: the last layer of each period is global."""
LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only(
        {
            "hidden_activation": (None, "gelu_pytorch_tanh"),
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (None, False),
        }
    )
    local, whole = _ropes(settings, settings.head_dim())
    window, scale = settings.get("sliding_window", int), settings.get("query_pre_attn_scalar", float, 256.0) ** -0.5
    made = {
        kind: attention(settings, rope, scale=scale, window=size, qk_norm=True)
        for kind, rope, size in zip(KINDS, (local, whole), (window, 0), strict=True)
    }
    return decoder(settings, eos, made, settings.get("sliding_window_pattern", int, PERIOD))


def decoder(settings: Settings, eos: tuple[int, ...], made: Mapping[str, Attention], period: int) -> ModelConfig:
    """Reads the settings of a Gemma whose layers are those in `made`; the default of `layer_types` has `period`."""
    kinds = settings.kinds("layer_types", alternating(settings.get("num_hidden_layers", int), period), KINDS)
    mlp = Mlp(settings.get("intermediate_size", int), "gelu_tanh")
    return ModelConfig(
        tuple(Layer(made[kind], mlp, post_norms=True) for kind in kinds),
        **settings.facts(eos, tied=True),
        embedding_scale=settings.get("hidden_size", int) ** 0.5,
        logit_cap=settings.get("final_logit_softcapping", float, 0.0),
    )


def alternating(count: int, period: int) -> list[str]:
    """Returns the kinds of `count` layers; the last of every `period` is global."""
    return [KINDS[(i + 1) % period == 0] for i in range(count)]


def _ropes(settings: Settings, head_dim: int) -> tuple[Rope, Rope]:
    """Reads the ropes of local and of global layers. transformers 5 writes one object for each; before, local layers
    had `rope_local_base_freq` and global ones the usual settings."""
    both = settings.part("rope_parameters")
    local, whole = (both.part(kind) if both is not None else None for kind in KINDS)
    if local is not None and whole is not None:
        return local.rope_of(head_dim), whole.rope_of(head_dim)
    theta = settings.get("rope_local_base_freq", float, LOCAL_THETA)
    return Rope(theta, linear_divisors(head_dim, 1.0)), settings.rope(head_dim, theta=GLOBAL_THETA)


def translate(_: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    """Renames a weight and adds 1 to norms, which are stored as their difference from 1."""
    yield renamed(name, _NAMES), plus_one(weight) if name.endswith("norm.weight") else weight


GGUF_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "mixer_post_norm",
    "post_ffw_norm": "mlp_post_norm",
}
_LAYERS_OF_27B = 62


def score_scale(settings: GgufSettings, layers_of_27b: int) -> float:
    """Returns the scale of scores. Files do not record it, and in the 27B model it does not follow from the head size;
    like llama.cpp, we recognise this model by its number of layers."""
    of_27b = settings.layer_count() == layers_of_27b
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    scale: float = (hidden // heads if of_27b else settings.head_dim()) ** -0.5
    return scale


def gguf_decoder(
    settings: GgufSettings, made: Mapping[str, Attention], period: int, logit_cap: float = 0.0
) -> ModelConfig:
    """Reads the settings of a Gemma whose layers are those in `made`, with `period`; `logit_cap` is a default.
    Converters have already added 1 to norm weights."""
    mlp = Mlp(settings.integer("feed_forward_length"), "gelu_tanh")
    return ModelConfig(
        tuple(Layer(made[kind], mlp, post_norms=True) for kind in alternating(settings.layer_count(), period)),
        **settings.facts(),
        embedding_scale=settings.integer("embedding_length") ** 0.5,
        logit_cap=settings.number("final_logit_softcapping", logit_cap),
    )


def _read_gguf(settings: GgufSettings) -> ModelConfig:
    head, scale = settings.head_dim(), score_scale(settings, _LAYERS_OF_27B)
    local = Rope(settings.number("rope.freq_base_swa", LOCAL_THETA), linear_divisors(head, 1.0))
    ropes, windows = (local, settings.rope(head, GLOBAL_THETA)), (settings.integer("attention.sliding_window"), 0)
    made = {
        kind: settings.attention(rope, scale=scale, window=window, qk_norm=True)
        for kind, rope, window in zip(KINDS, ropes, windows, strict=True)
    }
    return gguf_decoder(settings, made, settings.integer("attention.sliding_window_pattern", PERIOD))


_NAME = "Gemma 3 text"
FAMILY = Family(_NAME, ("Gemma3ForCausalLM",), _read, each(translate))
GGUF_FAMILY = GgufFamily(_NAME, "gemma3", _read_gguf, GGUF_NAMES | QK_NORMS)
