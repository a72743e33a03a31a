"""Choosing tokens with the native kernels."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch

from tenuto.kernels.native.library import Draws, Library, SamplingOptions
from tenuto.kernels.sampling import Choice

_OPTIONS = np.dtype(SamplingOptions)


def sample(library: Library, forward: int, logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """As `kernels.sampling.sample`, in float32, by the threads of `forward`, an open forward pass of `library` whose
    vocabulary `logits` are for."""
    logits, tokens = logits.contiguous(), torch.empty(len(logits), dtype=torch.int32)
    options = np.empty(len(logits), _OPTIONS)
    for name in _OPTIONS.names or ():
        options[name] = getattr(choice, name)
    draws = Draws(len(logits), logits.data_ptr(), options.ctypes.data, tokens.data_ptr())
    library.sample(forward, byref(draws))
    return tokens.long()
