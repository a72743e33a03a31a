"""Weight formats of the native kernels, and how GGML's quantized blocks are converted to them.

Layout of GGML's blocks: `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]


class PanelFormat(IntEnum):
    """A format of weights in panels (a panel is 16 outputs of a matrix); `weight_formats.h` has the layouts. Each is
    named after the GGML type whose weights it holds without loss.

    `quant_bytes` is the size of the quants of a block of 32 weights of one output, and `float16s` the number of its
    scales and minima; both are 0 for floats.
    """

    quant_bytes: int
    float16s: int

    def __new__(cls, value: int, quant_bytes: int = 0, float16s: int = 0) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.quant_bytes = quant_bytes
        member.float16s = float16s
        return member

    Q4_0 = 0, 16, 1
    Q4_1 = 1, 16, 2
    Q8_0 = 2, 32, 1
    Q5_1 = 3, 20, 2
    BF16 = 4
    Q6_K = 5, 24, 2
    F32 = 6
    F16 = 7


@dataclass(frozen=True, slots=True)
class Blocks:
    """The quantized weights of some rows in blocks of 32, after `Conversion.split`.

    `quants` is uint8 [rows, blocks, bytes], signed in `Q8_0`. `float16s`, each [rows, blocks], are the scales and then
    the minima of a block, in the order in which panels have them.
    """

    quants: Bytes
    float16s: tuple[Halves, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of a GGML type to a panel format. `split` takes uint8 [rows, blocks, bytes of a block]."""

    format: PanelFormat
    split: Callable[[Bytes], Blocks]


def _without_minima(blocks: Bytes) -> Blocks:
    return Blocks(blocks[..., 2:], (_half(blocks, 0),))


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
    high = _by_block(blocks[..., 128:192].reshape(*shape, 2, 2, 16), 2).swapaxes(-3, -2)
    quants = np.concatenate((nibbles.reshape(len(blocks), -1, 16), high.reshape(len(blocks), -1, 8)), axis=-1)
    step = _half(blocks, 208).astype(np.float32)[..., None]
    scales = step * blocks[..., 192:208].view(np.int8)
    return Blocks(quants, (_flat(scales[..., ::2]), _flat(scales[..., 1::2])))


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
    Kind.Q8_0: Conversion(PanelFormat.Q8_0, _without_minima),
    Kind.Q4_K: Conversion(PanelFormat.Q4_1, _q4_k),
    Kind.Q5_K: Conversion(PanelFormat.Q5_1, _q5_k),
    Kind.Q6_K: Conversion(PanelFormat.Q6_K, _q6_k),
}
"""All quantized types that the kernels compute with. Weights do not change, except that scales and minima of the K
types are rounded to float16."""
