"""Gemma 2 (arXiv:2408.00118): every other layer has a window, and scores and logits are capped."""

from __future__ import annotations

from tenuto.models.config import ModelConfig
from tenuto.models.families.family import KINDS, Family, by_kind, each
from tenuto.models.families.gemma3 import GGUF_NAMES, decoder, gguf_decoder, score_scale, translate
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
    return decoder(settings, eos, made, _PERIOD)


def _read_gguf(settings: GgufSettings) -> ModelConfig:
    scale, cap = score_scale(settings, _LAYERS_OF_27B), settings.number("attn_logit_softcapping", _SCORE_CAP)
    rope = settings.rope(settings.head_dim())
    made = {
        kind: settings.attention(rope, scale=scale, window=window, cap=cap)
        for kind, window in zip(KINDS, (settings.window(default=4096), 0), strict=True)
    }
    return gguf_decoder(settings, made, _PERIOD, _LOGIT_CAP)


FAMILY = Family("Gemma 2", ("Gemma2ForCausalLM",), _read, each(translate))
GGUF_FAMILY = GgufFamily("Gemma 2", "gemma2", _read_gguf, GGUF_NAMES)
