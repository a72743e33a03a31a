"""Places of quantized weights on a device whose kernels compute with them in their bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ModelError
from tenuto.kernels.native.formats import FORMATS, Conversion
from tenuto.kernels.native.grouped import BLOCK, Grouped
from tenuto.kernels.quantized import LANES, Numbers, Quantized, packed
from tenuto.models.quantized_numbers import FORMS, Form
from tenuto.models.weights import StoredWeight

_MOST_SCALES = {Numbers.FP8: 128, Numbers.FP4: 127 + 64}
"""Scales of floats are less than this: kernels multiply them by 2 ** 120 or 2 ** 62."""
_TOGETHER = 2048
"""The number of outputs that are rearranged at a time."""


@dataclass(frozen=True, slots=True)
class QuantizedType:
    """The type of a quantized matrix with `inputs`, of which `group` share a scale; see `Quantized`."""

    form: Form
    inputs: int
    group: int

    def empty(self, outputs: int, device: torch.device) -> Quantized:
        """Allocates a matrix."""
        numbers, groups = self.form.numbers, -(-self.inputs // self.group)
        words = torch.empty((outputs, -(-self.inputs // numbers.chunk), LANES), dtype=torch.int32, device=device)
        scales = torch.empty((groups, outputs), dtype=self.form.scales, device=device)
        minima = None if self.form.minima is None else torch.empty_like(scales, dtype=self.form.minima)
        return Quantized(numbers, self.inputs, self.group, words, scales, minima)


def type_of(kind: Kind | Grouped | None, inputs: int) -> QuantizedType | None:
    """Returns the type of a matrix of weights of a kind. None if they have to be decoded, because our kernels do not
    know it; `None` stands for weights that are not stored."""
    if kind is None or inputs % BLOCK or (conversion := _conversion(kind, inputs)) is None:
        return None
    form = FORMS[conversion.format]
    return QuantizedType(form, inputs, min(kind.group, inputs) if isinstance(kind, Grouped) else form.group)


def _conversion(kind: Kind | Grouped, inputs: int) -> Conversion | None:
    """Returns the conversion of rows, uint8 [rows, bytes], if the type is quantized."""
    if isinstance(kind, Grouped):
        return kind.conversion(inputs)
    if kind not in FORMATS:
        return None
    own, (_, size) = FORMATS[kind], GGML_QUANT_SIZES[kind]
    return Conversion(own.format, lambda rows: own.split(rows.reshape(len(rows), -1, size)))


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
        conversion = _conversion(weight.kind, own.inputs)
        assert conversion is not None
        form, most = FORMS[conversion.format], _MOST_SCALES.get(own.numbers)
        for begin in range(0, self.count, _TOGETHER):
            blocks = conversion.split(rows[begin : begin + _TOGETHER])
            part = slice(self.first + begin, self.first + begin + len(blocks.quants))
            own.words[part] = packed(form.unpack(_moved(blocks.quants, own.words)).flatten(1), own.numbers)
            scales, *minima = form.scaling([_moved(array, own.words) for array in blocks.scales])
            if most is not None and not (scales.abs() < most).all():
                raise ModelError(f"a matrix of {own.numbers.name} has stored scales that are not below {most}")
            own.scales[:, part] = scales.t()
            if own.minima is not None:
                own.minima[:, part] = minima[0].t()


def _moved(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], beside: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(beside.device)
