"""Names for the content of units. A copy carries its name when it leaves the device, and every reader compares it with
the name of the content it asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from tenuto.base.options import Scope
from tenuto.base.plan import Bytes

_DIGEST = 16
_TOKEN = 4
"""The size of a token in bytes."""
MARK = 4
"""The size of a mark in bytes."""


@dataclass(frozen=True, slots=True)
class Content:
    """The state of `tokens` (int32; empty for a state slot) after certain earlier tokens in a scope. `before` is a
    digest of the scope (tenant and adapter) and of those earlier tokens, so it also fixes the position of `tokens`."""

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
        return len(self.tokens) // _TOKEN

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


def contents(scope: Scope, tokens: bytes, ranges: Iterable[tuple[int, int]]) -> list[Content]:
    """Returns the contents of units that hold these `ranges`, in ascending order, of `tokens` (int32) in a scope."""
    digest = blake2b(digest_size=_DIGEST)
    for part in (scope.tenant.encode(), scope.adapter.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    found, done = [], 0
    for begin, end in ranges:
        digest.update(tokens[_TOKEN * done : _TOKEN * begin])
        found.append(Content(digest.digest(), tokens[_TOKEN * begin : _TOKEN * end]))
        done = begin
    return found
