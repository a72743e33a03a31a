"""Weights as stored in files, and their decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufTensor
from tenuto.formats.mapped import Span
from tenuto.kernels.native.formats import FORMATS
from tenuto.kernels.native.grouped import Grouped

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Elements = npt.NDArray[Any]
"""Unquantized floats: float32, float16, or uint16 with the bits of bfloat16, which NumPy lacks."""

_PLAIN: dict[Kind | Grouped, np.dtype[Any]] = {
    Kind.F32: np.dtype(np.float32),
    Kind.F16: np.dtype(np.float16),
    Kind.BF16: np.dtype(np.uint16),
}
FLOATS = {kind.name: kind for kind in (Kind.F32, Kind.F16, Kind.BF16)}
"""The unquantized types by name; safetensors files use the same names."""
BYTES = Kind.I8
"""The type of raw bytes that only a model's family can interpret."""


_COMPARED = 1024
"""Number of outputs compared at a time, because a tensor may be larger than memory."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of type `kind`, that of GGML unless it is a `Grouped`, and `shape`, (outputs, inputs) for a matrix.

    `read` returns its raw little-endian bytes, uint8: [outputs, bytes per output] for a matrix, [1, bytes] for a
    vector. It maps them from the file anew at each call, so that they take memory only while in use. Raises
    `ModelError`. `order`, int64 [inputs]: a matrix's stored column j is that of input `order[j]`; `None` if columns are
    in the order of inputs. Only quantized matrices may have one.
    """

    kind: Kind | Grouped
    shape: tuple[int, ...]
    read: Callable[[], Bytes]
    order: Longs | None = field(default=None, compare=False)

    @classmethod
    def of(cls, elements: Elements, kind: Kind | Grouped) -> StoredWeight:
        """Returns a tensor that is in memory, of an unquantized `kind`."""
        data = np.ascontiguousarray(elements, _PLAIN[kind]).view(np.uint8)
        return cls(kind, elements.shape, lambda: data.reshape(_rows(elements.shape), -1))

    @classmethod
    def mapped(cls, kind: Kind, shape: tuple[int, ...], span: Span) -> StoredWeight:
        """Returns a tensor that is mapped from a file."""
        return cls(kind, shape, lambda: span.data().reshape(_rows(shape), -1))

    def elements(self) -> Elements:
        """Returns the elements in their stored type. Raises `ModelError` if they are quantized."""
        if self.kind not in _PLAIN:
            raise ModelError(f"a tensor of type {self.kind.name} must be rearranged; supported: {', '.join(FLOATS)}")
        return self.read().reshape(-1).view(_PLAIN[self.kind]).reshape(self.shape)

    def decode(self) -> Floats:
        """Returns the elements as float32. Raises `ModelError` like `dequantize`."""
        return self._decode(self.read(), self.shape)

    def _decode(self, rows: Bytes, shape: tuple[int, ...]) -> Floats:
        """Decodes rows of `read`, with columns in the order of inputs."""
        found = dequantize(rows.reshape(-1), self.kind, shape)
        if self.order is None:
            return found
        values = np.empty_like(found)
        values[..., self.order] = found
        return values

    def equals(self, other: StoredWeight) -> bool:
        """Whether both have the same kind, shape, order and bytes."""
        if (self.kind, self.shape) != (other.kind, other.shape) or not same_order(self.order, other.order):
            return False
        first, second = self.read(), other.read()
        return all(
            np.array_equal(first[i : i + _COMPARED], second[i : i + _COMPARED]) for i in range(0, len(first), _COMPARED)
        )

    def words(self, kind: Kind, count: int) -> Iterator[Words]:
        """Yields the elements converted to an unquantized `kind`, as unsigned integers with their bits, [at most
        `count` outputs, inputs] at a time. Raises `ModelError` like `dequantize`."""
        data = self.read()
        for first in range(0, len(data), count):
            rows = data[first : first + count]
            if self.kind is kind:
                yield rows.view(f"u{_PLAIN[kind].itemsize}")
            else:
                yield _words(self._decode(rows, (len(rows), *self.shape[1:])), kind)

    def select(self, outputs: slice | Longs) -> StoredWeight:
        """Returns the selected outputs; those of a matrix are read on demand."""
        if len(self.shape) < 2:
            return StoredWeight.of(self.elements()[outputs], self.kind)
        count = len(range(*outputs.indices(self.shape[0]))) if isinstance(outputs, slice) else len(outputs)
        return StoredWeight(self.kind, (count, *self.shape[1:]), lambda: self.read()[outputs], self.order)

    def each(self) -> Iterator[StoredWeight]:
        """Yields the tensors along the first dimension; each is read on demand."""
        for i in range(self.shape[0]):
            yield StoredWeight(self.kind, self.shape[1:], partial(self._read_part, i))

    def _read_part(self, number: int) -> Bytes:
        part: Bytes = self.read()[number]
        return part.reshape(_rows(self.shape[1:]), -1)


def same_order(first: Longs | None, second: Longs | None) -> bool:
    """Whether two matrices have their columns in the same order."""
    return first is second or (first is not None and second is not None and np.array_equal(first, second))


def stored_in(tensor: GgufTensor) -> StoredWeight:
    """Returns a tensor of a GGUF file, mapped from it."""
    return StoredWeight.mapped(tensor.kind, tensor.shape, tensor.span)


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 else 1


def wrong_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> ModelError:
    """Returns the error for a tensor whose shape differs from the configuration."""
    return ModelError(f"tensor {name!r} is of shape {list(found)}; expected: {list(expected)}")


def without_place(name: str) -> ModelError:
    """Returns the error for a stored tensor that no part of the configured model uses."""
    return ModelError(f"the model's files hold a tensor {name!r} that its configuration has no place for")


def bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Returns the bits of float32 values rounded to bfloat16, to nearest with ties to even."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _words(values: Floats, kind: Kind) -> Words:
    """Returns the bits of float32 values rounded to `kind`."""
    if kind is Kind.F32:
        return values.view(np.uint32)
    if kind is Kind.BF16:
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):  # values that are too large become infinite
        return values.astype(np.float16).view(np.uint16)


_Q8_0_BYTES = 34
"""Bytes of a block of Q8_0: a float16 scale and 32 int8."""


def dequantize(data: Bytes, kind: Kind | Grouped, shape: tuple[int, ...]) -> Floats:
    """Decodes a tensor of type `kind` to float32 of `shape`.

    `data` is uint8 [bytes], the raw little-endian bytes. For types of GGML the result equals that of
    `gguf.quants.dequantize` bit for bit. Raises `ModelError` unless the type is a `Grouped`, F32, F16, BF16 or one of
    `FORMATS`. Layout of GGML's blocks: `ggml-common.h`.
    """
    if kind is Kind.BF16:
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(shape)
    if kind in _PLAIN:
        return data.view(_PLAIN[kind]).astype(np.float32, copy=False).reshape(shape)
    with np.errstate(all="ignore"):  # scales may be anything in a damaged file
        if isinstance(kind, Grouped):
            return kind.decode(data.reshape(_rows(shape), -1), shape[-1])
        if kind is Kind.Q8_0:  # three times as fast as the package
            blocks = data.reshape(-1, _Q8_0_BYTES)
            scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            return (scales * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(shape)
        if kind in FORMATS:
            return np.asarray(quants.dequantize(data.reshape(_rows(shape), -1), kind), np.float32).reshape(shape)
    names = ", ".join(k.name for k in (*_PLAIN, *FORMATS))
    raise ModelError(f"GGUF tensors of type {kind.name} are not supported; supported: {names}")
