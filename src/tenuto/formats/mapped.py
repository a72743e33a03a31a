"""Memory-mapped parts of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import ModelError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Span:
    """A range of `size` bytes in a file, from byte `start`."""

    path: Path
    start: int
    size: int

    def data(self) -> Bytes:
        """Returns the bytes, uint8 [size], mapped from the file until the array is dropped. Raises `ModelError`."""
        if not self.size:
            return np.zeros(0, np.uint8)
        try:
            return mapped(self.path, self.start, self.size)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path} can no longer be read ({error}); fetch it again") from error


def mapped(path: Path, start: int = 0, size: int | None = None) -> Bytes:
    """Maps bytes of a file, by default all. Raises `OSError`, and `ValueError` if the file is too short."""
    # Copy-on-write, because torch can only view writable memory without a copy; the file itself is never written.
    return np.memmap(path, dtype=np.uint8, mode="c", offset=start, shape=size)
