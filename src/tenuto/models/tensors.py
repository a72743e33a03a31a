"""Conversion of stored weights to PyTorch tensors."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType as Kind

from tenuto.models.weights import StoredWeight

_DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


def tensor_of(weight: StoredWeight) -> torch.Tensor:
    """Returns a weight in its stored element type, or as float32 if it is quantized. Raises `ModelError` like
    `dequantize`."""
    if weight.kind in _DTYPES:
        return torch.from_numpy(weight.read().reshape(-1)).view(_DTYPES[weight.kind]).view(weight.shape)
    return torch.from_numpy(weight.decode())
