"""Samples tokens with the native kernels, and computes log-probabilities."""

from __future__ import annotations

from ctypes import byref

import numpy as np

from tenuto.base.sampling import LEAST_LOGPROB
from tenuto.kernels.native.library import Draws, Library, SamplingOptions
from tenuto.kernels.sampling import Choice, Longs, Masks, Singles

_OPTIONS = np.dtype(SamplingOptions)
_ROWS = 8
"""The number of rows whose log-probabilities are computed together, so that intermediate arrays stay small."""


def sample(library: Library, forward: int, logits: Singles, choice: Choice, masks: Masks | None = None) -> Longs:
    """Does what `kernels.torch_sampling.mask` and `sample` do, in float32, with the threads of `forward`, an open
    forward pass of `library` with the same vocabulary. Masks overwrite `logits`, unless they are not contiguous."""
    logits, tokens = np.ascontiguousarray(logits), np.empty(len(logits), np.int32)
    options = np.empty(len(logits), _OPTIONS)
    for name in _OPTIONS.names or ():
        options[name] = getattr(choice, name)
    bits, width, words = None, 0, np.zeros(0, np.uint32)
    if masks is not None:
        words, width = np.ascontiguousarray(masks.words), masks.words.shape[1]
        bits = np.zeros(len(logits), np.uintp)
        bits[masks.rows] = words.ctypes.data + np.arange(len(words), dtype=np.uintp) * np.uintp(words.strides[0])
    draws = Draws(
        len(logits),
        width,
        logits.ctypes.data,
        options.ctypes.data,
        bits.ctypes.data if bits is not None else None,
        tokens.ctypes.data,
    )
    library.sample(forward, byref(draws))
    return tokens.astype(np.int64)


def score(logits: Singles, tokens: Longs, most: int) -> tuple[Singles, Longs, Singles]:
    """Does what `kernels.torch_sampling.score` does."""
    pieces = [slice(first, first + _ROWS) for first in range(0, max(1, len(logits)), _ROWS)]
    chosen, ids, top = zip(*(_score(logits[piece], tokens[piece], most) for piece in pieces), strict=True)
    return np.concatenate(chosen), np.concatenate(ids), np.concatenate(top)


def _score(logits: Singles, tokens: Longs, most: int) -> tuple[Singles, Longs, Singles]:
    rows = np.arange(len(logits))[:, None]
    with np.errstate(all="ignore"):  # logits may be anything
        highest = logits.max(axis=1, keepdims=True)
        total = highest + np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
        chosen = _clamped(logits[rows, tokens[:, None]] - total)[:, 0]
        if not most:
            return chosen, np.zeros((len(logits), 0), np.int64), np.zeros((len(logits), 0), np.float32)
        ranked = np.where(np.isnan(logits), np.inf, logits)  # as PyTorch ranks NaN
        first = max(0, logits.shape[1] - most)
        likeliest = np.argpartition(ranked, first, axis=1)[:, first:]
        order = np.argsort(-ranked[rows, likeliest], axis=1, kind="stable")
        ids = np.take_along_axis(likeliest, order, axis=1)
        return chosen, ids, _clamped(logits[rows, ids] - total)


def _clamped(values: Singles) -> Singles:
    return np.nan_to_num(values, nan=LEAST_LOGPROB).clip(LEAST_LOGPROB, 0.0)
