"""Weight formats of the native kernels, and how GGML's quantized blocks are converted to them.

Layout of GGML's blocks: `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]

_HALF, _FLOAT, _BYTE = (np.dtype(kind) for kind in (np.float16, np.float32, np.uint8))
_TOGETHER = 8
"""Number of blocks that share the unit of their codes."""


class PanelFormat(IntEnum):
    """A format of weights in panels (a panel is 16 outputs of a matrix); `weight_formats.h` has the layouts. Each is
    named after the GGML type whose weights it holds without loss; INT4, INT8 and FP8 hold those of safetensors files.

    `quant_bytes` is the size of the quants of a block of 32 weights of one output; it is 0 for floats that have no
    scale. `scales` are the arrays behind the blocks, in their order: the type, and the number of blocks that share an
    element. That of scales which are 0 is chosen for each matrix.
    """

    quant_bytes: int
    scales: tuple[tuple[np.dtype[Any], int], ...]

    def __new__(cls, value: int, quant_bytes: int = 0, *scales: tuple[np.dtype[Any], int]) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.quant_bytes = quant_bytes
        member.scales = scales
        return member

    Q4_0 = 0, 16, (_HALF, 0)
    Q4_1 = 1, 16, (_HALF, 0), (_HALF, 0)
    Q8_0 = 2, 32, (_HALF, 0)
    Q5_1 = 3, 20, (_HALF, 0), (_HALF, 0)
    BF16 = 4
    Q6_K = 5, 24, (_HALF, 0), (_HALF, 0)
    F32 = 6
    F16 = 7
    Q2_K = 8, 8, (_BYTE, 1), (_BYTE, 1), (_HALF, _TOGETHER), (_HALF, _TOGETHER)
    Q3_K = 9, 12, (_BYTE, 1), (_BYTE, 1), (_HALF, _TOGETHER)
    IQ4_NL = 10, 16, (_HALF, 0)
    IQ4_XS = 11, 16, (_BYTE, 1), (_HALF, _TOGETHER)
    MXFP4 = 12, 16, (_BYTE, 1)
    INT4 = 13, 16, (_FLOAT, 0), (_FLOAT, 0)
    INT8 = 14, 32, (_FLOAT, 0), (_FLOAT, 0)
    FP8 = 15, 32, (_FLOAT, 0)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The quantized weights of some rows in blocks of 32, after `Conversion.split`.

    `quants` is uint8 [rows, blocks, bytes]. `scales`, each [rows, any number], are the arrays behind a panel's blocks,
    in the order of `PanelFormat.scales`. A panel's vectors have `together` neighbouring bytes of each output.
    """

    quants: Bytes
    scales: tuple[npt.NDArray[Any], ...]
    together: int = 4


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of a GGML type to a panel format. `split` takes uint8 [rows, blocks, bytes of a block]."""

    format: PanelFormat
    split: Callable[[Bytes], Blocks]


def _without_minima(blocks: Bytes) -> Blocks:
    return Blocks(blocks[..., 2:], (_half(blocks, 0),))


def _q8_0(blocks: Bytes) -> Blocks:
    return Blocks(blocks[..., 2:] ^ np.uint8(0x80), (_half(blocks, 0),))


def _q4_1(blocks: Bytes) -> Blocks:
    return Blocks(blocks[..., 4:], (_half(blocks, 0), _half(blocks, 2)))


def _q5_0(blocks: Bytes) -> Blocks:
    quants, scales = np.concatenate((blocks[..., 6:], _fifths(blocks[..., 2:6])), axis=-1), _half(blocks, 0)
    return Blocks(quants, (scales, scales * np.float16(-16)))


def _q5_1(blocks: Bytes) -> Blocks:
    quants = np.concatenate((blocks[..., 8:], _fifths(blocks[..., 4:8])), axis=-1)
    return Blocks(quants, (_half(blocks, 0), _half(blocks, 2)))


def _fifths(bits: Bytes) -> Bytes:
    """Moves bit i of uint8 [..., 4], the fifth bit of weight i, to bit i // 4 of byte i % 4."""
    spread = np.unpackbits(bits, axis=-1, bitorder="little").reshape(*bits.shape[:-1], 8, 4)
    return np.packbits(spread, axis=-2, bitorder="little")[..., 0, :]


