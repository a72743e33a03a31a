"""The witness's hashes of histories, and the tokens computed from them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError
from tenuto.base.plan import InputVectors, Ints, Singles, Words

Hashes = npt.NDArray[np.uint64]
Longs = npt.NDArray[np.int64]

MULTIPLIER = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
START = 0x243F6A8885A308D3
"""The hash of the empty history."""


def advance(state: int, token: int, weights: int = 0) -> int:
    """Returns the hash of a history with hash `state` extended by `token`, computed with the weights of this mark."""
    mixed = ((state ^ (weights * MULTIPLIER & MASK) ^ (token + 1)) * MULTIPLIER) & MASK
    return mixed ^ (mixed >> 29)


def history_hash(tokens: Sequence[int], weights: int = 0) -> int:
    """Returns the hash of a whole history, computed token by token with the weights of this mark."""
    state = START
    for token in tokens:
        state = advance(state, token, weights)
    return state


def seeded(state: int, seed: int) -> int:
    """Returns the argument of `next_token` for a turn with `seed` after a history with hash `state`; seed 0 leaves
    `state` unchanged."""
    return state ^ (seed * MULTIPLIER & MASK)


def next_token(state: int, vocab_size: int) -> int:
    """Returns the token after the history with hash `state`, for a turn with seed 0; see `seeded`."""
    return ((state >> 17) ^ (state >> 41)) % vocab_size


def next_unmasked(state: int, vocab_size: int, masked: Collection[int]) -> int:
    """Returns `next_token`, or if that is in `masked` the next greater token (modulo `vocab_size`) that is not."""
    token = next_token(state, vocab_size)
    for _ in range(vocab_size):
        if token not in masked:
            break
        token = (token + 1) % vocab_size
    return token


def next_allowed(state: int, vocab_size: int, masked: Collection[int], allowed: Words) -> int:
    """Returns one of the tokens that are set in the bit mask `allowed` and not in `masked`, all equally likely; without
    such a token, returns `next_unmasked`."""
    bits = np.unpackbits(allowed.view(np.uint8), count=vocab_size, bitorder="little")
    bits[list(masked)] = 0
    tokens = np.flatnonzero(bits)
    if not len(tokens):
        return next_unmasked(state, vocab_size, masked)
    return int(tokens[next_token(state, len(tokens))])


def advance_all(states: Hashes, tokens: Longs, weights: Longs) -> Hashes:
    """Applies `advance` to many histories. `weights`: their marks, or one mark for all, int64 [1]."""
    marks = weights.astype(np.uint64) * np.uint64(MULTIPLIER)
    mixed = (states ^ marks ^ (tokens + 1).astype(np.uint64)) * np.uint64(MULTIPLIER)
    return np.asarray(mixed ^ (mixed >> np.uint64(29)), np.uint64)


WIDTH = 4
"""Numbers in a vector."""


def vectors_of(states: Hashes) -> npt.NDArray[np.float32]:
    """Returns the vectors after histories with hashes `states`, uint64 [n], as float32 [n, WIDTH]: whole numbers from
    -128 to 127, so that sums of up to 2 ** 17 of them are exact."""
    return np.ascontiguousarray(states).view(np.int8).reshape(-1, 8)[:, 2 : 2 + WIDTH].astype(np.float32)


def follows(
    hashes: Hashes, tokens: Longs, weights: Longs, beginnings: npt.NDArray[np.bool_], starts: Hashes
) -> npt.NDArray[np.bool_]:
    """Returns for each slot of consecutive pages, bool [pages, page_size], whether its hash follows from its token, the
    weights with which it was computed, and the hash before. The pages marked in `beginnings` begin a history, so the
    hashes before them are those in `starts`, one for each of these pages."""
    before = np.empty_like(hashes)
    before.reshape(-1)[1:] = hashes.reshape(-1)[:-1]
    before[beginnings, 0] = starts
    return np.asarray(advance_all(before, tokens, weights) == hashes, np.bool_)


def compare(
    kind: str,
    size: int,
    rows: Longs,
    first: Longs,
    starts: Longs,
    known: Sequence[Ints],
    pages: Longs,
    tokens: Longs,
    begins: Longs,
) -> None:
    """Checks that the tokens of each row at positions `first[i]` to `starts[i]` are those of the `known` part of its
    history. Its pages begin at index `begins[i]` of `pages` and `tokens`."""
    for row, low, start, history, begin in zip(rows, first, starts, known, begins, strict=True):
        stop = min(int(start), len(history))
        skipped = int(low) % size
        there = tokens[begin:].reshape(-1)[skipped : skipped + max(0, stop - int(low))]
        wrong = np.flatnonzero(there != history[low:stop])
        if len(wrong):
            position, place = int(low + wrong[0]), skipped + int(wrong[0])
            where = f"position {position}, slot {place % size} of page {pages[begin + place // size]}"
            raise InvariantError(
                f"{kind}: row {row} computing from {start} reads token {there[wrong[0]]} at {where}; "
                f"its history has {history[position]}"
            )


def sums_of(asked: InputVectors, hashes: Hashes) -> Singles:
    """Returns the sums of vectors that are asked for; these are exact."""
    parts = zip(asked.firsts.tolist(), asked.counts.tolist(), strict=True)
    return np.stack([vectors_of(hashes[first : first + count]).sum(axis=0) for first, count in parts])


def start_of(path: str) -> np.uint64:
    """Returns a hash that stands for the adapter at `path`."""
    return np.uint64(int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little"))


MARKS = 2**22
"""The number of marks that weights may have."""


def mark_of(path: str) -> int:
    """Returns a mark that stands for the weights at `path`, less than `MARKS`."""
    return int(start_of(f"weights {path}")) % MARKS


@dataclass(frozen=True, slots=True)
class WitnessAdapter:
    """An adapter of the witness: `start` changes the hash of the empty history."""

    start: np.uint64

    @property
    def digest(self) -> str:
        """See `AdapterWeights`."""
        return f"{self.start:016x}"


@dataclass(frozen=True, slots=True)
class WitnessWeights:
    """The witness's weights: `mark` is part of the hash after every token that is computed with them; 0 for those it
    begins with."""

    mark: int

    def close(self) -> None:
        """Does nothing; there is nothing to release."""
