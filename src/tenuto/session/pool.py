"""The vector of a turn's input, collected while the input is computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError
from tenuto.base.options import Pooling


class Pool:
    """Averages the vectors after the input tokens at positions [start, stop).

    Invariant: `_total` is the sum of those in [start, next), each added once, however often it was computed.
    """

    def __init__(self, pooling: Pooling, begin: int, end: int) -> None:
        """The input is at positions [begin, end); it is not empty."""
        self.start = end - 1 if pooling == "last" else begin
        self.stop = begin + 1 if pooling == "first" else end
        self.next = self.start
        self._total: npt.NDArray[np.float64] | None = None

    @property
    def complete(self) -> bool:
        return self.next == self.stop

    def add(self, start: int, stop: int, total: npt.NDArray[np.float32]) -> None:
        """Adds the sum of the vectors in [start, stop), float32 [width]. Raises `InvariantError` unless `start` is
        `next`."""
        if start != self.next or not start < stop <= self.stop:
            raise InvariantError(f"vectors of positions {start} to {stop} came; expected: from {self.next}")
        self._total = total.astype(np.float64) if self._total is None else self._total + total
        self.next = stop

    def restart(self) -> None:
        """Forgets what was added: the model's weights have changed."""
        self.next, self._total = self.start, None

    def vector(self) -> bytes:
        """Returns the average as little-endian float32 numbers; b"" while it is not complete."""
        if self._total is None or not self.complete:
            return b""
        return (self._total / (self.stop - self.start)).astype("<f4").tobytes()
