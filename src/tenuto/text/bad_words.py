"""Words that a turn's output must not contain, as sequences of tokens that it must not complete."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tenuto.base.plan import Words
from tenuto.text.constraint import Matcher
from tenuto.text.tokenizer import Tokenizer


def spellings(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Returns the tokens to which the words encode, each with and without a blank before it."""
    texts = dict.fromkeys(text for word in words for text in (word, f" {word.lstrip(' ')}"))
    return list(dict.fromkeys(tokens for text in texts if (tokens := tuple(tokenizer.encode(text)))))


class WithoutWords:
    """A `Matcher` that allows the tokens that `matcher` allows, by default all, except those that would complete one
    of some sequences.

    Invariant: `_recent` has the latest tokens, one fewer than the longest sequence. Copies share `_open` and `_after`,
    which never change.
    """

    __slots__ = ("_after", "_matcher", "_open", "_recent", "_refused")

    def __init__(self, sequences: Iterable[tuple[int, ...]], every: Words, matcher: Matcher | None = None) -> None:
        """`every`: the mask of all tokens."""
        self._matcher = matcher
        self._open = every.copy()  # without tokens that are sequences of their own
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by the last token but one of a sequence
        for *before, last in sequences:
            if before:
                self._after.setdefault(before[-1], []).append((tuple(before), last))
            else:
                _clear(self._open, last)
        longest = max((len(before) for found in self._after.values() for before, _ in found), default=0)
        self._recent: tuple[int, ...] = (-1,) * longest
        self._refused = False

    @property
    def failure(self) -> str:
        if self._refused:
            return "the token would complete one of bad_words"
        return self._matcher.failure if self._matcher is not None else ""

    @property
    def complete(self) -> bool:
        return self._matcher is not None and self._matcher.complete

    def consume(self, token: int) -> bool:
        self._refused = not self._open[token // 32] >> token % 32 & 1 or token in self._completing()
        if self._refused or (self._matcher is not None and not self._matcher.consume(token)):
            return False
        self._recent = (*self._recent, token)[1:]
        return True

    def fill(self, words: Words) -> None:
        if self._matcher is not None:
            self._matcher.fill(words)
            words &= self._open
        else:
            words[:] = self._open
        for token in self._completing():
            _clear(words, token)

    def _completing(self) -> list[int]:
        """Returns the tokens that would complete a sequence of several."""
        found = self._after.get(self._recent[-1], ()) if self._recent else ()
        return [token for before, token in found if self._recent[-len(before) :] == before]

    def copy(self) -> WithoutWords:
        other = object.__new__(WithoutWords)
        other._open, other._after, other._recent = self._open, self._after, self._recent
        other._matcher = self._matcher.copy() if self._matcher is not None else None
        other._refused = self._refused
        return other


def _clear(words: Words, token: int) -> None:
    words[token // 32] &= ~np.uint32(1 << token % 32)
