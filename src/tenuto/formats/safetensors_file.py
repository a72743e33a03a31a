"""The safetensors container: named tensors in one file.

Format: https://github.com/huggingface/safetensors#format. The reader in the `safetensors` package needs PyTorch for
tensors of bfloat16, which NumPy lacks.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from tenuto.base.errors import ModelError
from tenuto.formats.mapped import Bytes, Span, mapped

_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000
"""Maximum size of the header in bytes, set by the format."""
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
"""Bits per element, by the type's name in the file."""


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor and the location of its little-endian bytes. `dtype` is a key of `BITS` or a type unknown to us."""

    dtype: str
    shape: tuple[int, ...]
    span: Span


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Returns the tensors of a file by name. Raises `ModelError` if the file cannot be read, is truncated, or has
    another format."""
    try:
        return dict(_tensors(path, mapped(path)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is missing or damaged ({error}); fetch the model again") from error


def _tensors(path: Path, data: Bytes) -> list[tuple[str, SafeTensor]]:
    if len(data) < _LENGTH.size:
        raise ValueError("it has no header")
    (length,) = _LENGTH.unpack_from(data.data)
    begin = _LENGTH.size + length
    if length > _MAX_HEADER or begin > len(data):
        raise ValueError(f"it has {len(data)} bytes, and its header should have {length}")
    header = json.loads(data[_LENGTH.size : begin].tobytes())
    found = []
    for name, described in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = described["dtype"], tuple(described["shape"])
        first, last = described["data_offsets"]
        if type(dtype) is not str or any(type(number) is not int or number < 0 for number in (*shape, first, last)):
            raise ValueError(
                f"tensor {name!r} has the type {dtype!r}, the shape {shape} and the bytes {first} to {last}"
            )
        if last < first or begin + last > len(data):
            raise ValueError(f"it ends within tensor {name!r}")
        if dtype in BITS and (last - first) * 8 != math.prod(shape) * BITS[dtype]:
            raise ValueError(f"tensor {name!r} of type {dtype} and shape {shape} has {last - first} bytes")
        found.append((name, SafeTensor(dtype, shape, Span(path, begin + first, last - first))))
    return found
