"""Matrices of quantized weights on a device, in the bits in which they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

LANES = 32
"""The number of words of a chunk."""


class Numbers(Enum):
    """The numbers of a quantized matrix: unsigned integers of 4 or 8 bits, or E2M1 (arXiv:2310.10537) or E4M3
    (arXiv:2209.05433) floats."""

    INT4 = "int4"
    FP4 = "fp4"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def bits(self) -> int:
        return 4 if self in (Numbers.INT4, Numbers.FP4) else 8

    @property
    def chunk(self) -> int:
        """The number of inputs of a chunk."""
        return LANES * 32 // self.bits


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [outputs, inputs] in which `group` neighbouring inputs of an output, 16 or a multiple of `LANES`, share
    a scale; the last group may have fewer. A weight is its number times the group's scale, plus the group's minimum, if
    its numbers are integers.

    `words`, int32 [outputs, chunks, LANES]: number i of a chunk has bits `bits * (i // LANES)` and up of word `i %
    LANES`, so that what one shift of all words yields are neighbours. Numbers after the last input are 0. `scales`
    are float16 or float32 [groups, outputs], and so are `minima`. Without minima integers are signed: a minimum is the
    scale times -8 or -128. Scales of E2M1 are E8M0, uint8: the exponent of a power of two, plus 127.
    """

    numbers: Numbers
    inputs: int
    group: int
    words: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.words)

    @property
    def bytes(self) -> int:
        """The size of all parts."""
        parts = [self.words, self.scales, *([self.minima] if self.minima is not None else [])]
        return sum(part.numel() * part.element_size() for part in parts)


def packed(values: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """Returns the words of numbers, uint8 [outputs, inputs]; see `Quantized`."""
    outputs, inputs = values.shape
    padded = torch.nn.functional.pad(values, (0, -inputs % numbers.chunk))
    parts = padded.view(outputs, -1, 32 // numbers.bits, LANES)
    words = torch.zeros((outputs, parts.shape[1], LANES), dtype=torch.int32, device=values.device)
    for place in range(parts.shape[2]):
        words |= parts[:, :, place].to(torch.int32) << numbers.bits * place
    return words
