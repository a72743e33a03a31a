"""Sets of tokens as bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenuto.base.plan import Words

BITS = 32
"""Tokens in a word."""


def words_of(tokens: Sequence[int], vocab: int) -> Words:
    """Returns uint32 [words], with a bit for each of the `tokens` below `vocab`; see `base.plan.Words`."""
    ids = np.array([token for token in tokens if token < vocab], np.int64)
    words = np.zeros(-(-vocab // BITS), np.uint32)
    np.bitwise_or.at(words, ids // BITS, np.uint32(1) << (ids % BITS).astype(np.uint32))
    return words