def _q4_k(blocks: Bytes) -> Blocks:
    return Blocks(_k_nibbles(blocks[..., 16:]), _k_scales(blocks))


def _q5_k(blocks: Bytes) -> Blocks:
    """Splits blocks as `_q4_k` does. The 32 bytes before the nibbles hold the weights' fifth bits: bit i of each
    byte belongs to block i of 32 weights."""
    fifths = _by_block(blocks[..., 16:48], 1)
    quants = np.concatenate((_k_nibbles(blocks[..., 48:]), fifths.reshape(len(blocks), -1, 4)), axis=-1)
    return Blocks(quants, _k_scales(blocks))


def _k_nibbles(pairs: Bytes) -> Bytes:
    """Rearranges nibbles. In K types 32 bytes hold two blocks of 32 weights: one in the low nibbles, one in the high
    ones. In panels each block has 16 bytes of its own."""
    halves = pairs.reshape(len(pairs), -1, 2, 16)
    first, second = halves[..., 0, :], halves[..., 1, :]
    quants = np.empty((*first.shape[:-1], 2, 16), np.uint8)
    quants[..., 0, :] = first & 0x0F | second << 4
    quants[..., 1, :] = first >> 4 | second & 0xF0
    return quants.reshape(len(pairs), -1, 16)


