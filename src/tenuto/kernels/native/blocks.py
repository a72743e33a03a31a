"""GGML's quantized blocks as blocks of 32 weights, which panels hold. Layout of GGML's blocks: `ggml-common.h`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from tenuto.kernels.native.library import PanelKind

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of 32 weights along a row, as panels hold them; `matrix.h` says what weights they make.

    `quants` is uint8 [rows, blocks, bytes], signed for `BYTES`. `scales` and `second`, what panels have behind them,
    are [rows, blocks].
    """

    quants: Bytes
    scales: Halves
    second: Halves | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How blocks of a GGML type, uint8 [rows, blocks, bytes a block], are split for panels of `kind`."""

    kind: PanelKind
    split: Callable[[Bytes], Blocks]


def _without_minima(blocks: Bytes) -> Blocks:
    return Blocks(blocks[..., 2:], _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Blocks:
    return Blocks(blocks[..., 4:], _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Blocks:
    quants, scales = np.concatenate((blocks[..., 6:], _fifths(blocks[..., 2:6])), axis=-1), _half(blocks, 0)
    return Blocks(quants, scales, scales * np.float16(-16))


def _q5_1(blocks: Bytes) -> Blocks:
    quants = np.concatenate((blocks[..., 8:], _fifths(blocks[..., 4:8])), axis=-1)
    return Blocks(quants, _half(blocks, 0), _half(blocks, 2))


def _fifths(bits: Bytes) -> Bytes:
    """Bit i of uint8 [..., 4], for the i-th weight, as bit i // 4 of byte i % 4."""
    spread = np.unpackbits(bits, axis=-1, bitorder="little").reshape(*bits.shape[:-1], 8, 4)
    return np.packbits(spread, axis=-2, bitorder="little")[..., 0, :]


def _q4_k(blocks: Bytes) -> Blocks:
    return Blocks(_k_nibbles(blocks[..., 16:]), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Blocks:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i of each belongs to the i-th eighth."""
    fifths = _by_block(blocks[..., 16:48], 1)
    quants = np.concatenate((_k_nibbles(blocks[..., 48:]), fifths.reshape(len(blocks), -1, 4)), axis=-1)
    return Blocks(quants, *_k_scales(blocks))


def _k_nibbles(pairs: Bytes) -> Bytes:
    """Every 32 bytes are two blocks of 32 nibbles, the low ones and the high ones; here each gets 16 bytes."""
    halves = pairs.reshape(len(pairs), -1, 2, 16)
    first, second = halves[..., 0, :], halves[..., 1, :]
    quants = np.empty((*first.shape[:-1], 2, 16), np.uint8)
    quants[..., 0, :] = first & 0x0F | second << 4
    quants[..., 1, :] = first >> 4 | second & 0xF0
    return quants.reshape(len(pairs), -1, 16)


def _k_scales(blocks: Bytes) -> tuple[Halves, Halves]:
    """Scales and minima of Q4_K and Q5_K: six bits for each eighth of a block, times a float16 of the block."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    steps, depths = (_half(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    return _flat(steps * scales), _flat(-depths * minima)


def _q6_k(blocks: Bytes) -> Blocks:
    """Each half of a block is 64 bytes of nibbles, first the low ones, and has 32 bytes of higher bits."""
    shape = blocks.shape[:-1]
    nibbles = _k_nibbles(blocks[..., :128]).reshape(*shape, 2, 2, 2, 16).swapaxes(-3, -2)
    high = _by_block(blocks[..., 128:192].reshape(*shape, 2, 2, 16), 2).swapaxes(-3, -2)
    quants = np.concatenate((nibbles.reshape(len(blocks), -1, 16), high.reshape(len(blocks), -1, 8)), axis=-1)
    step = _half(blocks, 208).astype(np.float32)[..., None]
    scales = step * blocks[..., 192:208].view(np.int8)
    return Blocks(quants, _flat(scales[..., ::2]), _flat(scales[..., 1::2]))


def _by_block(data: Bytes, bits: int) -> Bytes:
    """`bits` bits for each weight of as many blocks as a byte has room for, uint8 [..., weights], block by block: uint8
    [..., blocks, 4], in byte i those of the weights i, 4 + i, ..., the lowest first."""
    quads, mask = data.view(np.uint32), np.uint32(0x01010101 * (2**bits - 1))
    shifts = np.arange(0, 8, bits, dtype=np.uint32)
    found = np.zeros((*quads.shape[:-1], len(shifts)), np.uint32)
    for j in range(quads.shape[-1]):
        found |= (quads[..., j, None] >> shifts & mask) << np.uint32(bits * j)
    return found[..., None].view(np.uint8)


def _half(blocks: Bytes, at: int) -> Halves:
    """The float16 at bytes `at`, `at + 1` of each block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _flat(values: Floats | Halves) -> Halves:
    """[rows, blocks, 8] as [rows, 8 blocks]."""
    return values.reshape(len(values), -1).astype(np.float16)


FORMATS = {
    Kind.Q4_0: BlockFormat(PanelKind.NIBBLES, _without_minima),
    Kind.Q4_1: BlockFormat(PanelKind.NIBBLES_MIN, _q4_1),
    Kind.Q5_0: BlockFormat(PanelKind.FIVES_MIN, _q5_0),
    Kind.Q5_1: BlockFormat(PanelKind.FIVES_MIN, _q5_1),
    Kind.Q8_0: BlockFormat(PanelKind.BYTES, _without_minima),
    Kind.Q4_K: BlockFormat(PanelKind.NIBBLES_MIN, _q4_k),
    Kind.Q5_K: BlockFormat(PanelKind.FIVES_MIN, _q5_k),
    Kind.Q6_K: BlockFormat(PanelKind.SIXES, _q6_k),
}
"""Weights stay what they were, except that scales and minima of the K types are rounded to float16."""
