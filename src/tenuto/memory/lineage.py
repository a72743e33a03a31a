"""The weights with which state was computed."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

MARK_BYTES = 16


class WeightsVersion(NamedTuple):
    """Weights that are or were in use. `identity` stands for their content: state computed with weights of the same
    identity is the same. `name`: their version, as callers call it."""

    identity: str = ""
    name: str = "default"

    @property
    def mark(self) -> bytes:
        """A digest of the identity that cannot be taken for tokens, which are non-negative int32: every fourth byte has
        its highest bit set."""
        digest = bytearray(blake2b(self.identity.encode(), digest_size=MARK_BYTES).digest())
        for last in range(3, MARK_BYTES, 4):
            digest[last] |= 0x80
        return bytes(digest)


class Stamp(NamedTuple):
    """The state of the tokens from `start` on, up to the next stamp, was computed with `weights`."""

    start: int
    weights: WeightsVersion


Lineage = tuple[Stamp, ...]
"""The weights with which the state of a sequence was computed, in the order of its tokens; empty without state. The
first stamp is at 0, and no two neighbours have weights of the same identity. State depends on all tokens before it, so
state after a second stamp depends on the weights of both."""


def cut(lineage: Lineage, position: int) -> Lineage:
    """Returns the lineage of the first `position` tokens."""
    if not lineage or lineage[-1].start < position:
        return lineage
    return tuple(stamp for stamp in lineage if stamp.start < position)


def extended(lineage: Lineage, position: int, weights: WeightsVersion) -> Lineage:
    """Returns the lineage of a sequence whose tokens from `position` on are computed with `weights`."""
    kept = cut(lineage, position)
    if kept and kept[-1].weights.identity == weights.identity:
        return kept
    return (*kept, Stamp(position, weights))


def is_pure(lineage: Lineage, weights: WeightsVersion) -> bool:
    """Whether all state was computed with `weights`."""
    return all(stamp.weights.identity == weights.identity for stamp in lineage)
