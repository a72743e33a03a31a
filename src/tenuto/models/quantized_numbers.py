"""Numbers, scales and minima of quantized weights, as kernels for GPUs have them, made of the blocks of panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gguf.quants import IQ4_NL

from tenuto.kernels.native.formats import PanelFormat
from tenuto.kernels.native.grouped import BLOCK
from tenuto.kernels.quantized import Numbers

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """How `kernels.quantized.Quantized` has the weights of a panel format. `group`: the number of inputs that share a
    scale, unless the file says. `scales`, `minima`: element types, `None` where there are no minima.

    `unpack` returns numbers, uint8 [rows, blocks, 32], of quants, uint8 [rows, blocks, bytes]. `scaling` returns scales
    and minima, each [rows, groups], or scales alone, of the arrays behind the blocks, each [rows, any number].
    """

    numbers: Numbers
    unpack: Callable[[torch.Tensor], torch.Tensor]
    scales: torch.dtype = torch.float16
    minima: torch.dtype | None = None
    group: int = BLOCK
    scaling: Callable[[Tensors], Tensors] = tuple


def _bytes(quants: torch.Tensor) -> torch.Tensor:
    return quants


def _nibbles(quants: torch.Tensor) -> torch.Tensor:
    return torch.cat((quants & 15, quants >> 4), dim=-1)


def _spread(quants: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns numbers of 1 or 2 bits. Of each four bytes, byte i has those of weights i, 4 + i and so on, the first
    lowest."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=quants.device)
    quads = quants.view(*quants.shape[:-1], -1, 1, 4)
    found: torch.Tensor = (quads >> shifts[:, None] & 2**bits - 1).flatten(-3)
    return found


def _with_higher(quants: torch.Tensor, lower: int, bits: int, offset: int) -> torch.Tensor:
    """Returns numbers whose 2 or 4 `lower` bits come first, then their `bits` higher ones, plus `offset`."""
    size = BLOCK * lower // 8
    low = _nibbles(quants[..., :size]) if lower == 4 else _spread(quants[..., :size], lower)
    return (low | _spread(quants[..., size:], bits) << lower) + offset


def _looked_up(quants: torch.Tensor) -> torch.Tensor:
    """Returns values of IQ4's code book, plus 128."""
    book = torch.tensor(IQ4_NL.kvalues, device=quants.device) + 128
    return book.to(torch.uint8)[_nibbles(quants).long()]


def _in_turn(arrays: Tensors) -> torch.Tensor:
    """Returns what belongs to equal parts of blocks, in the order of inputs; an array has that of one part of each."""
    return torch.stack(tuple(arrays), dim=-1).flatten(1)


def _of_parts(arrays: Tensors) -> Tensors:
    return (_in_turn(arrays),)


def _scaled(codes: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Multiplies codes by the units that several neighbours share."""
    return codes.float() * units.float().repeat_interleave(codes.shape[1] // units.shape[1], dim=1)


def _of_codes(arrays: Tensors) -> Tensors:
    """Scales are a unit times a code, which is stored with an offset of 128."""
    *codes, units = arrays
    return (_scaled(_in_turn(codes).float() - 128, units),)


def _of_paired_codes(arrays: Tensors) -> Tensors:
    """Scales are a unit times the lower four bits of a code, and minima minus another one times the higher four."""
    *codes, units, depths = arrays
    code = _in_turn(codes)
    return _scaled(code & 15, units), -_scaled(code >> 4, depths)


_FIVE_BITS = partial(_with_higher, lower=4, bits=1, offset=0)
_SIX_BITS = partial(_with_higher, lower=4, bits=2, offset=128 - 32)
_TWO_BITS = partial(_spread, bits=2)
_THREE_BITS = partial(_with_higher, lower=2, bits=1, offset=8 - 4)
FORMS = {
    PanelFormat.Q4_0: Form(Numbers.INT4, _nibbles),
    PanelFormat.Q4_1: Form(Numbers.INT4, _nibbles, minima=torch.float16),
    PanelFormat.Q5_1: Form(Numbers.INT8, _FIVE_BITS, minima=torch.float16),
    PanelFormat.Q8_0: Form(Numbers.INT8, _bytes),
    PanelFormat.Q2_K: Form(Numbers.INT4, _TWO_BITS, minima=torch.float16, group=16, scaling=_of_paired_codes),
    PanelFormat.Q3_K: Form(Numbers.INT4, _THREE_BITS, group=16, scaling=_of_codes),
    PanelFormat.Q6_K: Form(Numbers.INT8, _SIX_BITS, group=16, scaling=_of_parts),
    PanelFormat.IQ4_NL: Form(Numbers.INT8, _looked_up),
    PanelFormat.IQ4_XS: Form(Numbers.INT8, _looked_up, scaling=_of_codes),
    PanelFormat.MXFP4: Form(Numbers.FP4, _nibbles, torch.uint8),
    PanelFormat.INT4: Form(Numbers.INT4, _nibbles, torch.float32, torch.float32),
    PanelFormat.INT8: Form(Numbers.INT8, _bytes, torch.float32, torch.float32),
    PanelFormat.FP8: Form(Numbers.FP8, _bytes, torch.float32),
}
"""Forms of the panels whose blocks our kernels for GPUs compute with."""
