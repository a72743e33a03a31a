"""Places of quantized weights on a device whose kernels compute with them in their bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ModelError
from tenuto.kernels.native.formats import FORMATS, Blocks, Bytes, PanelFormat
from tenuto.kernels.native.grouped import BLOCK, Grouped
from tenuto.kernels.quantized import LANES, Numbers, Quantized, packed
from tenuto.models.weights import StoredWeight

_TYPES: dict[PanelFormat, tuple[Numbers, tuple[torch.dtype, torch.dtype | None]]] = {
    PanelFormat.Q4_0: (Numbers.INT4, (torch.float16, None)),
    PanelFormat.Q4_1: (Numbers.INT4, (torch.float16, torch.float16)),
    PanelFormat.INT4: (Numbers.INT4, (torch.float32, torch.float32)),
    PanelFormat.Q8_0: (Numbers.INT8, (torch.float16, None)),
    PanelFormat.INT8: (Numbers.INT8, (torch.float32, torch.float32)),
    PanelFormat.FP8: (Numbers.FP8, (torch.float32, None)),
    PanelFormat.MXFP4: (Numbers.FP4, (torch.uint8, None)),
}
"""Numbers, and the types of scales and minima, of the panels whose blocks our kernels for GPUs compute with."""

_MOST_SCALES = {Numbers.FP8: 128, Numbers.FP4: 127 + 64}
"""Scales of floats are less than this: kernels multiply them by 2 ** 120 or 2 ** 62."""
_TOGETHER = 2048
"""The number of outputs that are rearranged at a time."""


@dataclass(frozen=True, slots=True)
class QuantizedType:
    """The type of a quantized matrix with `inputs`; see `Quantized`. `scales`: the types of scales and minima."""

    numbers: Numbers
    inputs: int
    group: int
    scales: tuple[torch.dtype, torch.dtype | None]

    def empty(self, outputs: int, device: torch.device) -> Quantized:
        """Allocates a matrix."""
        groups = -(-self.inputs // self.group)
        words = torch.empty((outputs, -(-self.inputs // self.numbers.chunk), LANES), dtype=torch.int32, device=device)
        scales, minima = (
            torch.empty((groups, outputs), dtype=dtype, device=device) if dtype is not None else None
            for dtype in self.scales
        )
        assert scales is not None
        return Quantized(self.numbers, self.inputs, self.group, words, scales, minima)


def type_of(kinds: Sequence[Kind | Grouped | None], inputs: int) -> QuantizedType | None:
    """Returns the type of one matrix for weights of `kinds` that are stacked. None if they have to be decoded, because
    they differ, or because our kernels do not know their type; `None` stands for weights that are not stored."""
    kind, *others = kinds
    if kind is None or any(other != kind for other in others) or inputs % BLOCK:
        return None
    target = kind.conversion(inputs).format if isinstance(kind, Grouped) else _format(kind)
    if target not in _TYPES:
        return None
    group = min(kind.group, inputs) if isinstance(kind, Grouped) else BLOCK
    numbers, scales = _TYPES[target]
    return QuantizedType(numbers, inputs, group, scales)


def _format(kind: Kind) -> PanelFormat | None:
    return FORMATS[kind].format if kind in FORMATS else None


@dataclass(frozen=True, slots=True)
class QuantizedPlace:
    """The place of a weight in a matrix: `count` outputs from `first` on."""

    matrix: Quantized
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.matrix.inputs

    def fill(self, weight: StoredWeight) -> None:
        """Copies a weight of the type and shape that the place was made for. Raises `ModelError` for scales of floats
        with which a weight could not be a float32 on the way."""
        rows, own = weight.read(), self.matrix
        for begin in range(0, self.count, _TOGETHER):
            blocks = _split(rows[begin : begin + _TOGETHER], weight.kind, own.inputs)
            part = slice(self.first + begin, self.first + begin + len(blocks.quants))
            quants = _moved(blocks.quants, own.words)
            if own.numbers.bits == 4:
                quants = torch.cat((quants & 15, quants >> 4), dim=-1)
            own.words[part] = packed(quants.flatten(1), own.numbers)
            most = _MOST_SCALES.get(own.numbers)
            if most is not None and not (np.abs(blocks.scales[0]) < most).all():
                raise ModelError(f"a matrix of {own.numbers.name} has stored scales that are not below {most}")
            own.scales[:, part] = _moved(blocks.scales[0], own.words).t()
            if own.minima is not None:
                own.minima[:, part] = _moved(blocks.scales[1], own.words).t()


def _split(rows: Bytes, kind: Kind | Grouped, inputs: int) -> Blocks:
    if isinstance(kind, Grouped):
        return kind.conversion(inputs).split(rows)
    return FORMATS[kind].split(rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1]))


def _moved(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], beside: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(beside.device)
