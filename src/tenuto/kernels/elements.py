"""Types of elements, and what a state slot consists of; shared by kernels in PyTorch and without."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Element(StrEnum):
    """A type of floats, by the name that PyTorch and model files have for it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def size(self) -> int:
        """In bytes."""
        return 4 if self is Element.FLOAT32 else 2


class KVCacheDtype(StrEnum):
    """What keys and values in memory are: what computes decides (`auto`), or bytes,
    which are multiplied with what every 32 dimensions of a key have, and every value of a head."""

    AUTO = "auto"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class StatePart:
    """One of the arrays a layer's state consists of."""

    shape: tuple[int, ...]
    element: Element
