"""An index of where a few tokens have occurred before, from which the tokens that follow are guessed.

The index is a hint: it remembers positions, and its users compare the tokens there. So forks share an index, and
entries of tokens that have been cut do no harm.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ORDER = 3
"""The number of tokens that are looked up."""
ENTRY_BYTES = 8
FEWEST = 256
"""The least number of entries of an index."""
ONE_BY_ONE = 12
"""Up to this many tokens are added one by one, which is faster than NumPy for so few."""
FACTORS = (0x9E3779B97, 0xC2B2AE3D2B, 0x165667B19E)  # large enough to fill 48 bits, small enough to be quick
_HALF = 2**32 - 1

Words = npt.NDArray[np.uint64]


class Suffixes:
    """Positions by the `ORDER` tokens before them; of equal ones about the last two are known.

    A table of buckets of two entries, 64 bits each: a hash of the tokens, whose low bits choose the bucket, and the
    position. Among as many buckets as half the tokens, about a quarter of all positions are displaced by others. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self.clearings = 0
        self._make(FEWEST)

    @property
    def bytes(self) -> int:
        """The size of the table: 8 to 16 bytes a token of the longest sequence in it, and at least 2 KiB."""
        return ENTRY_BYTES * len(self._entries)

    def clear(self) -> None:
        """Forgets all positions, and raises `clearings`."""
        self.clearings += 1
        self._make(FEWEST)

    def _make(self, entries: int) -> None:
        self._entries = np.zeros(entries, np.uint64)  # of bucket b: 2 b, the newer one, and 2 b + 1
        self._one = memoryview(self._entries)  # type: ignore[arg-type]  # faster for one entry at a time
        self._mask = entries // 2 - 1

    def reserve(self, tokens: int) -> None:
        """Makes room for a sequence of this many tokens, so that entries are not moved as it is added."""
        if tokens > len(self._entries):
            self._grow(tokens)

    def add(self, part: array[int], end: int) -> None:
        """Adds the positions behind all `ORDER` consecutive tokens of `part`, the tokens of a sequence before position
        `end`."""
        count = len(part) - ORDER + 1
        if count <= 0:
            return
        self.reserve(end)
        if count > ONE_BY_ONE:
            ids = np.frombuffer(part, np.int32).astype(np.uint64)
            hashes = sum((np.uint64(f) * ids[i : i + count] for i, f in enumerate(FACTORS)), np.uint64(0))
            hashes = (hashes >> np.uint64(16)) << np.uint64(32)
            self._place(hashes | np.arange(end - count + 1, end + 1, dtype=np.uint64))
            return
        one, mask = self._one, self._mask
        for at in range(count):
            hashed = hash_of(part, at)
            bucket = 2 * (hashed & mask)
            one[bucket + 1] = one[bucket]
            one[bucket] = (hashed << 32) | (end - count + 1 + at)

    def find(self, hashed: int) -> tuple[int, int]:
        """Returns up to two positions before which tokens with this hash may have occurred, the newer one first; 0
        stands for none."""
        bucket = 2 * (hashed & self._mask)
        first, second = self._one[bucket], self._one[bucket + 1]
        return first & _HALF if first >> 32 == hashed else 0, second & _HALF if second >> 32 == hashed else 0

    def _grow(self, end: int) -> None:
        entries = self._entries
        self._make(1 << (end - 1).bit_length())
        older_first = np.concatenate((entries[1::2], entries[::2]))
        if older_first.any():
            self._place(older_first[older_first > 0])

    def _place(self, entries: Words) -> None:
        """Adds entries, at least one; later ones are newer."""
        buckets = (entries >> np.uint64(32)) & np.uint64(self._mask)
        order = buckets.argsort(kind="stable")
        buckets, entries = buckets[order].astype(np.int64), entries[order]
        more = np.append(buckets[1:] == buckets[:-1], False)  # whether a newer one has the same bucket
        newest = (~more).nonzero()[0]
        before = newest[newest > 0] - 1
        before = before[more[before]]
        self._entries[2 * buckets[newest] + 1] = self._entries[2 * buckets[newest]]
        self._entries[2 * buckets[newest]] = entries[newest]
        self._entries[2 * buckets[before] + 1] = entries[before]


def hash_of(tokens: Sequence[int], at: int = 0) -> int:
    """Returns a hash, of 32 bits, of `ORDER` tokens from index `at` on."""
    first, second, third = FACTORS
    return ((tokens[at] * first + tokens[at + 1] * second + tokens[at + 2] * third) >> 16) & _HALF


@dataclass(slots=True)
class SessionSuffixes:
    """The leading `length` tokens of a session that are in `suffixes`, unless that was cleared since."""

    suffixes: Suffixes
    length: int = 0
    clearings: int = 0

    def fork(self, position: int) -> SessionSuffixes:
        """Returns the suffixes of a fork of the first `position` tokens: they share the index."""
        return SessionSuffixes(self.suffixes, min(self.length, position), self.clearings)

    def cut(self, position: int) -> None:
        """Tokens from `position` on are replaced by others."""
        self.length = min(self.length, position)