def _k_scales(blocks: Bytes) -> tuple[Halves, Halves]:
    """Returns scales and minima of the blocks of 32 weights in Q4_K and Q5_K: six bits each, times a float16 that eight
    blocks share."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    steps, depths = (_half(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    return _flat(steps * scales), _flat(-depths * minima)


def _q6_k(blocks: Bytes) -> Blocks:
    """Splits blocks of Q6_K: for each half of the 256 weights, 64 bytes of nibbles and 32 bytes with the two higher
    bits."""
    shape = blocks.shape[:-1]
    nibbles = _k_nibbles(blocks[..., :128]).reshape(*shape, 2, 2, 2, 16).swapaxes(-3, -2)
    quants = np.concatenate((nibbles.reshape(len(blocks), -1, 16), _k_crumbs(blocks[..., 128:192])), axis=-1)
    step = _half(blocks, 208).astype(np.float32)[..., None]
    scales = step * blocks[..., 192:208].view(np.int8)
    return Blocks(quants, (_flat(scales[..., ::2]), _flat(scales[..., 1::2])))


def _q2_k(blocks: Bytes) -> Blocks:
    """Splits blocks of Q2_K: 16 codes of scales and minima, two bits of each weight, and two units. Codes with the same
    place in two halves of a block of 32 go to different arrays."""
    codes = blocks[..., :16]
    return Blocks(_k_crumbs(blocks[..., 16:80]), (*_by_half(codes), _half(blocks, 80), _half(blocks, 82)))


def _tq2_0(blocks: Bytes) -> Blocks:
    """Makes blocks of Q2_K of ternary weights: 0, 1 and 2 stand for -1, 0 and 1 times a unit."""
    unit = _half(blocks, 64)
    codes = np.full((len(blocks), blocks.shape[1] * _TOGETHER), 0x11, np.uint8)
    return Blocks(_k_crumbs(blocks[..., :64]), (codes, codes, unit, unit))


def _q3_k(blocks: Bytes) -> Blocks:
    """Splits blocks of Q3_K: the third bits, laid out as the fifth ones of Q5_K, two lower bits of each weight, 16
    scales of six bits, and their unit."""
    thirds = _by_block(blocks[..., :32], 1).reshape(len(blocks), -1, 4)
    quants = np.concatenate((_k_crumbs(blocks[..., 32:96]), thirds), axis=-1)
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    lower = np.concatenate((low & 15, low >> 4), axis=-1)
    higher = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return Blocks(quants, (*_by_half((lower | higher << 4) + np.uint8(_ZERO - 32)), _half(blocks, 108)))


def _iq4_xs(blocks: Bytes) -> Blocks:
    """Splits blocks of IQ4_XS: a unit, the two higher and four lower bits of eight scales, and nibbles."""
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), axis=-1).reshape(*blocks.shape[:-1], _TOGETHER)
    codes = (low | high.astype(np.uint8) << 4) + np.uint8(_ZERO - 32)
    quants = blocks[..., 8:].reshape(len(blocks), -1, 16)
    return Blocks(quants, (codes.reshape(len(blocks), -1), _half(blocks, 0)))


def _mxfp4(blocks: Bytes) -> Blocks:
    return Blocks(blocks[..., 1:], (blocks[..., 0],))


_ZERO = 128
"""The code of a scale of 0."""


def _k_crumbs(data: Bytes) -> Bytes:
    """Rearranges two bits of each weight: of four blocks of 32 weights in 32 bytes, the first block's lowest. In panels
    each block has 8 bytes of its own."""
    halves = _by_block(data.reshape(*data.shape[:-1], -1, 2, 16), 2)  # [..., halves, blocks, 4]
    return halves.swapaxes(-3, -2).reshape(len(data), -1, 8)


def _by_half(codes: Bytes) -> tuple[Bytes, Bytes]:
    """Returns the codes of the first and of the second halves of blocks, each [rows, blocks]."""
    return codes[..., ::2].reshape(len(codes), -1), codes[..., 1::2].reshape(len(codes), -1)


def _by_block(data: Bytes, bits: int) -> Bytes:
    """Rearranges bits. Byte w of `data`, uint8 [..., weights], holds `bits` bits of weight w of several blocks, the
    first block's lowest. Returns uint8 [..., blocks, 4]: byte i holds those of weights i, 4 + i and so on, the first
    lowest."""
    quads, mask = data.view(np.uint32), np.uint32(0x01010101 * (2**bits - 1))
    shifts = np.arange(0, 8, bits, dtype=np.uint32)
    found = np.zeros((*quads.shape[:-1], len(shifts)), np.uint32)
    for j in range(quads.shape[-1]):
        found |= (quads[..., j, None] >> shifts & mask) << np.uint32(bits * j)
    return found[..., None].view(np.uint8)


def _half(blocks: Bytes, at: int) -> Halves:
    """Returns the float16 at bytes `at`, `at + 1` of each block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _flat(values: Floats | Halves) -> Halves:
    """Reshapes [rows, blocks, n] to [rows, blocks * n], and rounds to float16."""
    return values.reshape(len(values), -1).astype(np.float16)


FORMATS = {
    Kind.Q4_0: Conversion(PanelFormat.Q4_0, _without_minima),
    Kind.Q4_1: Conversion(PanelFormat.Q4_1, _q4_1),
    Kind.Q5_0: Conversion(PanelFormat.Q5_1, _q5_0),
    Kind.Q5_1: Conversion(PanelFormat.Q5_1, _q5_1),
    Kind.Q8_0: Conversion(PanelFormat.Q8_0, _q8_0),
    Kind.Q4_K: Conversion(PanelFormat.Q4_1, _q4_k),
    Kind.Q5_K: Conversion(PanelFormat.Q5_1, _q5_k),
    Kind.Q6_K: Conversion(PanelFormat.Q6_K, _q6_k),
    Kind.Q2_K: Conversion(PanelFormat.Q2_K, _q2_k),
    Kind.Q3_K: Conversion(PanelFormat.Q3_K, _q3_k),
    Kind.IQ4_NL: Conversion(PanelFormat.IQ4_NL, _without_minima),
    Kind.IQ4_XS: Conversion(PanelFormat.IQ4_XS, _iq4_xs),
    Kind.MXFP4: Conversion(PanelFormat.MXFP4, _mxfp4),
    Kind.TQ2_0: Conversion(PanelFormat.Q2_K, _tq2_0),
}
"""All quantized types of GGML that the kernels compute with. Weights do not change, except that scales and minima of
Q4_K, Q5_K and Q6_K are rounded to float16."""
