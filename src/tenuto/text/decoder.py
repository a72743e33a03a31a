"""Decodes sampled tokens to text as they arrive."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tenuto.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes a growing sequence of tokens. The results of `push` and `flush` add up to `Tokenizer.decode` of all
    tokens, unless control tokens are shown. A token costs time in proportion to its bytes."""

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, bytes] = MappingProxyType({})) -> None:
        """`shown`: control tokens that have a text here, UTF-8."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._rest = b""  # what may still become a character

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete. Bytes that may still become a character wait for the next tokens."""
        data = self._rest + b"".join([self._shown.get(token) or self._tokenizer.token_bytes(token) for token in ids])
        text, read = utf_8_decode(data, "replace", False)  # noqa: FBT003 - positional only: not the end
        self._rest = data[read:]
        return text

    @property
    def pending(self) -> bool:
        """Whether bytes wait to become a character."""
        return bool(self._rest)

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for an incomplete character. The decoder can then be reused."""
        rest, self._rest = self._rest.decode(errors="replace"), b""
        return rest
