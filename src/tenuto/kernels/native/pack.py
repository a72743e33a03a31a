"""Weights in the panels that the native kernels read; `matrix.h` describes them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tenuto.kernels.native.blocks import FORMATS, Blocks
from tenuto.kernels.native.library import Matrix, PanelKind

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

LANES = 16
BLOCK = 32
_CHUNK_BYTES = 2**25
_AT_ONCE = 2**20  # bytes of a file that are packed at once, so that all on the way stays in the cache
_BLOCK_BYTES = {
    PanelKind.NIBBLES: 16 + 2,
    PanelKind.NIBBLES_MIN: 16 + 4,
    PanelKind.BYTES: 32 + 2,
    PanelKind.FIVES_MIN: 20 + 4,
    PanelKind.SIXES: 24 + 4,
}
"""Of one output: quants, and scales and minima."""


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


def pack_quantized(data: Bytes, kind: GGMLQuantizationType, arena: Arena) -> Matrix:
    """`data` is uint8 [outputs, bytes an output], as in a GGUF file; `kind` is one of `FORMATS`."""
    stored, (weights, size) = FORMATS[kind], GGML_QUANT_SIZES[kind]
    outputs, count = len(data), data.shape[1] // size * (weights // BLOCK)
    panels = -(-outputs // LANES)
    packed = arena.array((panels, _stride(stored.kind, count)))
    step = max(1, _AT_ONCE // (LANES * data.shape[1]))
    for first in range(0, panels, step):
        rows = data[first * LANES : (first + step) * LANES]
        if len(rows) % LANES:
            rows = np.concatenate((rows, np.zeros((-len(rows) % LANES, rows.shape[1]), np.uint8)))
        with np.errstate(all="ignore"):  # scales may be anything in a damaged file
            blocks = stored.split(rows.reshape(len(rows), -1, size))
        _fill(packed[first : first + step], blocks)
    return _matrix(stored.kind, outputs, count * BLOCK, packed)


def _stride(kind: PanelKind, count: int) -> int:
    """Bytes of a quantized panel of `count` blocks."""
    return -(-count * LANES * _BLOCK_BYTES[kind] // 64) * 64


def _fill(panels: Bytes, blocks: Blocks) -> None:
    """Put the blocks of 16 rows into each of `panels`."""
    _, count, size = blocks.quants.shape
    end = count * LANES * size
    quads = blocks.quants.view(np.uint32).reshape(len(panels), LANES, count, size // 4).transpose(0, 2, 3, 1)
    place = panels[:, :end].view(np.uint32).reshape(quads.shape)
    if size == BLOCK:  # signed bytes, stored from 0 on
        np.bitwise_xor(quads, 0x80808080, out=place)
    else:
        np.copyto(place, quads)
    for i, halves in enumerate((blocks.scales, blocks.second)):
        if halves is not None:
            at = end + i * count * LANES * 2
            place = panels[:, at : at + count * LANES * 2].view(np.float16)
            np.copyto(place.reshape(-1, count, LANES), halves.reshape(-1, LANES, count).transpose(0, 2, 1))


def pack_floats(rows: Iterable[Words], outputs: int, inputs: int, kind: PanelKind, arena: Arena) -> Matrix:
    """`rows` are the bits of the matrix, in pieces of some outputs, [some, inputs] each: a multiple of 16 of them, but
    for the last piece. They are uint32 for `FLOAT32` and uint16 for the other kinds of floats."""
    item, together = (4, 1) if kind is PanelKind.FLOAT32 else (2, 2 if kind is PanelKind.PAIRS else 1)
    panels, columns = -(-outputs // LANES), -(-inputs // BLOCK) * BLOCK
    packed = arena.array((panels, columns * LANES * item))
    lanes = packed.view(np.dtype(f"u{item}")).reshape(panels, columns // together, LANES, together)
    done = 0
    for piece in rows:
        count = -(-len(piece) // LANES)
        padded = np.zeros((count * LANES, columns), piece.dtype)
        padded[: len(piece), :inputs] = piece
        np.copyto(lanes[done : done + count], padded.reshape(count, LANES, -1, together).transpose(0, 2, 1, 3))
        done += count
    return _matrix(kind, outputs, inputs, packed)


def _matrix(kind: PanelKind, outputs: int, inputs: int, packed: Bytes) -> Matrix:
    return Matrix(kind, outputs, inputs, len(packed), packed.shape[1], packed.ctypes.data, None)
