"""The spelling of bytes in a vocabulary. Only alphabets in which a token stands for the same bytes in every context are
supported, since text is delivered token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from tenuto.base.errors import ModelError

SPACE = "\u2581"
"""SentencePiece's character for a blank."""
SUPPORTED = "byte-level BPE (decoder ByteLevel), or BPE with byte fallback as Gemma and Llama 2 have it"


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The spelling of bytes in one vocabulary. `bytes_of` returns the bytes of a token of the vocabulary, `added_bytes`
    those of an added token. `letters` maps each byte to the text of its token."""

    bytes_of: Callable[[str], bytes]
    added_bytes: Callable[[str], bytes]
    letters: Mapping[int, str]


def alphabet_of(backend: tokenizers.Tokenizer) -> Alphabet:
    """Returns the alphabet of `backend`. Raises `ModelError` if the bytes of a token may depend on its position."""
    if isinstance(backend.decoder, decoders.ByteLevel):
        return _byte_level()
    if _is_sentencepiece(backend):
        return _sentencepiece()
    raise ModelError(f"the tokenizer decodes with {type(backend.decoder).__name__}; supported: {SUPPORTED}")


def _byte_level() -> Alphabet:
    letters = _letters()
    byte_of = {letter: byte for byte, letter in letters.items()}

    def bytes_of(text: str) -> bytes:
        try:
            return bytes([byte_of[letter] for letter in text])
        except KeyError:  # outside the byte alphabet: the text is literal
            return text.encode()

    return Alphabet(bytes_of, str.encode, letters)


def _letters() -> dict[int, str]:
    """Returns GPT-2's byte-level alphabet: visible Latin-1 characters stand for themselves, and the other bytes, in
    order, are written as the code points from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def _sentencepiece() -> Alphabet:
    """Returns SentencePiece's alphabet: characters stand for themselves, blanks are written as `SPACE`, and characters
    that the vocabulary lacks are written as byte tokens such as `<0x0A>`."""
    letters = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    byte_of = {letter: bytes([byte]) for byte, letter in letters.items()}

    def bytes_of(text: str) -> bytes:
        return byte_of.get(text) or text.replace(SPACE, " ").encode()

    return Alphabet(bytes_of, lambda text: text.replace(SPACE, " ").encode(), letters)


def _is_sentencepiece(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer only replaces blanks with `SPACE` and back. If it also added or removed a leading blank,
    the bytes of a text's first token would differ from those elsewhere."""
    model = backend.model
    return (
        isinstance(model, BPE)
        and model.byte_fallback
        and steps(backend.normalizer, "normalizers") == [replacing(" ", SPACE)]
        and steps(backend.decoder, "decoders") == [replacing(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    )


def replacing(what: str, by: str) -> dict[str, Any]:
    """Returns the settings of a normalizer or decoder that replaces `what` with `by`, as the tokenizers library writes
    them."""
    return {"type": "Replace", "pattern": {"String": what}, "content": by}


def steps(component: Any, several: str) -> list[dict[str, Any]]:
    """Returns the settings of a normalizer, pre-tokenizer or decoder; for a sequence, those of its members in order.
    `several` is the key under which a sequence lists them."""
    return _members(json.loads(component.__getstate__()), several) if component is not None else []


def _members(found: dict[str, Any], several: str) -> list[dict[str, Any]]:
    if found["type"] != "Sequence":
        return [found]
    return [member for each in found[several] for member in _members(each, several)]
