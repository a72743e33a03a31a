"""Weights as files store them, and what they decode to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufTensor


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of GGML type `kind` and `shape`, (outputs, inputs) for a matrix.

    `read` returns its raw little-endian bytes, uint8: [outputs, bytes an output] for a matrix, [1, bytes] for a vector.
    They are mapped from the file each time, so that they take memory only as long as they are used. It raises
    `ModelError`.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def rows(self, first: int, end: int) -> StoredWeight:
        """Outputs `first` up to `end` of a matrix, as they are stored."""
        return StoredWeight(self.kind, (end - first, *self.shape[1:]), lambda: self.read()[first:end])

    def unstacked(self) -> list[StoredWeight]:
        """The matrices of a tensor of [matrices, outputs, inputs], as they are stored."""

        def one(i: int) -> StoredWeight:
            return StoredWeight(self.kind, self.shape[1:], lambda: self.read()[i].view(self.shape[1], -1))

        return [one(i) for i in range(self.shape[0])]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StoredWeight:
        """A tensor of floats that is in memory."""
        return cls(_KINDS[tensor.dtype], tuple(tensor.shape), lambda: raw(tensor))

    def decode(self) -> torch.Tensor:
        """In the stored element type, or as float32 if that is quantized. Raises `ModelError` as `dequantize`."""
        return dequantize(self.read().reshape(-1), self.kind, self.shape)

    def decode_rows(self, count: int) -> Iterator[torch.Tensor]:
        """The same in pieces of `count` outputs."""
        data = self.read()
        for first in range(0, len(data), count):
            rows = data[first : first + count]
            yield dequantize(rows.reshape(-1), self.kind, (len(rows), *self.shape[1:]))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """What `StoredWeight.read` returns of a tensor."""
    return tensor.contiguous().view(tensor.shape[0] if tensor.dim() > 1 else 1, -1).view(torch.uint8)


def stored_in(tensor: GgufTensor) -> StoredWeight:
    """A tensor of a GGUF file, mapped from it."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return StoredWeight(tensor.kind, tensor.shape, lambda: torch.from_numpy(tensor.data()).view(rows, -1))


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """Nibbles of uint8 [blocks, 16] as float32 [blocks, 32]: all low ones, then all high ones."""
    return torch.cat((blocks & 0x0F, blocks >> 4), dim=1).float()


def _scale(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The float16 at bytes `first`, `first + 1` of each block, as float32 [blocks, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks, 0) * (_halves(blocks[:, 2:]) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks, 0) * _halves(blocks[:, 4:]) + _scale(blocks, 2)


def wrong_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> ModelError:
    """What to raise for a tensor of another shape than the configuration says."""
    return ModelError(f"tensor {name!r} is of shape {list(found)}; expected: {list(expected)}")


def without_place(name: str) -> ModelError:
    """What to raise for a tensor that the configuration does not know."""
    return ModelError(f"the model's files hold a tensor {name!r} that its configuration has no place for")


_QUANTISED: dict[GGMLQuantizationType, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    GGMLQuantizationType.Q4_0: (18, _q4_0),
    GGMLQuantizationType.Q4_1: (20, _q4_1),
    GGMLQuantizationType.Q8_0: (34, _q8_0),
}
_BY_THE_PACKAGE = tuple(getattr(GGMLQuantizationType, name) for name in ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"))
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_KINDS = {dtype: kind for kind, dtype in _PLAIN.items()}
FLOATS = {kind.name: kind for kind in _PLAIN}
"""The types that are not quantized, by names that safetensors files use, too."""


BYTES = GGMLQuantizationType.I8
"""The type of tensors that are not weights yet: only their family knows what their bytes mean."""


def dequantize(data: torch.Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode a tensor of GGML type `kind`: float32 of `shape`, or, of a plain type, as it is.

    `data` is uint8 [bytes], the raw little-endian bytes. Equals `gguf.quants.dequantize` bit for bit. Raises
    `ModelError` if the type is not one of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K. Layout of the
    blocks: `ggml-common.h`.
    """
    if kind in _PLAIN:
        return data.view(_PLAIN[kind]).view(shape)
    if kind in _BY_THE_PACKAGE:
        with np.errstate(all="ignore"):  # scales may be anything in a damaged file
            return torch.from_numpy(gguf.quants.dequantize(data.numpy().reshape(shape[0], -1), kind)).view(shape)
    if kind not in _QUANTISED:
        names = ", ".join(k.name for k in (*_PLAIN, *_QUANTISED, *_BY_THE_PACKAGE))
        raise ModelError(f"GGUF tensors of type {kind.name} are not supported; supported: {names}")
    size, decode_blocks = _QUANTISED[kind]
    return decode_blocks(data.view(-1, size)).view(shape)
