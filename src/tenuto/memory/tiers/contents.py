"""Names for the content of units. A copy carries its name when it leaves the device, and every reader compares it with
the name of the content it asked for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tenuto.base.options import Scope
from tenuto.base.plan import Bytes
from tenuto.memory.lineage import Lineage

_DIGEST = 16
_TOKEN = 4
"""The size of a token in bytes."""
MARK = 4
"""The size of a mark in bytes."""
SPACING = 4096
"""The number of tokens between two digests that are kept."""


@dataclass(frozen=True, slots=True)
class Content:
    """The state of `tokens` (int32; empty for a state slot) after certain earlier tokens in a scope, computed with
    certain weights. `before` is a digest of the scope (tenant and adapter), of the first weights, and of those earlier
    tokens, so it also fixes the position of `tokens`. Where other weights were in use from a token on, their mark
    stands before it, among the tokens."""

    before: bytes
    tokens: bytes

    def covers(self, other: Content) -> bool:
        """Whether a unit with this content can be used as one with `other`, whose remaining slots may have anything."""
        return self.before == other.before and self.tokens.startswith(other.tokens)

    @property
    def mark(self) -> bytes:
        """A short digest of the scope and the earlier tokens, which an index has for each unit."""
        return self.before[:MARK]

    @property
    def length(self) -> int:
        """The number of tokens whose state the unit holds; 0 for a state slot."""
        return int((np.frombuffer(self.tokens, "<i4") >= 0).sum())

    @property
    def name(self) -> str:
        """The name in files."""
        return (self.before + self.tokens).hex()

    @classmethod
    def named(cls, name: str) -> Content:
        """Returns the content with this name. Raises `ValueError` if the name is malformed."""
        data = bytes.fromhex(name)
        if len(data) < _DIGEST or len(data) % _TOKEN:
            raise ValueError("malformed name of a unit's content")
        return cls(data[:_DIGEST], data[_DIGEST:])


Contents = Sequence[Sequence[Content]]
"""The contents of units, by group."""


class NamedUnit(NamedTuple):
    """A copy of a unit, uint8 [bytes per unit], and its content."""

    content: Content
    data: Bytes


class Digests:
    """Digests of a scope and the first tokens of a history, kept every `SPACING` tokens, so that the content of a new
    unit is named without reading all tokens before it.

    Invariant: up to the end of the history, the kept digests are those of its present tokens, with the marks of
    `_lineage`. Call `cut` before tokens are added, since earlier ones may have been removed.
    """

    __slots__ = ("_kept", "_lineage", "_scope")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._lineage: Lineage = ()
        self._kept: list[blake2b] = []  # of the first 0, SPACING, 2 * SPACING, ... tokens, once they were needed

    def cut(self, length: int) -> None:
        """Records that all but the first `length` tokens may change."""
        del self._kept[length // SPACING + 1 :]

    def contents(self, history: array[int], ranges: Iterable[tuple[int, int]], lineage: Lineage = ()) -> list[Content]:
        """Returns the contents of units that hold these `ranges`, in ascending order, of a history of int32, computed
        with the weights of `lineage`."""
        self._follow(lineage)
        found: list[Content] = []
        with memoryview(history) as tokens:
            digest, done = blake2b(), 0
            for begin, end in ranges:
                if not found:
                    digest, done = self._before(tokens, begin)
                digest.update(self._marked(tokens, done, begin))
                found.append(Content(digest.digest(), self._marked(tokens, begin, end)))
                done = begin
        return found

    def _follow(self, lineage: Lineage) -> None:
        """Forgets digests with the marks of another lineage."""
        if lineage == self._lineage:
            return
        common = 0
        for mine, its in zip(self._lineage, lineage, strict=False):
            if mine != its:
                break
            common += 1
        after = [stamp.start for stamp in (*self._lineage[common : common + 1], *lineage[common : common + 1])]
        if common:
            self.cut(min(after))
        else:
            self._kept.clear()
        self._lineage = lineage

    def _marked(self, tokens: memoryview[int], start: int, stop: int) -> bytes:
        """Returns tokens [start, stop), with the marks of the weights that were in use from one of them on."""
        marks = {stamp.start: stamp.weights.mark for stamp in self._lineage[1:] if start <= stamp.start < stop}
        pieces = pairwise([*{start: None, **dict.fromkeys(marks)}, stop])
        return b"".join(marks.get(first, b"") + tokens[first:end].tobytes() for first, end in pieces)

    def _before(self, tokens: memoryview[int], position: int) -> tuple[blake2b, int]:
        """Returns a digest of the first tokens up to `position`, or up to fewer than `SPACING` before it, and their
        number."""
        if not self._kept:
            digest = _begun(self._scope)
            digest.update(self._lineage[0].weights.mark if self._lineage else b"")
            self._kept.append(digest)
        while (done := len(self._kept) * SPACING) <= position:
            digest = self._kept[-1].copy()
            digest.update(self._marked(tokens, done - SPACING, done))
            self._kept.append(digest)
        at = position // SPACING
        return self._kept[at].copy(), at * SPACING


def _begun(scope: Scope) -> blake2b:
    digest = blake2b(digest_size=_DIGEST)
    for part in (scope.tenant.encode(), scope.adapter.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest
