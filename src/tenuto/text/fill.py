"""Finds a vocabulary's tokens for filling in the middle of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tenuto.base.fill import FillTokens

NAMES = {
    "prefix": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    "suffix": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    "middle": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    "repository": ("<|repo_name|>", "<|fim_repo|>", "<reponame>", "<repo_name>"),
    "file": ("<|file_sep|>", "<file_sep>"),
}
"""The texts that models have for each token."""
GGUF_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
}
"""Keys of GGUF files for each, between `tokenizer.ggml.` and `_token_id`; llama.cpp's newer name first."""


def fill_tokens(id_of: Callable[[str], int | None], metadata: Mapping[str, Any], size: int) -> FillTokens | None:
    """Returns the tokens that the metadata of a GGUF file names, or else those with usual texts; `None` if one of the
    first three is missing. `id_of`: returns the token with a text. `size`: number of tokens of the vocabulary."""
    found: dict[str, int] = {}
    for role, names in NAMES.items():
        given = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in GGUF_KEYS[role]]
        ids = [token for token in (*given, *map(id_of, names)) if isinstance(token, int) and 0 <= token < size]
        if ids:
            found[role] = ids[0]
    if not {"prefix", "suffix", "middle"} <= found.keys():
        return None
    if not {"repository", "file"} <= found.keys():
        found = {role: found[role] for role in ("prefix", "suffix", "middle")}
    return FillTokens(**found)
