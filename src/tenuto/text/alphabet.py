"""How a vocabulary writes bytes. Only where a token is the same bytes everywhere can text be delivered token by
token."""

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
"""How SentencePiece writes a blank."""
SUPPORTED = "byte-level BPE (decoder ByteLevel), or BPE with byte fallback as Gemma and Llama 2 have it"


@dataclass(frozen=True, slots=True)
class Alphabet:
    """`bytes_of` gives the bytes of a token of the vocabulary, and `added_bytes` those of one that was added as text.
    `letters` is how the vocabulary writes each byte alone."""

    bytes_of: Callable[[str], bytes]
    added_bytes: Callable[[str], bytes]
    letters: Mapping[int, str]


def alphabet_of(backend: tokenizers.Tokenizer) -> Alphabet:
    """Raises `ModelError` if what a token stands for depends on where it is."""
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
        except KeyError:  # not in the byte alphabet: it stands for itself
            return text.encode()

    return Alphabet(bytes_of, str.encode, letters)


def _letters() -> dict[int, str]:
    """The byte-level alphabet (GPT-2's): visible Latin-1 letters stand for themselves, the other bytes, in order, for
    the code points from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def _sentencepiece() -> Alphabet:
    """Letters stand for themselves, blanks are written as `SPACE`, and what the vocabulary lacks as bytes."""
    letters = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    byte_of = {letter: bytes([byte]) for byte, letter in letters.items()}

    def bytes_of(text: str) -> bytes:
        return byte_of.get(text) or text.replace(SPACE, " ").encode()

    return Alphabet(bytes_of, lambda text: text.replace(SPACE, " ").encode(), letters)


def _is_sentencepiece(backend: tokenizers.Tokenizer) -> bool:
    """Whether blanks are only replaced, there and back. With a blank put before each text, or the first one taken away,
    a token would be other bytes at the beginning."""
    model = backend.model
    return (
        isinstance(model, BPE)
        and model.byte_fallback
        and steps(backend.normalizer, "normalizers") == [replacing(" ", SPACE)]
        and steps(backend.decoder, "decoders") == [replacing(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    )


def replacing(what: str, by: str) -> dict[str, Any]:
    """The settings of a normalizer or decoder that does so."""
    return {"type": "Replace", "pattern": {"String": what}, "content": by}


def steps(component: Any, several: str) -> list[dict[str, Any]]:
    """The settings of a normalizer or decoder, or of those that it is a sequence of, in order."""
    if component is None:
        return []
    found = json.loads(component.__getstate__())
    return list(found[several]) if found["type"] == "Sequence" else [found]
