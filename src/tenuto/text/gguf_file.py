"""The tokenizer inside a GGUF file.

The keys and token types are those of the GGUF specification (ggml, docs/gguf.md). Its metadata is read here rather
than with the `gguf` package, whose reader wraps each of 100,000 strings in arrays and takes seconds for a tenth of one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tenuto.base.errors import ModelError
from tenuto.text.tokenizer import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Of the values in `tokenizer.ggml.token_type`, those that are not ordinary vocabulary."""

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# The patterns the models were trained with, as published in their tokenizer.json files.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """Builds the tokenizer described by the `tokenizer.*` keys. Raises `ModelError`, also for kinds not supported."""
    meta = read_metadata(path, prefix="tokenizer.")
    try:
        kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2":
            raise ModelError(f"{path} has a tokenizer of kind {kind!r}; supported: 'gpt2' (byte-level BPE)")
        if pre not in _PRE_TOKENIZERS:
            supported = ", ".join(sorted(_PRE_TOKENIZERS))
            raise ModelError(f"{path} has pre-tokenizer {pre!r}; supported: {supported}")
        tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
        backend = _backend(pre, tokens, types, merges)
    except KeyError as error:
        raise ModelError(f"{path} has no metadata key {error}") from None
    ends = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return Tokenizer(
        backend,
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        adds_bos=bool(meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")),
        chat_template=meta.get("tokenizer.chat_template"),
    )


def read_metadata(path: Path, prefix: str = "") -> dict[str, Any]:
    """The key-value pairs of a GGUF file (version 2 or 3, little-endian) whose key starts with `prefix`: numbers,
    bools, strings, and lists of them. Raises `ModelError` if the file is damaged or of another kind."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data)
            if data[:4] != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file")
            reader.offset = 4
            version, _, count = reader.take("<IQQ")
            if version not in (2, 3):
                raise ModelError(f"{path} is GGUF version {version}; supported: 2 and 3, little-endian")
            pairs = ((reader.string(), reader.value(reader.take("<I")[0])) for _ in range(count))
            return {key: value for key, value in pairs if key.startswith(prefix)}
    except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None


class _Reader:
    """Reads GGUF values one after the other. `offset` is the byte it has come to."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self.offset)
        self.offset += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.take("<Q")
        start, end = self.offset, self.offset + length
        if end > len(self._data):
            raise ValueError(f"a string of {length} bytes runs past the end of the file")
        self.offset = end
        return self._data[start:end].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take("<" + _SCALARS[kind])[0]
        item_kind, count = self.take("<IQ")
        if item_kind in _SCALARS:
            return list(self.take(f"<{count}{_SCALARS[item_kind]}"))
        return [self.value(item_kind) for _ in range(count)]


def _backend(pre: str, tokens: list[str], types: list[int], merges: list[Any]) -> tokenizers.Tokenizer:
    """`tokens[i]` and `types[i]` describe token i; `merges` are pairs, the most frequent first."""
    # Llama 3 looks a whole word up before it merges; the others only merge.
    model = models.BPE({text: i for i, text in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(text, special=kind != USER_DEFINED, normalized=False)
        for text, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit alone, then as GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _pattern(_LLAMA_3),
    "qwen2": lambda: _pattern(_QWEN_2),
}
