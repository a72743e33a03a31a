"""Pre-tokenizers of byte-level tokenizers: they split text into words before merging. GGUF files refer to them by name.

The patterns are those in the `tokenizer.json` files that the models were published with. llama.cpp defines the names:
`get_vocab_base_pre` of its converter writes them, and `llama_vocab::impl::load` in `src/llama-vocab.cpp` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers

from tenuto.base.errors import ModelError
from tenuto.text.alphabet import SUPPORTED

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA_3 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    _TEKKEN.replace(f"{_LOWER}+|", f"{_LOWER}+{_CONTRACTION}?|")
    .replace(f"{_LOWER}*|", f"{_LOWER}*{_CONTRACTION}?|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    """Splits off every digit, then splits like GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Settings of one pre-tokenizer. `nfc`: text is first normalized to NFC. `whole_words`: a word that is a token is
    not built by merges. `opens`: prompts begin with the beginning-of-text token unless the file says otherwise."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    whole_words: bool = False
    opens: bool = False


_GPT2 = PreTokenizer(_gpt2)
_DIGITS = PreTokenizer(_digits)
_CL100K = PreTokenizer(_pattern(_LLAMA_3))
_LLAMA3 = replace(_CL100K, whole_words=True, opens=True)
_QWEN2 = PreTokenizer(_pattern(_QWEN_2), nfc=True)
_O200K = PreTokenizer(_pattern(_GPT_4O))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,  # SmolLM, SmolLM2
    "refact": _DIGITS,  # Granite 3
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,  # Llama 3, 3.1, 3.2 and 3.3
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "pixtral": _LLAMA3,  # Mistral's tokenizers in their first conversions, which had Llama 3's pattern
    "smaug-bpe": _CL100K,  # SmolLM3, and Llama 3 as newer versions of transformers convert it
    "dbrx": _CL100K,  # Phi-4, Granite 4
    "qwen2": _QWEN2,  # Qwen2, Qwen2.5, Qwen3
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(_pattern(_TEKKEN), whole_words=True, opens=True),  # Mistral Nemo and later
    "gpt-4o": _O200K,  # Phi-4 mini, gpt-oss
    "llama4": _O200K,
}
"""Pre-tokenizers by `tokenizer.ggml.pre`."""

_UNNAMED = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}
"""The pre-tokenizer of files that name none, by `general.architecture`, for architectures always trained with the same
one."""


def pre_tokenizer(kind: object, name: str | None, architecture: object) -> PreTokenizer:
    """Returns the pre-tokenizer that a GGUF file names, or the one of its architecture if it names none. Raises
    `ModelError` if `kind` or `name` is not supported: text split differently would become tokens that the model was not
    trained with."""
    if kind != "gpt2":
        raise ModelError(f"its kind (tokenizer.ggml.model) is {kind!r}; supported: 'gpt2' and 'llama', {SUPPORTED}")
    supported = ", ".join(sorted(PRE_TOKENIZERS))
    if name is None or name == "default":
        name = _UNNAMED.get(str(architecture))
        if name is None:
            raise ModelError(
                "it does not say how text is cut into words (tokenizer.ggml.pre is missing, or 'default'); convert the "
                f"model again, or set the key to one of: {supported}"
            )
    if name not in PRE_TOKENIZERS:
        raise ModelError(f"its pre-tokenizer (tokenizer.ggml.pre) {name!r} is not known; supported: {supported}")
    return PRE_TOKENIZERS[name]
