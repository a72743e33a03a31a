"""SentencePiece's BPE (Kudo and Richardson, arXiv:1808.06226) from a vocabulary with scores, as stored in GGUF
files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, normalizers

from tenuto.text.alphabet import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of `tokenizer.ggml.token_type`. Only normal tokens and runs of blanks result from merges."""


def with_blanks(tokens: list[str], types: list[int]) -> list[str]:
    """Returns `tokens` with runs of blanks spelled with `SPACE`: files store user-defined runs, such as Gemma's, as
    plain blanks."""
    return [
        SPACE * len(text) if kind == USER_DEFINED and text and not text.strip(" ") else text
        for text, kind in zip(tokens, types, strict=True)
    ]


def sentencepiece(tokens: list[str], types: list[int], scores: Sequence[float]) -> tokenizers.Tokenizer:
    """Builds the tokenizer. `tokens[i]`, `types[i]` and `scores[i]` describe token i. Of all adjacent tokens that form
    a normal token, those whose token has the highest score are merged first."""
    tokens = with_blanks(tokens, types)
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    model = models.BPE(
        {text: i for i, text in enumerate(tokens)},
        cast("Any", _merges(tokens, types, scores)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges(tokens: list[str], types: list[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns all pairs of normal tokens that concatenate to another one, in merge order. Of the pairs that form the
    same token, the one with the longest left part comes first, as in conversions by transformers."""
    normal = {text: score for text, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL}
    ranked = sorted(normal.items(), key=lambda item: item[1], reverse=True)
    return _blank_merges(tokens, types) + [
        (text[:cut], text[cut:])
        for text, _ in ranked
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in normal and text[cut:] in normal
    ]


def _blank_merges(tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    """Returns the merges of user-defined runs of blanks, longest run first. They precede all other merges, as in
    Gemma's published tokenizer."""
    defined = {text for text, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED}
    runs = sorted((len(text) for text in defined if text and not text.strip(SPACE)), reverse=True)
    parts = {1, *runs}
    return [
        (SPACE * cut, SPACE * (run - cut))
        for run in runs
        for cut in range(run - 1, 0, -1)
        if cut in parts and run - cut in parts
    ]
