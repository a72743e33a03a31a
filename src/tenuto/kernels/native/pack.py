"""Weights in the panels that the native kernels read; `matrix.h` describes them."""

from __future__ import annotations

import mmap
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tenuto.kernels.native.library import Matrix

Bytes = npt.NDArray[np.uint8]

LANES = 16
BLOCK = 32
_CHUNK_BYTES = 2**25


class PanelKind(IntEnum):
    """How a panel's weights are stored."""

    NIBBLES = 0
    NIBBLES_MIN = 1
    BYTES = 2
    BYTES_MIN = 3
    PAIRS = 4


QUANTIZED = {"Q4_0": PanelKind.NIBBLES, "Q4_1": PanelKind.NIBBLES_MIN, "Q8_0": PanelKind.BYTES}
"""GGML types whose blocks of 32 weights become blocks of a panel as they are: nothing is rounded again."""


class Arena:
    """Memory for weights, in large pages where the system has them. What is taken lives as long as the arena.

    Invariant: `_chunks` are private mappings; the last has `_free` bytes left at its end.
    """

    def __init__(self) -> None:
        self._chunks: list[Bytes] = []
        self._free = 0
        self.size = 0  # bytes taken

    def floats(self, values: npt.NDArray[np.float32]) -> int:
        """The address of a copy of `values`, float32 [n], with zeros up to a multiple of 32."""
        room = self.array((-(-len(values) // BLOCK) * BLOCK * 4,))
        room.view(np.float32)[: len(values)] = values
        return room.ctypes.data

    def array(self, shape: tuple[int, ...]) -> Bytes:
        """Zeros, uint8, at a multiple of 64 bytes."""
        size = -(-int(np.prod(shape)) // 64) * 64
        if size > self._free:
            self._grow(size)
        chunk = self._chunks[-1]
        start = len(chunk) - self._free
        self._free -= size
        self.size += size
        return chunk[start : start + int(np.prod(shape))].reshape(shape)

    def _grow(self, least: int) -> None:
        self._free = max(least, _CHUNK_BYTES)
        mapped = mmap.mmap(-1, self._free, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._chunks.append(np.frombuffer(mapped, np.uint8))


def pack_quantized(blocks: Bytes, kind: PanelKind, arena: Arena) -> Matrix:
    """`blocks` is uint8 [outputs, blocks, bytes a block], as in a GGUF file (layout: `ggml-common.h`)."""
    outputs, count, _ = blocks.shape
    nibbles, minima = kind in (PanelKind.NIBBLES, PanelKind.NIBBLES_MIN), kind is PanelKind.NIBBLES_MIN
    head, vectors = (4 if minima else 2), (4 if nibbles else 8)
    panels = -(-outputs // LANES)
    data_bytes, scale_bytes = count * vectors * 64, count * LANES * 2
    stride = -(-(data_bytes + scale_bytes * (2 if minima else 1)) // 64) * 64
    packed = arena.array((panels, stride))
    if outputs % LANES:
        blocks = np.concatenate((blocks, np.zeros((-outputs % LANES, *blocks.shape[1:]), np.uint8)))
    lanes = blocks.reshape(panels, LANES, count, -1)
    quants = lanes[..., head:].reshape(panels, LANES, count, vectors, 4).transpose(0, 2, 3, 1, 4)
    target = packed[:, :data_bytes].reshape(panels, count, vectors, LANES, 4)
    np.copyto(target, quants)
    if kind is PanelKind.BYTES:  # signed bytes, stored from 0 on
        np.bitwise_xor(target, 0x80, out=target)
    for i in range(2 if minima else 1):
        at = data_bytes + i * scale_bytes
        np.copyto(
            packed[:, at : at + scale_bytes].reshape(panels, count, LANES, 2),
            lanes[..., 2 * i : 2 * i + 2].transpose(0, 2, 1, 3),
        )
    return _matrix(kind, outputs, count * BLOCK, packed)


def pack_bfloat16(weights: npt.NDArray[np.uint16], arena: Arena) -> Matrix:
    """`weights` is [outputs, inputs], each the bits of a bfloat16."""
    outputs, inputs = weights.shape
    panels, blocks = -(-outputs // LANES), -(-inputs // BLOCK)
    padded = np.zeros((panels * LANES, blocks * BLOCK), np.uint16)
    padded[:outputs, :inputs] = weights
    packed = arena.array((panels, blocks * BLOCK * LANES * 2))
    target = packed.view(np.uint16).reshape(panels, blocks * BLOCK // 2, LANES, 2)
    np.copyto(target, padded.reshape(panels, LANES, -1, 2).transpose(0, 2, 1, 3))
    return _matrix(PanelKind.PAIRS, outputs, inputs, packed)


def _matrix(kind: PanelKind, outputs: int, inputs: int, packed: Bytes) -> Matrix:
    return Matrix(kind, outputs, inputs, len(packed), packed.shape[1], packed.ctypes.data, None)
