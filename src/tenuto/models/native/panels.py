"""A model's weights where the native kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ModelError
from tenuto.kernels.native.blocks import FORMATS
from tenuto.kernels.native.library import Matrix, PanelKind
from tenuto.kernels.native.pack import LANES, Arena, pack_floats, pack_quantized
from tenuto.models.weights import Floats, Longs, StoredWeight, without_place, wrong_shape

_PANELS = {Kind.F32: PanelKind.FLOAT32, Kind.F16: PanelKind.FLOAT16, Kind.BF16: PanelKind.PAIRS}
_KINDS = {panels: kind for kind, panels in _PANELS.items()}
_AT_ONCE = 2**20  # weights that are decoded at once
_AS_STORED: Mapping[str, Longs] = MappingProxyType({})


def same_input(first: Matrix, second: Matrix) -> bool:
    """Whether an input made for one is right for the other: both are quantized, or of the same floats."""
    return first.kind == second.kind or not {first.kind, second.kind} & _KINDS.keys()


class Panels:
    """Weights, taken one by one by their names, each once. They stay as they are stored, or become bfloat16 with
    `plain`; matrices that are multiplied together and differ become float32. What is made lives as long as this."""

    def __init__(self, weights: Iterable[tuple[str, StoredWeight]], *, plain: bool) -> None:
        """`weights` as `ModelCheckpoint.weights` says. All methods raise `ModelError` for one that is missing or of a
        wrong shape."""
        self._weights = dict(weights)
        self._plain = plain
        self._arena = Arena()

    @property
    def size(self) -> int:
        """Memory taken, in bytes."""
        return self._arena.size

    def end(self) -> None:
        """Raise `ModelError` unless all weights have been taken."""
        if self._weights:
            raise without_place(min(self._weights))

    def require(self, name: str, *shape: int) -> None:
        """Raise `ModelError` unless there is a tensor of this shape, still to be taken."""
        stored = self._weights.get(name)
        if stored is None:
            raise ModelError(f"the model's files lack the tensor {name!r}")
        if stored.shape != shape:
            raise wrong_shape(name, stored.shape, shape)

    def vector(self, name: str, length: int) -> int:
        """The address of a vector of floats."""
        return self.floats(self.tensor(name, length))

    def tensor(self, name: str, *shape: int) -> Floats:
        """A tensor of floats, to be changed before it goes where the kernels read it."""
        return self._take(name, shape).decode()

    def look(self, name: str, *shape: int) -> Floats:
        """As `tensor`, but it is still to be taken."""
        self.require(name, *shape)
        return self._weights[name].decode()

    def floats(self, values: Floats) -> int:
        """The address of a copy of the values."""
        return self._arena.floats(values.reshape(-1))

    def matrices(
        self,
        outputs: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        order: Mapping[str, Longs] = _AS_STORED,
    ) -> list[Matrix]:
        """Matrices that are multiplied with the same input, so that all are quantized or all are of the same floats:
        `outputs` of each by its name, without `.weight`. With `bias` each has one. `order`, int64 [outputs], says in
        which order the outputs of some are wanted."""
        stored = [_ordered(self._take(f"{name}.weight", (n, inputs)), order.get(name)) for name, n in outputs.items()]
        made = [self._matrix(weight, kind) for weight, kind in zip(stored, self._kinds(stored), strict=True)]
        for (name, n), matrix in zip(outputs.items(), made, strict=True):
            if bias:
                matrix.bias = self.vector(f"{name}.bias", n)
        return made

    def _kinds(self, stored: list[StoredWeight]) -> list[PanelKind | None]:
        """How each is to be kept; `None` as it is."""
        kinds = {weight.kind for weight in stored}
        if self._plain:
            return [PanelKind.PAIRS] * len(stored)
        if kinds <= FORMATS.keys():
            return [None] * len(stored)
        one = _PANELS.get(stored[0].kind, PanelKind.FLOAT32) if len(kinds) == 1 else PanelKind.FLOAT32
        return [one] * len(stored)

    def _matrix(self, stored: StoredWeight, kind: PanelKind | None) -> Matrix:
        if kind is None:
            return pack_quantized(stored.read(), stored.kind, self._arena)
        outputs, inputs = stored.shape
        step = max(1, _AT_ONCE // (LANES * inputs)) * LANES
        return pack_floats(stored.words(_KINDS[kind], step), outputs, inputs, kind, self._arena)

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        self.require(name, *shape)
        return self._weights.pop(name)


def _ordered(stored: StoredWeight, order: Longs | None) -> StoredWeight:
    return stored if order is None else stored.select(order)
