"""Packs a model's weights into panels: 16 outputs of a matrix interleaved, as the native kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ModelError
from tenuto.kernels.native.formats import FORMATS, PanelFormat
from tenuto.kernels.native.grouped import BLOCK, Grouped
from tenuto.kernels.native.library import Matrix
from tenuto.kernels.native.pack import LANES, Arena, pack_blocks, pack_floats, pack_quantized
from tenuto.kernels.native.shared_memory import WeightMemory
from tenuto.models.weights import Floats, Longs, StoredWeight, same_order, without_place, wrong_shape

_PANELS: dict[Kind | Grouped, PanelFormat] = {
    Kind.F32: PanelFormat.F32,
    Kind.F16: PanelFormat.F16,
    Kind.BF16: PanelFormat.BF16,
}
_KINDS = {PanelFormat[kind.name]: kind for kind in (Kind.F32, Kind.F16, Kind.BF16)}
_FLOATS = {*_KINDS, PanelFormat.FP8}
_AT_ONCE = 2**20  # number of weights decoded at a time
_AS_STORED: Mapping[str, Longs] = MappingProxyType({})


def same_input(first: Matrix, second: Matrix) -> bool:
    """Whether one form of the input serves both matrices: both are quantized, or both have the same type of floats."""
    return first.format == second.format or not {first.format, second.format} & _FLOATS


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of a matrix's columns and rows, int64, as numbers of inputs and of outputs; `None` if as they are."""

    inputs: Longs | None
    outputs: Longs | None


class Panels:
    """A model's weights, and their packed copies, which live as long as this object. Each weight is taken by name,
    once. Matrices keep their stored type, or with `plain` become bfloat16. But matrices that are multiplied by the same
    input become float32 unless all are quantized or all have one type of floats."""

    def __init__(
        self, weights: Iterable[tuple[str, StoredWeight]], *, plain: bool, memory: WeightMemory | None = None
    ) -> None:
        """`weights` are those of `ModelCheckpoint.weights`. `memory`: see `Arena`. All methods raise `ModelError` if a
        weight is missing or of a wrong shape."""
        self._weights = dict(weights)
        self._plain = plain
        self._arena = Arena(memory)
        self.names: dict[int, str] = {}
        """The names of matrices, without `.weight`, by the address of their packed data."""
        self.orders: dict[str, Orders] = {}
        """The orders of matrices, by their names, that are not packed as they are."""

    @property
    def size(self) -> int:
        """The size of the packed weights, in bytes."""
        return self._arena.size

    def end(self) -> None:
        """Raises `ModelError` unless all weights have been taken."""
        if self._weights:
            raise without_place(min(self._weights))

    def require(self, name: str, *shape: int) -> None:
        """Raises `ModelError` unless there is a tensor of this shape that has not been taken."""
        stored = self._weights.get(name)
        if stored is None:
            raise ModelError(f"the model's files lack the tensor {name!r}")
        if stored.shape != shape:
            raise wrong_shape(name, stored.shape, shape)

    def vector(self, name: str, length: int) -> int:
        """Takes a vector, and returns the address of its floats."""
        return self.floats(self.tensor(name, length))

    def tensor(self, name: str, *shape: int) -> Floats:
        """Takes a tensor and returns its elements, for changes before `floats` packs them."""
        return self._take(name, shape).decode()

    def look(self, name: str, *shape: int) -> Floats:
        """Returns a tensor as floats without taking it."""
        self.require(name, *shape)
        return self._weights[name].decode()

    def floats(self, values: Floats) -> int:
        """Copies values into packed memory, and returns the address of the copy."""
        return self._arena.floats(values.reshape(-1))

    def matrices(
        self,
        outputs: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        order: Mapping[str, Longs] = _AS_STORED,
        any_order: bool = False,
    ) -> list[Matrix]:
        """Takes and packs matrices that are multiplied by the same input, and their biases with `bias`. `outputs` maps
        their names, without `.weight`, to their numbers of outputs. `order`, int64 [outputs], maps the names of those
        whose outputs are rearranged to indices of stored outputs. `any_order`: whether the input can have another
        order, that of `input_order`; else matrices with one are decoded, and so are those whose orders differ."""
        stored = [_ordered(self._take(f"{name}.weight", (n, inputs)), order.get(name)) for name, n in outputs.items()]
        kinds = self._kinds(stored, any_order=any_order)
        made = [self._matrix(weight, kind) for weight, kind in zip(stored, kinds, strict=True)]
        self.names |= {matrix.data: name for name, matrix in zip(outputs, made, strict=True)}
        for name, weight, kind in zip(outputs, stored, kinds, strict=True):
            columns, rows = weight.order if kind is None else None, order.get(name)
            if columns is not None or rows is not None:
                self.orders[name] = Orders(columns, rows)
        for (name, n), matrix in zip(outputs.items(), made, strict=True):
            if bias:
                matrix.bias = self.vector(f"{name}.bias", n)
        return made

    def input_order(self, matrix: Matrix) -> Longs | None:
        """Returns the order of a matrix's columns, int64 [inputs]; `None` if it is that of inputs."""
        orders = self.orders.get(self.names[matrix.data])
        return orders.inputs if orders is not None else None

    def indices(self, order: Longs | None) -> int | None:
        """Copies an order into packed memory as int32, and returns the address of the copy; `None` for `None`."""
        if order is None:
            return None
        room = self._arena.array((4 * len(order),))
        if not self._arena.filled:
            room.view(np.int32)[:] = order
        return room.ctypes.data

    def _kinds(self, stored: list[StoredWeight], *, any_order: bool) -> list[PanelFormat | None]:
        """Returns the format of each matrix; `None` if it stays quantized as stored."""
        kinds, order = {weight.kind for weight in stored}, stored[0].order if stored else None
        if self._plain:
            return [PanelFormat.BF16] * len(stored)
        readable = all(same_order(weight.order, order) for weight in stored) and (any_order or order is None)
        if readable and (all(map(_has_quants, kinds)) or all(map(_is_fp8, kinds))):
            return [None] * len(stored)
        one = _PANELS.get(stored[0].kind, PanelFormat.F32) if len(kinds) == 1 else PanelFormat.F32
        return [one] * len(stored)

    def _matrix(self, stored: StoredWeight, panel_format: PanelFormat | None) -> Matrix:
        outputs, inputs = stored.shape
        if panel_format is None:
            if not isinstance(stored.kind, Grouped):
                return pack_quantized(stored.read(), stored.kind, self._arena)
            group = stored.kind.group // BLOCK
            return pack_blocks(stored.read(), inputs, stored.kind.conversion(inputs), self._arena, group)
        step = max(1, _AT_ONCE // (LANES * inputs)) * LANES
        return pack_floats(stored.words(_KINDS[panel_format], step), outputs, inputs, panel_format, self._arena)

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        self.require(name, *shape)
        return self._weights.pop(name)


def _has_quants(kind: Kind | Grouped) -> bool:
    """Whether weights of this type are multiplied as whole numbers."""
    return kind in FORMATS or (isinstance(kind, Grouped) and not _is_fp8(kind))


def _is_fp8(kind: Kind | Grouped) -> bool:
    return isinstance(kind, Grouped) and kind.numbers is PanelFormat.FP8


def _ordered(stored: StoredWeight, order: Longs | None) -> StoredWeight:
    return stored if order is None else stored.select(order)
