"""Packs weights into the panels that the native kernels read; `weight_formats.h` has their layout."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tenuto.kernels.native.formats import FORMATS, Blocks, Conversion, PanelFormat
from tenuto.kernels.native.library import Matrix
from tenuto.kernels.native.shared_memory import PrivateMemory, WeightMemory

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

LANES = 16
BLOCK = 32
_CHUNK_BYTES = 2**25
_AT_ONCE = 2**20  # bytes of a file that are packed at once, so that intermediate arrays stay in the CPU's cache


class Arena:
    """Memory for weights. Arrays live as long as the arena. With memory that is `filled`, arrays have their contents
    already, and must be asked for in the order in which they were filled.

    Invariant: `_chunks` are those of `_memory`; the last has `_free` bytes left at its end.
    """

    def __init__(self, memory: WeightMemory | None = None) -> None:
        """`memory` is by default that of this process."""
        self._memory = memory or PrivateMemory()
        self.filled = self._memory.filled
        self._chunks: list[Bytes] = []
        self._free = 0
        self.size = 0  # bytes in use

    def floats(self, values: npt.NDArray[np.float32]) -> int:
        """Returns the address of a copy of `values`, float32 [n], padded with zeros to a multiple of 32."""
        room = self.array((-(-len(values) // BLOCK) * BLOCK * 4,))
        if not self.filled:
            room.view(np.float32)[: len(values)] = values
        return room.ctypes.data

    def array(self, shape: tuple[int, ...]) -> Bytes:
        """Returns zeros, uint8, aligned to 64 bytes, or what is there if it is filled."""
        size = -(-int(np.prod(shape)) // 64) * 64
        if size > self._free:
            self._free = -(-max(size, _CHUNK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._chunks.append(self._memory.chunk(self._free))
        chunk = self._chunks[-1]
        start = len(chunk) - self._free
        self._free -= size
        self.size += size
        return chunk[start : start + int(np.prod(shape))].reshape(shape)


def pack_quantized(data: Bytes, kind: GGMLQuantizationType, arena: Arena) -> Matrix:
    """Packs a quantized matrix. `data` is uint8 [outputs, bytes of an output], as in a GGUF file; `kind` is in
    `FORMATS`."""
    conversion, (weights, size) = FORMATS[kind], GGML_QUANT_SIZES[kind]
    inputs = data.shape[1] // size * weights

    def split(rows: Bytes) -> Blocks:
        return conversion.split(rows.reshape(len(rows), -1, size))

    return pack_blocks(data, inputs, Conversion(conversion.format, split), arena)


def pack_blocks(data: Bytes, inputs: int, conversion: Conversion, arena: Arena, group: int = 1) -> Matrix:
    """Packs a matrix. `data` is uint8 [outputs, bytes of an output]. `group`: the number of blocks that share a scale,
    a power of two or all of a row, where the panel format leaves that open."""
    outputs, count = len(data), inputs // BLOCK
    panels = -(-outputs // LANES)
    packed = arena.array((panels, _stride(conversion.format, count, group)))
    step = max(1, _AT_ONCE // (LANES * data.shape[1]))
    for first in range(0, panels if not arena.filled else 0, step):
        rows = data[first * LANES : (first + step) * LANES]
        if len(rows) % LANES:
            rows = np.concatenate((rows, np.zeros((-len(rows) % LANES, rows.shape[1]), np.uint8)))
        with np.errstate(all="ignore"):  # scales may be anything in a damaged file
            _fill(packed[first : first + step], conversion.split(rows))
    return _matrix(conversion.format, outputs, inputs, packed, 31 if group >= count else group.bit_length() - 1)


def _stride(panel_format: PanelFormat, count: int, group: int) -> int:
    """Returns the size, in bytes, of a quantized panel of `count` blocks of which `group` share a scale."""
    scales = sum(kind.itemsize * -(-count // (shared or group)) for kind, shared in panel_format.scales)
    return -(-LANES * (count * panel_format.quant_bytes + scales) // 64) * 64


def _fill(panels: Bytes, blocks: Blocks) -> None:
    """Copies `blocks` into `panels`, 16 rows into each."""
    _, count, size = blocks.quants.shape
    at = count * LANES * size
    kind = np.dtype(f"u{blocks.together}")
    lanes = blocks.quants.view(kind).reshape(len(panels), LANES, count, size // blocks.together)
    place = panels[:, :at].view(kind).reshape(len(panels), count, size // blocks.together, LANES)
    np.copyto(place, lanes.transpose(0, 2, 3, 1))
    for values in blocks.scales:
        end = at + LANES * values.shape[1] * values.itemsize
        into = panels[:, at:end].view(values.dtype).reshape(len(panels), -1, LANES)
        np.copyto(into, values.reshape(len(panels), LANES, -1).transpose(0, 2, 1))
        at = end


def pack_floats(rows: Iterable[Words], outputs: int, inputs: int, panel_format: PanelFormat, arena: Arena) -> Matrix:
    """Packs a matrix of floats. `rows` has its bits in pieces, [outputs, inputs] each: uint32 for `F32`, and uint16 for
    `BF16` and `F16`. All pieces but the last have a multiple of 16 outputs."""
    item, together = (4, 1) if panel_format is PanelFormat.F32 else (2, 2 if panel_format is PanelFormat.BF16 else 1)
    panels, columns = -(-outputs // LANES), -(-inputs // BLOCK) * BLOCK
    packed = arena.array((panels, columns * LANES * item))
    lanes = packed.view(np.dtype(f"u{item}")).reshape(panels, columns // together, LANES, together)
    done = 0
    for piece in rows if not arena.filled else ():
        count = -(-len(piece) // LANES)
        padded = np.zeros((count * LANES, columns), piece.dtype)
        padded[: len(piece), :inputs] = piece
        np.copyto(lanes[done : done + count], padded.reshape(count, LANES, -1, together).transpose(0, 2, 1, 3))
        done += count
    return _matrix(panel_format, outputs, inputs, packed)


def _matrix(panel_format: PanelFormat, outputs: int, inputs: int, packed: Bytes, group: int = 0) -> Matrix:
    return Matrix(panel_format, outputs, inputs, len(packed), group, packed.shape[1], packed.ctypes.data, None)
