"""Upper bounds on the text that one token stands for, so that text which cannot fit is refused without being
encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers.models import BPE

from tenuto.text.alphabet import SPACE, replacing, steps

_SHRINKS = {"ByteLevel": 1, "NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3}
"""The factor by which each normalizer may shrink a text in UTF-8. Other normalizers may drop any part of it."""
_IN_UTF8 = (*range(0xC0), *range(0xC2, 0xF5))
"""The bytes that can occur in UTF-8."""
WINDOW = 2**16
"""Characters of a long text to process at a time, so that other threads get the GIL in between."""
_KEEPING = frozenset({"ByteLevel", "Digits", "Punctuation", "Split"})
"""Pre-tokenizers that drop no text, unless configured to remove matches."""


class TokenBound(NamedTuple):
    """A bound: one token stands for at most `max_bytes` bytes of UTF-8, not counting bytes in `lost`, which the
    vocabulary lacks and the tokenizer drops."""

    max_bytes: int
    lost: bytes

    def least_tokens(self, text: str, spare: int) -> int:
        """Returns a lower bound on the tokens of `text` if `spare` of its bytes may vanish before it is encoded."""
        if text.isascii() and not self.lost:
            size = len(text)
        else:
            windows = (text[at : at + WINDOW] for at in range(0, len(text), WINDOW))
            size = sum(len(part.encode(errors="surrogatepass").translate(None, self.lost)) for part in windows)
        return -(-max(0, size - spare) // self.max_bytes)


def token_bound(backend: tokenizers.Tokenizer, longest: int, byte_letters: Mapping[int, str]) -> TokenBound | None:
    """Returns the bound for a tokenizer whose longest token has `longest` bytes. `byte_letters`: the vocabulary's
    spelling of each byte. Returns None if no bound is known, because parts of the tokenizer may drop text."""
    shrinks = _shrinks(backend.normalizer)
    lost = _lost(backend, byte_letters)
    added = backend.get_added_tokens_decoder().values()
    if (
        shrinks is None
        or lost is None
        or (lost and shrinks > 1)  # then the text does not show which bytes are lost
        or not _keeps(backend.pre_tokenizer)
        or any(token.lstrip or token.rstrip for token in added)  # these swallow white space beside them
    ):
        return None
    return TokenBound(longest * shrinks, lost)


def _shrinks(normalizer: Any) -> int | None:
    total = 1
    for part in steps(normalizer, "normalizers"):
        if part == replacing(" ", SPACE):  # other replacements may drop text
            total *= len(SPACE.encode())  # a literal SPACE in the text (3 bytes) decodes to a blank (1 byte)
        elif part["type"] in _SHRINKS:
            total *= _SHRINKS[part["type"]]
        else:
            return None
    return total


def _keeps(pre_tokenizer: Any) -> bool:
    return all(
        part["type"] in _KEEPING and part.get("behavior") != "Removed" for part in steps(pre_tokenizer, "pretokenizers")
    )


def _lost(backend: tokenizers.Tokenizer, byte_letters: Mapping[int, str]) -> bytes | None:
    """Returns the bytes that the vocabulary lacks. None if the tokenizer may drop or fuse other bytes, too."""
    model = backend.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if model.byte_fallback:
        return b"" if all(model.token_to_id(letter) is not None for letter in byte_letters.values()) else None
    parts = [*steps(backend.normalizer, "normalizers"), *steps(backend.pre_tokenizer, "pretokenizers")]
    if not any(part["type"] == "ByteLevel" for part in parts):
        return None
    return bytes(byte for byte in _IN_UTF8 if model.token_to_id(byte_letters[byte]) is None)
