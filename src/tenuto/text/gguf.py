"""The tokenizer inside a GGUF file.

The keys and token types are those of the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.text.alphabet import SUPPORTED
from tenuto.text.blanks import Blanks
from tenuto.text.sentencepiece import sentencepiece
from tenuto.text.tokenizer import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""The values of `tokenizer.ggml.token_type` of tokens that are found in text before it is cut into words."""

# The patterns the models were trained with, as published in their tokenizer.json files.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    _TEKKEN.replace(f"{_LOWER}+|", f"{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
    .replace(f"{_LOWER}*|", f"{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Those that look a whole word up before they merge, and begin prompts with a token unless the file says otherwise."""


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """Build the tokenizer described by the `tokenizer.*` keys. Raises `ModelError`, also for unsupported kinds."""
    meta = GgufFile(path).metadata
    try:
        blanks = Blanks()
        kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre", "default")
        tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
        if kind == "llama":
            prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
            blanks = Blanks(opens=prefix, control=prefix)
            scores = meta["tokenizer.ggml.scores"]
            make = partial(sentencepiece, tokens, types, scores)
        elif kind == "gpt2":
            if pre not in PRE_TOKENIZERS:
                supported = ", ".join(sorted(PRE_TOKENIZERS))
                raise ModelError(f"{path} has pre-tokenizer {pre!r}; supported: {supported}")
            make = partial(_byte_level, pre, tokens, meta["tokenizer.ggml.merges"])
        else:
            raise ModelError(f"{path} has a tokenizer of kind {kind!r}; supported: 'gpt2' and 'llama', {SUPPORTED}")
    except KeyError as error:
        raise ModelError(f"{path} has no metadata key {error}") from None
    try:
        backend = make()
        swallowing = kind == "llama" and meta.get("general.architecture") == "phi3"
        backend.add_tokens(_added(tokens, types, swallowing=swallowing))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a damaged vocabulary
        raise ModelError(f"{path} has a tokenizer that cannot be built: {error}") from None
    ends = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return Tokenizer(
        backend,
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        adds_bos=bool(meta.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _WHOLE_WORDS)),
        chat_template=meta.get("tokenizer.chat_template"),
        blanks=blanks,
    )


def _byte_level(pre: str, tokens: list[str], merges: list[str]) -> tokenizers.Tokenizer:
    """`tokens[i]` is how token i is written; `merges` are pairs, the most frequent first."""
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, cast("Any", pairs), ignore_merges=pre in _WHOLE_WORDS))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


_NOT_SWALLOWING = ("<unk>", "<s>", "<|endoftext|>")


def _added(tokens: list[str], types: list[int], *, swallowing: bool) -> list[AddedToken]:
    """`swallowing`: control tokens take the white space behind them, as those of Phi-3 do; files do not say so."""
    return [
        AddedToken(
            text,
            special=kind != USER_DEFINED,
            normalized=False,
            rstrip=swallowing and kind == CONTROL and text not in _NOT_SWALLOWING,
        )
        for text, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit alone, then like GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _pattern(_LLAMA_3),
    "dbrx": lambda: _pattern(_LLAMA_3),
    "smaug-bpe": lambda: _pattern(_LLAMA_3),
    "qwen2": lambda: _pattern(_QWEN_2),
    "deepseek-r1-qwen": lambda: _pattern(_QWEN_2),
    "tekken": lambda: _pattern(_TEKKEN),
    "gpt-4o": lambda: _pattern(_GPT_4O),
    "refact": _smollm,
    "starcoder": _smollm,
}
"""How text is cut into words before they are merged, by `tokenizer.ggml.pre`."""
