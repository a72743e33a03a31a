"""Multiplication by a weight matrix."""

from __future__ import annotations

import torch
from torch.nn import functional

_FEW_ROWS = 64
"""Up to this number of rows MKL's float32 product is faster with the weights on the left, because it does not have to
repack them: twice as fast with 16 rows, as fast with 2, slower from about 128 (measured with 2 cores of an AVX-512
Xeon, torch 2.13)."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies `x` [rows, inputs] by the transpose of `weight` [outputs, inputs], and adds `bias` [outputs]. Returns
    [rows, outputs], contiguous. A batch of decodes, with few rows, spends most of its time here."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not 1 < len(x) <= _FEW_ROWS:
        return functional.linear(x, weight, bias)
    product = (weight @ x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)
