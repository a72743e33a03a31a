"""Quantizes as GGML does: with the `gguf` package where it can, and by plain rounding for the types that it only
decodes. Block layout: `ggml-common.h`."""

from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind


def quantize(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Quantizes float32 [rows, columns] to uint8 [rows, bytes per row]."""
    if kind not in OWN:
        return gguf.quants.quantize(values, kind)
    return OWN[kind](values).reshape(len(values), -1)


def _with_minima(values: np.ndarray, highest: int) -> np.ndarray:
    blocks = values.reshape(-1, 8, 32)
    depth = np.maximum(-blocks.min(axis=2), 0)
    scale = (blocks.max(axis=2) + depth) / highest
    d, scales = _by(63, scale)
    d_min, depths = _by(63, depth)
    exact = blocks + (d_min * depths)[..., None]
    quants = _divided(exact, (d * scales)[..., None]).clip(0, highest).astype(np.uint8)
    first, second = np.split(scales.astype(np.uint8), 2, axis=1)
    third, fourth = np.split(depths.astype(np.uint8), 2, axis=1)
    packed = (first | second >> 4 << 6, third | fourth >> 4 << 6, second & 15 | (fourth & 15) << 4)
    nibbles = quants & 15
    parts = [_bytes(d), _bytes(d_min), *packed]
    if highest == 31:
        parts.append((quants >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8))
    parts.append((nibbles[:, ::2] | nibbles[:, 1::2] << 4).reshape(len(blocks), -1))
    return np.concatenate(parts, axis=1)


def _q6_k(values: np.ndarray) -> np.ndarray:
    d, scales, found = _signed(values.reshape(-1, 16, 16), 32, 127)
    quants = found.reshape(-1, 2, 2, 2, 32)
    low = (quants[:, :, 0] & 15 | (quants[:, :, 1] & 15) << 4).reshape(len(found), -1)
    return np.concatenate((low, _crumbs(found >> 4), scales.astype(np.int8).view(np.uint8), _bytes(d)), axis=1)


def _by(most: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Writes [blocks, n] as multiples, at most `most`, of a float16 unit; returns the unit and the multiples."""
    unit = (values.max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return unit, _divided(values, unit).clip(0, most)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Divides and rounds to the nearest whole number; 0 where `by` is 0."""
    return np.rint(_quotient(values, by))


def _quotient(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Divides; 0 where `by` is 0."""
    by = np.broadcast_to(by, values.shape)
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _bytes(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float16).view(np.uint8)


def _q2_k(values: np.ndarray) -> np.ndarray:
    blocks = values.reshape(-1, 16, 16)
    depth = np.maximum(-blocks.min(axis=2), 0)
    d, scales = _by(15, (blocks.max(axis=2) + depth) / 3)
    d_min, depths = _by(15, depth)
    quants = _divided(blocks + (d_min * depths)[..., None], (d * scales)[..., None]).clip(0, 3).astype(np.uint8)
    codes = scales.astype(np.uint8) | depths.astype(np.uint8) << 4
    return np.concatenate((codes, _crumbs(quants), _bytes(d), _bytes(d_min)), axis=1)


def _q3_k(values: np.ndarray) -> np.ndarray:
    d, scales, quants = _signed(values.reshape(-1, 16, 16), 4, 31)
    thirds = (quants.reshape(-1, 8, 32) >> 2 << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    codes = (scales + 32).astype(np.uint8)
    low = codes[:, :8] & 15 | (codes[:, 8:] & 15) << 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (codes.reshape(-1, 4, 4) >> 4 << shifts).sum(axis=1, dtype=np.uint8)
    return np.concatenate((thirds, _crumbs(quants & 3), low, high, _bytes(d)), axis=1)


def _signed(blocks: np.ndarray, depth: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantizes blocks to -depth to depth - 1, with scales that are multiples, at most `most`, of a float16 unit.
    Returns units, multiples and the quants plus `depth`."""
    furthest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)[..., 0]
    scale = furthest / -depth
    d = (np.abs(scale).max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    scales = _divided(scale, d).clip(-most, most)
    quants = _divided(blocks, (d * scales)[..., None]).clip(-depth, depth - 1)
    return d, scales, (quants + depth).astype(np.uint8)


def _crumbs(quants: np.ndarray) -> np.ndarray:
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (quants.reshape(-1, 2, 4, 32) << shifts).sum(axis=2, dtype=np.uint8).reshape(len(quants), -1)


def _nearest(values: np.ndarray) -> np.ndarray:
    """Returns the nibbles of blocks [..., 32] whose nearest values of IQ4's code book they are, [..., 16]."""
    book = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    found = np.searchsorted((book[1:] + book[:-1]) / 2, values).astype(np.uint8)
    return found[..., :16] | found[..., 16:] << 4


def _iq4_nl(values: np.ndarray) -> np.ndarray:
    blocks = values.reshape(-1, 32)
    d = (np.abs(blocks).max(axis=1, keepdims=True) / 120).astype(np.float16).astype(np.float32)
    return np.concatenate((_bytes(d), _nearest(_quotient(blocks, d))), axis=1)


def _iq4_xs(values: np.ndarray) -> np.ndarray:
    blocks = values.reshape(-1, 8, 32)
    scale = np.abs(blocks).max(axis=2) / 120
    d = (scale.max(axis=1, keepdims=True) / 31).astype(np.float16).astype(np.float32)
    scales = _divided(scale, d).clip(0, 31)
    scales[:, ::3] *= -1  # both signs occur in files
    codes = (scales + 32).astype(np.uint16)
    high = (codes >> 4 << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1, keepdims=True, dtype=np.uint16)
    low = (codes & 15).astype(np.uint8)
    nibbles = _nearest(_quotient(blocks, (d * scales)[..., None])).reshape(len(blocks), -1)
    return np.concatenate((_bytes(d), high.view(np.uint8), low[:, ::2] | low[:, 1::2] << 4, nibbles), axis=1)


OWN: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: lambda values: _with_minima(values, 15),
    Kind.Q5_K: lambda values: _with_minima(values, 31),
    Kind.Q6_K: _q6_k,
    Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
}
"""Types that the package does not quantize."""
