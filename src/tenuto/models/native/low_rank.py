"""Packs the changes of adapters for the native kernels; `interface.h` has their layout."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from tenuto.kernels.native import library
from tenuto.kernels.native.pack import BLOCK, LANES, Arena
from tenuto.models.adapter import Adapter
from tenuto.models.native.program import NativeProgram
from tenuto.models.weights import Floats, bfloat16_bits

MATRICES = 3
"""Matrices of an operation."""


class PackedAdapter:
    """The changes of an adapter by the names of weights, in memory that lives as long as this object. They are bfloat16
    if that loses nothing, otherwise float32."""

    def __init__(self, adapter: Adapter) -> None:
        self._arena = Arena()
        self.changes: dict[str, library.LowRank] = {}
        self.widest = 0
        """The highest rank, rounded up to lanes."""
        for name, change in adapter.changes.items():
            rank, narrow = len(change.down), _fits_bfloat16(change.down) and _fits_bfloat16(change.up)
            down, up = (
                self._packed(values, narrow=narrow) for values in (_lanes(change.down, BLOCK), _lanes(change.up))
            )
            self.changes[name] = library.LowRank(rank, narrow, change.scale, down, up)
            self.widest = max(self.widest, -(-rank // LANES) * LANES)

    def _packed(self, values: Floats, *, narrow: bool) -> int:
        """Returns the address of a copy of `values`, as bfloat16 if `narrow`."""
        words = bfloat16_bits(values) if narrow else values.view(np.uint32)
        place = self._arena.array((words.nbytes,))
        place.view(words.dtype)[:] = words.reshape(-1)
        return place.ctypes.data


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """An adapter for the operations of one program: its table of changes, and the memory that the table points to."""

    packed: PackedAdapter
    table: ctypes.Array[library.LowRank]

    @classmethod
    def of(cls, packed: PackedAdapter, program: NativeProgram) -> PlacedAdapter:
        """Makes the table of a packed adapter for `program`."""
        table = (library.LowRank * (MATRICES * len(program.ops)))()
        for number, which, name in program.adaptable:
            if name in packed.changes:
                table[MATRICES * number + which] = packed.changes[name]
        return cls(packed, table)

    def structure(self) -> library.Adapter:
        """Returns the adapter as the kernels take it."""
        return library.Adapter(self.packed.widest, self.table)


def _lanes(matrix: Floats, multiple: int = 1) -> Floats:
    """Returns a matrix, [outputs, inputs], in panels of 16 outputs: [outputs / 16, inputs, 16]. Pads inputs with zeros
    to a multiple of `multiple`, and outputs to one of 16."""
    outputs, inputs = matrix.shape
    padded = np.pad(matrix, ((0, -outputs % LANES), (0, -inputs % multiple)))
    return np.ascontiguousarray(padded.reshape(-1, LANES, padded.shape[1]).swapaxes(1, 2))


def _fits_bfloat16(values: Floats) -> bool:
    """Whether bfloat16 holds all values without loss."""
    return not (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFF)).any()
