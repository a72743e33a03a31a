"""Indices for rows of different lengths that are stored one after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]


def ragged_arange(counts: npt.NDArray[np.integer]) -> Longs:
    """Returns 0 .. counts[0] - 1, then 0 .. counts[1] - 1 and so on, int64 [sum(counts)]."""
    ends: Longs = np.cumsum(counts, dtype=np.int64)
    within: Longs = np.arange(counts.sum(), dtype=np.int64) - np.repeat(ends - counts, counts)
    return within
