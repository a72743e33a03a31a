"""Shared state and helpers for making the operations of a model."""

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
    """Builds operations from a model's layers, and keeps the memory that they point to alive: weights in `panels`,
    structures in `kept`."""

    def __init__(
        self, config: ModelConfig, panels: Panels, groups: tuple[LayerGroup, ...], key_scales: Mapping[int, Floats]
    ) -> None:
        """`key_scales` are those of `KeyScales.scales`."""
        self.config = config
        self.panels = panels
        self.kept: list[object] = []
        self.places = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        """The index of each mixer's memory group, and the mixer's index within the group."""
        self.key_scales = key_scales
        self._ropes: dict[Rope, int] = {}
        self._norms: dict[str, int] = {}

    def norm(self, kind: OpKind, name: str, consumer: Matrix, **more: Any) -> Op:
        """Returns the operation that normalises the residual stream, in the form that products with `consumer` read.
        Parallel mixers share the weights of one norm."""
        if name not in self._norms:
            self._norms[name] = self.panels.vector(f"{name}.weight", self.config.hidden)
        read = self.read_by(consumer)
        return op(kind, epsilon=self.config.norm_eps, norm=self._norms[name], **read, **more)

    def read_by(self, consumer: Matrix) -> dict[str, Any]:
        """Returns the fields of an operation whose result products with `consumer` read."""
        return {"consumer": consumer.format, "order": self.panels.indices(self.panels.input_order(consumer))}

    def add(self, matrix: Matrix, *, apart: bool, column: int = -1, scale: float = 1.0) -> Op:
        """Returns the operation that adds `matrix` times a block's output, times `scale`, to the residual stream, or
        with `apart` to a buffer for `post`. Column `column` of the last PROJECT gates the output, unless -1."""
        scale *= 1.0 if apart else self.config.residual_scale
        return op(OpKind.ADD, first=matrix, apart=apart, column=column, scale=scale)

    def post(self, name: str | None) -> Op:
        """Returns the operation that adds the outputs that `add` put `apart` to the residual stream, normalised by the
        norm `name` if given."""
        c = self.config
        weights = self.panels.vector(f"{name}.weight", c.hidden) if name else None
        return op(OpKind.POST, epsilon=c.norm_eps, norm=weights, scale=c.residual_scale)

    def rope(self, rope: Rope | None) -> int:
        """Returns the index of a rope in `ropes`, or -1 for `None`."""
        return -1 if rope is None else self._ropes.setdefault(rope, len(self._ropes))

    def ropes(self) -> ctypes.Array[library.Rope]:
        """Returns all ropes that `rope` was asked for."""
        made = [
            library.Rope(rope.rotated // 2, rope.magnitude, self.panels.floats(rope.frequencies()))
            for rope in self._ropes
        ]
        return (library.Rope * len(made))(*made)

    def pointed(self, structure: ctypes.Structure) -> Any:
        """Keeps a structure, and returns a pointer to it."""
        self.kept.append(structure)
        return ctypes.pointer(structure)

    def listed(self, matrices: list[Matrix]) -> Any:
        """Keeps matrices, and returns a pointer to the first of them."""
        array = (Matrix * len(matrices))(*matrices)
        self.kept.append(array)
        return array


def op(kind: OpKind, **fields: Any) -> Op:
    """Returns an operation; `interface.h` describes the fields."""
    return Op(kind=kind, **({"column": -1, "scale": 1.0, "gate_scale": 1.0} | fields))


def group_of(group: LayerGroup) -> library.Group:
    """Returns a memory group for the kernels."""
    shape, layers = group.shape, len(group.layers)
    if isinstance(shape, PageShape):
        return library.Group(
            layers=layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            kv_type=shape.kv_type.number,
        )
    (convolved, kept), recurrent = (part.shape for part in shape.parts)
    return library.Group(
        layers=layers,
        conv_tokens=kept,
        conv_channels=convolved,
        state_floats=math.prod(recurrent),
        input_floats=shape.inputs,
    )
