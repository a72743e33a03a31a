"""Types of elements, of keys and values, and of the parts of a state slot. PyTorch and native kernels share them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Element(StrEnum):
    """A floating-point type, by the name that PyTorch and model files use."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def size(self) -> int:
        """The size of an element, in bytes."""
        return 4 if self is Element.FLOAT32 else 2


class KVCacheDtype(StrEnum):
    """The type of keys and values in memory. `number` is its number in `KvType` of `kv_cache.h`. `words` describe it to
    users. `scaled_keys`: outlier dimensions of keys are scaled down before they are quantized, and queries scaled up.

    - `auto`: the floats that the executor computes with.
    - `int8`: 8-bit quants, with a scale for every 32 dimensions of a key, and for every value.
    """

    number: int
    words: str
    scaled_keys: bool

    def __new__(cls, name: str, number: int = 0, words: str = "", scaled_keys: bool = False) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.number = number
        member.words = words
        member.scaled_keys = scaled_keys
        return member

    AUTO = "auto", 0
    INT8 = "int8", 1, "8-bit keys and values", True

    def slot_bytes(self, head_dim: int, element: Element) -> int:
        """Returns the size, in bytes, of one token slot of one KV head: a key, a value and their scales. `element` is
        the type of elements, or of scales. `kv_cache.h` has the layout."""
        match self:
            case KVCacheDtype.AUTO:
                return 2 * head_dim * element.size
            case KVCacheDtype.INT8:
                parts = -(-head_dim // 32)
                return 2 * head_dim + (parts + 2) // 2 * 2 * element.size


@dataclass(frozen=True, slots=True)
class StatePart:
    """The shape, without slots, and element type of one of the two arrays of a layer's state; see
    `groups.state_parts`."""

    shape: tuple[int, ...]
    element: Element
