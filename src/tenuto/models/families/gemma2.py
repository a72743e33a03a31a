"""Gemma 2 (arXiv:2408.00118): every other layer has a window, and scores and logits are capped."""

from __future__ import annotations

from tenuto.models.config import Layer, Mlp, ModelConfig
from tenuto.models.families.family import KINDS, Family, by_kind, each
from tenuto.models.families.gemma3 import GGUF_NAMES, alternating, translate
from tenuto.models.families.gguf_family import GgufFamily, GgufSettings
from tenuto.models.settings import Settings

_PERIOD = 2
"""Period of global layers: the last layer of each period is global."""
_SCORE_CAP, _LOGIT_CAP = 50.0, 30.0
"""Default soft caps of scores and logits."""
_LAYERS_OF_27B = 46


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_activation": (None, "gelu_pytorch_tanh"), "use_bidirectional_attention": (None, False)})
    head_dim = settings.get("head_dim", int, 256)
    made = by_kind(
        settings,
        settings.rope(head_dim),
        settings.window(),
        head_dim=head_dim,
        scale=settings.get("query_pre_attn_scalar", float, 256.0) ** -0.5,
        cap=settings.optional("attn_logit_softcapping", float) or 0.0,
    )
    kinds = settings.kinds("layer_types", alternating(settings.get("num_hidden_layers", int), _PERIOD), KINDS)
    mlp = Mlp(settings.get("intermediate_size", int), "gelu_tanh")
    return ModelConfig(
        tuple(Layer(made[kind], mlp, post_norms=True) for kind in kinds),
        **settings.facts(eos, tied=True),
        embedding_scale=settings.get("hidden_size", int) ** 0.5,
        logit_cap=settings.optional("final_logit_softcapping", float) or 0.0,
    )


def _read_gguf(settings: GgufSettings) -> ModelConfig:
    """Reads the configuration; converters have already added 1 to norm weights. Files do not record the scale of
    scores, which in the 27B model does not follow from the head size; like llama.cpp, we recognise it by its layers."""
    count, hidden, head = settings.layer_count(), settings.integer("embedding_length"), settings.head_dim()
    scalar = hidden // settings.integer("attention.head_count") if count == _LAYERS_OF_27B else head
    rotary, cap = settings.rope(head), settings.number("attn_logit_softcapping", _SCORE_CAP)
    made = {
        kind: settings.attention(rotary, scale=scalar**-0.5, window=window, cap=cap)
        for kind, window in zip(KINDS, (settings.window(default=4096), 0), strict=True)
    }
    mlp = Mlp(settings.integer("feed_forward_length"), "gelu_tanh")
    return ModelConfig(
        tuple(Layer(made[kind], mlp, post_norms=True) for kind in alternating(count, _PERIOD)),
        **settings.facts(),
        embedding_scale=hidden**0.5,
        logit_cap=settings.number("final_logit_softcapping", _LOGIT_CAP),
    )


FAMILY = Family("Gemma 2", ("Gemma2ForCausalLM",), _read, each(translate))
GGUF_FAMILY = GgufFamily("Gemma 2", "gemma2", _read_gguf, GGUF_NAMES)
