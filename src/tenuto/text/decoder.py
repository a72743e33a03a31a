"""Decodes sampled tokens to text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tenuto.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes a growing sequence of tokens. The results of `push` and `flush` add up to `Tokenizer.decode` of all
    tokens. A token costs time in proportion to its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete. Bytes that may still become a character wait for the next tokens."""
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    @property
    def pending(self) -> bool:
        """Whether bytes wait to become a character."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for an incomplete character. The decoder can then be reused."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
