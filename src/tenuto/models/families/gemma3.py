"""The text models of Gemma 3 (arXiv:2503.19786): local and global attention layers with separate ropes."""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.models.config import Layer, Mlp, ModelConfig
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
    period = settings.get("sliding_window_pattern", int, PERIOD)
    count = settings.get("num_hidden_layers", int)
    kinds = settings.kinds("layer_types", alternating(count, period), KINDS)
    head_dim, hidden = settings.head_dim(), settings.get("hidden_size", int)
    local, whole = _ropes(settings, head_dim)
    window, scale = settings.get("sliding_window", int), settings.get("query_pre_attn_scalar", float, 256.0) ** -0.5
    made = {
        kind: attention(settings, rope, scale=scale, window=size, qk_norm=True)
        for kind, rope, size in zip(KINDS, (local, whole), (window, 0), strict=True)
    }
    mlp = Mlp(settings.get("intermediate_size", int), "gelu_tanh")
    return ModelConfig(
        tuple(Layer(made[kind], mlp, post_norms=True) for kind in kinds),
        **settings.facts(eos, tied=True),
        embedding_scale=hidden**0.5,
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


def _read_gguf(settings: GgufSettings) -> ModelConfig:
    """Reads the configuration; converters have already added 1 to norm weights. Files do not record the scale of
    scores, which in the 27B model does not follow from the head size; like llama.cpp, we recognise it by its layers."""
    count, hidden, head = settings.layer_count(), settings.integer("embedding_length"), settings.head_dim()
    scalar = hidden // settings.integer("attention.head_count") if count == _LAYERS_OF_27B else head
    local = Rope(settings.number("rope.freq_base_swa", LOCAL_THETA), linear_divisors(head, 1.0))
    ropes, windows = (local, settings.rope(head, GLOBAL_THETA)), (settings.integer("attention.sliding_window"), 0)
    made = {
        kind: settings.attention(rope, scale=scalar**-0.5, window=window, qk_norm=True)
        for kind, rope, window in zip(KINDS, ropes, windows, strict=True)
    }
    kinds = alternating(count, settings.integer("attention.sliding_window_pattern", PERIOD))
    mlp = Mlp(settings.integer("feed_forward_length"), "gelu_tanh")
    return ModelConfig(
        tuple(Layer(made[kind], mlp, post_norms=True) for kind in kinds),
        **settings.facts(),
        embedding_scale=hidden**0.5,
        logit_cap=settings.number("final_logit_softcapping", 0.0),
    )


_NAME = "Gemma 3 text"
FAMILY = Family(_NAME, ("Gemma3ForCausalLM",), _read, each(translate))
GGUF_FAMILY = GgufFamily(_NAME, "gemma3", _read_gguf, GGUF_NAMES | QK_NORMS)
