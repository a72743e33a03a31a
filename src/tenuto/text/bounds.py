"""How much text a token can stand for, so that text which cannot fit is refused without being encoded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

_SHRINKS = {"ByteLevel": 1, "NFC": 3, "NFD": 3, "NFKC": 4, "NFKD": 4, "Lowercase": 3}
"""By normalizer: to how small a part of its UTF-8 bytes it may reduce a text. Others may leave out any amount of it."""
_KEEPING = frozenset({"ByteLevel", "Digits", "Punctuation", "Split"})
"""Pre-tokenizers that only cut, unless told to remove what they find."""


def most_bytes_per_token(backend: tokenizers.Tokenizer, longest: int) -> int | None:
    """The most UTF-8 bytes of a text that one token of it can stand for, where `longest` is the longest token's own
    bytes. `None` if that has no bound, as far as is known: parts of the tokenizer leave out text."""
    shrinks = _shrinks(backend.normalizer)
    added = backend.get_added_tokens_decoder().values()
    if (
        shrinks is None
        or not _keeps(backend.pre_tokenizer)
        or not _has_every_byte(backend)
        or any(token.lstrip or token.rstrip for token in added)  # these swallow white space beside them
    ):
        return None
    return longest * shrinks


def _parts(component: Any, several: str) -> Iterable[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, or of those that it is a sequence of."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending += part[several]
        else:
            yield part


def _shrinks(normalizer: Any) -> int | None:
    total = 1
    for part in _parts(normalizer, "normalizers"):
        if part["type"] not in _SHRINKS:
            return None
        total *= _SHRINKS[part["type"]]
    return total


def _keeps(pre_tokenizer: Any) -> bool:
    return all(
        part["type"] in _KEEPING and part.get("behavior") != "Removed"
        for part in _parts(pre_tokenizer, "pretokenizers")
    )


def _has_every_byte(backend: tokenizers.Tokenizer) -> bool:
    """Whether no byte is left out, or fused with others, because the vocabulary lacks it."""
    model = backend.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    written = [*_parts(backend.normalizer, "normalizers"), *_parts(backend.pre_tokenizer, "pretokenizers")]
    if not any(part["type"] == "ByteLevel" for part in written):
        return False
    return all(model.token_to_id(letter) is not None for letter in ByteLevel.alphabet())
