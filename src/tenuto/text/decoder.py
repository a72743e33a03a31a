"""Incremental decoding of sampled tokens to text."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tenuto.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes a growing sequence of tokens. The results of `push` and `flush` concatenate to `Tokenizer.decode` of all
    tokens, plus the text of shown control tokens. The time per token is proportional to its bytes."""

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, bytes] = MappingProxyType({})) -> None:
        """`shown`: control tokens to deliver as text, with that text in UTF-8."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._rest = b""  # bytes of an incomplete character

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that `ids` complete. Bytes of an incomplete character wait for the next tokens."""
        data = self._rest + b"".join([self._shown.get(token) or self._tokenizer.token_bytes(token) for token in ids])
        text, read = utf_8_decode(data, "replace", False)  # noqa: FBT003 - positional only: not the end
        self._rest = data[read:]
        return text

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._rest)

    def flush(self) -> str:
        """Returns the rest at the end of the tokens, with U+FFFD for an incomplete character. The decoder can then be
        reused."""
        rest, self._rest = self._rest.decode(errors="replace"), b""
        return rest
