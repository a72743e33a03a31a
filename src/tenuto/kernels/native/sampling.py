"""Choosing tokens with the native kernels."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch

from tenuto.kernels.native.library import Draws, Library, SamplingOptions
from tenuto.kernels.sampling import Choice, Masks

_OPTIONS = np.dtype(SamplingOptions)


def sample(
    library: Library, forward: int, logits: torch.Tensor, choice: Choice, masks: Masks | None = None
) -> torch.Tensor:
    """As `kernels.sampling.sample` after `mask`, in float32, by the threads of `forward`, an open forward pass of
    `library` whose vocabulary `logits` are for. With masks it changes the logits if they are contiguous."""
    logits, tokens = logits.contiguous(), torch.empty(len(logits), dtype=torch.int32)
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
        logits.data_ptr(),
        options.ctypes.data,
        bits.ctypes.data if bits is not None else None,
        tokens.data_ptr(),
    )
    library.sample(forward, byref(draws))
    return tokens.long()
