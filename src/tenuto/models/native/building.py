"""What the operations of a model have in common while they are made."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

from tenuto.kernels.native import library
from tenuto.kernels.native.library import Matrix, Op, OpKind
from tenuto.models.config import ModelConfig
from tenuto.models.groups import LayerGroup, PageShape
from tenuto.models.native.panels import Panels
from tenuto.models.rope import Rope
from tenuto.models.weights import Floats


class Building:
    """Makes operations and what they point to, which lives as long as `panels` and `kept`."""

    def __init__(
        self, config: ModelConfig, panels: Panels, groups: tuple[LayerGroup, ...], key_scales: Mapping[int, Floats]
    ) -> None:
        """`key_scales`: as `KeyScales.scales`."""
        self.config = config
        self.panels = panels
        self.kept: list[object] = []
        self.places = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        """The group of every mixer, and its number in it."""
        self.key_scales = key_scales
        self._ropes: dict[Rope, int] = {}
        self._norms: dict[str, int] = {}

    def norm(self, kind: OpKind, name: str, reader: Matrix, **more: Any) -> Op:
        """A normalisation of the residual stream, for products with matrices such as `reader`. Mixers side by side have
        the same one."""
        if name not in self._norms:
            self._norms[name] = self.panels.vector(f"{name}.weight", self.config.hidden)
        return op(kind, reader=reader.kind, epsilon=self.config.norm_eps, norm=self._norms[name], **more)

    def add(self, matrix: Matrix, *, apart: bool, column: int = -1, scale: float = 1.0) -> Op:
        """What a layer gives times `scale`, added to the residual stream, or put `apart`, from where `post` takes
        it."""
        scale *= 1.0 if apart else self.config.residual_scale
        return op(OpKind.ADD, first=matrix, apart=apart, column=column, scale=scale)

    def post(self, name: str | None) -> Op:
        """What was put apart, added to the residual stream: normalised, unless that norm's name is `None`."""
        c = self.config
        weights = self.panels.vector(f"{name}.weight", c.hidden) if name else None
        return op(OpKind.POST, epsilon=c.norm_eps, norm=weights, scale=c.residual_scale)

    def rope(self, rope: Rope | None) -> int:
        """The number of a rope, -1 for none."""
        return -1 if rope is None else self._ropes.setdefault(rope, len(self._ropes))

    def ropes(self) -> ctypes.Array[library.Rope]:
        """All ropes, by their numbers."""
        made = [
            library.Rope(rope.rotated // 2, rope.magnitude, self.panels.floats(rope.frequencies()))
            for rope in self._ropes
        ]
        return (library.Rope * len(made))(*made)

    def pointed(self, structure: ctypes.Structure) -> Any:
        """A pointer to a structure that is kept."""
        self.kept.append(structure)
        return ctypes.pointer(structure)

    def listed(self, matrices: list[Matrix]) -> Any:
        """A pointer to the first of as many matrices, which are kept."""
        array = (Matrix * len(matrices))(*matrices)
        self.kept.append(array)
        return array


def op(kind: OpKind, **fields: Any) -> Op:
    """An operation; see `interface.h`."""
    return Op(kind=kind, **({"column": -1, "scale": 1.0, "gate_scale": 1.0} | fields))


def group_of(group: LayerGroup) -> library.Group:
    """A memory group as the kernels know it."""
    shape, layers = group.shape, len(group.layers)
    if isinstance(shape, PageShape):
        return library.Group(
            layers=layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            in_bytes=shape.in_bytes,
        )
    (convolved, kept), recurrent = (part.shape for part in shape.parts)
    return library.Group(layers=layers, kept=kept, convolved=convolved, recurrent=math.prod(recurrent))
