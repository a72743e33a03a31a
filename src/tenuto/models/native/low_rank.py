"""Packs the changes of adapters for the native kernels; `interface.h` has their layout."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from tenuto.kernels.native import library
from tenuto.kernels.native.pack import BLOCK, LANES, Arena
from tenuto.models.adapter import Adapter
from tenuto.models.native.panels import Orders
from tenuto.models.native.program import NativeProgram
from tenuto.models.weights import Elements, Floats, bfloat16_bits

MATRICES = 3
"""Matrices of an operation."""


@dataclass(frozen=True, slots=True)
class PackedChange:
    """A low-rank change in packed memory, in the layout of `TenutoLowRank`. `down` and `up` are uint16 with the bits of
    bfloat16, or uint32 with those of float32."""

    rank: int
    scale: float
    down: Elements
    up: Elements

    @classmethod
    def packed(cls, rank: int, scale: float, down: Elements, up: Elements, arena: Arena) -> PackedChange:
        """Copies a change to the memory of `arena`."""
        return cls(rank, scale, _copied(down, arena), _copied(up, arena))

    def structure(self) -> library.LowRank:
        """Returns the change as the kernels take it."""
        narrow = self.up.dtype == np.uint16
        return library.LowRank(self.rank, narrow, self.scale, self.down.ctypes.data, self.up.ctypes.data)

    def rearranged(self, orders: Orders, arena: Arena) -> PackedChange:
        """Returns the change for a matrix that is packed in these orders."""
        down, up = self.down, self.up
        if orders.inputs is not None:  # any padding stays behind
            down = np.concatenate((down[:, orders.inputs], down[:, len(orders.inputs) :]), axis=1)
        if orders.outputs is not None:
            outputs = up.swapaxes(1, 2).reshape(-1, self.rank)
            rows = np.concatenate((outputs[orders.outputs], outputs[len(orders.outputs) :]))
            up = rows.reshape(-1, LANES, self.rank).swapaxes(1, 2)
        return PackedChange.packed(self.rank, self.scale, down, up, arena)


class PackedAdapter:
    """The changes of an adapter by the names of weights, in memory that lives as long as this object. They are bfloat16
    if that loses nothing, otherwise float32."""

    def __init__(self, adapter: Adapter) -> None:
        self._arena = Arena()
        self.changes: dict[str, PackedChange] = {}
        self.widest = 0
        """The highest rank, rounded up to lanes."""
        for name, change in adapter.changes.items():
            rank, narrow = len(change.down), _fits_bfloat16(change.down) and _fits_bfloat16(change.up)
            parts = _lanes(change.down, BLOCK), _lanes(change.up)
            down, up = (bfloat16_bits(part) if narrow else part.view(np.uint32) for part in parts)
            self.changes[name] = PackedChange.packed(rank, change.scale, down, up, self._arena)
            self.widest = max(self.widest, -(-rank // LANES) * LANES)


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """An adapter for the operations of one program: its table of changes, and the memory that the table points to."""

    packed: PackedAdapter
    arena: Arena
    table: ctypes.Array[library.LowRank]

    @classmethod
    def of(cls, packed: PackedAdapter, program: NativeProgram) -> PlacedAdapter:
        """Makes the table of a packed adapter for `program`."""
        arena, table = Arena(), (library.LowRank * (MATRICES * len(program.ops)))()
        for number, which, name in program.adaptable:
            if (change := packed.changes.get(name)) is not None:
                orders = program.orders.get(name)
                placed = change if orders is None else change.rearranged(orders, arena)
                table[MATRICES * number + which] = placed.structure()
        return cls(packed, arena, table)

    def structure(self) -> library.Adapter:
        """Returns the adapter as the kernels take it."""
        return library.Adapter(self.packed.widest, self.table)


def _lanes(matrix: Floats, multiple: int = 1) -> Floats:
    """Returns a matrix, [outputs, inputs], in panels of 16 outputs: [outputs / 16, inputs, 16]. Pads inputs with zeros
    to a multiple of `multiple`, and outputs to one of 16."""
    outputs, inputs = matrix.shape
    padded = np.pad(matrix, ((0, -outputs % LANES), (0, -inputs % multiple)))
    return np.ascontiguousarray(padded.reshape(-1, LANES, padded.shape[1]).swapaxes(1, 2))


def _copied(words: Elements, arena: Arena) -> Elements:
    place: Elements = arena.array((words.nbytes,)).view(words.dtype).reshape(words.shape)
    place[:] = words
    return place


def _fits_bfloat16(values: Floats) -> bool:
    """Whether bfloat16 holds all values without loss."""
    return not (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFF)).any()
