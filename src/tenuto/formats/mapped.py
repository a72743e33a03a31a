"""Bytes of files, mapped rather than read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import ModelError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Span:
    """`size` bytes of a file from byte `start` on."""

    path: Path
    start: int
    size: int

    def data(self) -> Bytes:
        """The bytes, uint8 [size], mapped from the file until the array is dropped. Raises `ModelError`."""
        if not self.size:
            return np.zeros(0, np.uint8)
        try:
            return mapped(self.path, self.start, self.size)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path} can no longer be read ({error}); fetch it again") from error


def mapped(path: Path, start: int = 0, size: int | None = None) -> Bytes:
    """Bytes of a file, by default all. Raises `OSError`, and `ValueError` if it does not have them."""
    # Copy-on-write, so that torch may look at the bytes without a copy; the file is never written.
    return np.memmap(path, dtype=np.uint8, mode="c", offset=start, shape=size)
