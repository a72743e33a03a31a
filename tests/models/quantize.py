"""Quantizes as GGML does: with the `gguf` package where it can, and by plain rounding for the K types, which it only
decodes. Block layout: `ggml-common.h`."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind


def quantize(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Quantizes float32 [rows, columns] to uint8 [rows, bytes per row]."""
    if kind not in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return gguf.quants.quantize(values, kind)
    made = _q6_k(values) if kind is Kind.Q6_K else _with_minima(values, 15 if kind is Kind.Q4_K else 31)
    return made.reshape(len(values), -1)


def _with_minima(values: np.ndarray, highest: int) -> np.ndarray:
    blocks = values.reshape(-1, 8, 32)
    depth = np.maximum(-blocks.min(axis=2), 0)
    scale = (blocks.max(axis=2) + depth) / highest
    d, scales = _by_63(scale)
    d_min, depths = _by_63(depth)
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
    blocks = values.reshape(-1, 16, 16)
    furthest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)[..., 0]
    scale = furthest / -32
    d = (np.abs(scale).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scales = _divided(scale, d)
    quants = (_divided(blocks, (d * scales)[..., None]).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 2, 2, 32)
    low = (quants[:, :, 0] & 15 | (quants[:, :, 1] & 15) << 4).reshape(len(blocks), -1)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (quants.reshape(-1, 2, 4, 32) >> 4 << shifts).sum(axis=2, dtype=np.uint8).reshape(len(blocks), -1)
    return np.concatenate((low, high, scales.astype(np.int8).view(np.uint8), _bytes(d)), axis=1)


def _by_63(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Writes [blocks, 8] as multiples, at most 63, of a float16 unit; returns the unit and the multiples."""
    unit = (values.max(axis=1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    return unit, _divided(values, unit).clip(0, 63)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Divides and rounds to the nearest whole number; 0 where `by` is 0."""
    by = np.broadcast_to(by, values.shape)
    return np.rint(np.divide(values, by, out=np.zeros_like(values), where=by != 0))


def _bytes(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float16).view(np.uint8)
