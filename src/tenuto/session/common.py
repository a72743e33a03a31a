"""The comparison of token sequences."""

from __future__ import annotations

from array import array

import numpy as np

PIECE = 2**13
"""The number of tokens that are compared at once."""


def common_prefix(first: array[int], second: array[int], most: int) -> int:
    """Returns the length of the common prefix, at most `most`, of two sequences of at least so many tokens."""
    low = 0
    while low < most:
        high = min(low + PIECE, most)
        with memoryview(first)[low:high] as one, memoryview(second)[low:high] as other:
            differs = np.frombuffer(one, np.intc) != np.frombuffer(other, np.intc)
        place = int(differs.argmax())
        if differs[place]:
            return low + place
        low = high
    return most
