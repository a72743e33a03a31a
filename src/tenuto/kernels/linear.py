"""Multiplication by a weight matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch.nn import functional

from tenuto.kernels.fused import compiles
from tenuto.kernels.quantized import Quantized

Matrix = torch.Tensor | Quantized
"""A matrix of weights; quantized ones need our own kernels."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of different types that the same inputs are multiplied by. Their outputs follow one another."""

    parts: tuple[Matrix, ...]


Weight = Matrix | Stack
"""What inputs are multiplied by."""

_FEW_ROWS = 64
"""Up to this number of rows MKL's float32 product is faster with the weights on the left, because it does not have to
repack them: twice as fast with 16 rows, as fast with 2, slower from about 128 (measured with 2 cores of an AVX-512
Xeon, torch 2.13)."""


_FEW_ROWS_GPU, _FEW_OUTPUTS = 16, 5120
"""Up to these numbers of rows and outputs our own kernel is faster on a GPU: cuBLAS divides the inputs among programs,
whose results a second kernel adds up. With 4,096 inputs and outputs it takes 13.7 us, ours 11.4; with 28,672 outputs 55
and 63 (an H200, bfloat16, PyTorch 2.11)."""


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies `x` [rows, inputs] by the transpose of `weight` [outputs, inputs], and adds `bias` [outputs]. Returns
    [rows, outputs], contiguous. A batch of decodes, with few rows, spends most of its time here."""
    if isinstance(weight, Stack):
        sizes = [len(part) for part in weight.parts]
        biases = torch.split(bias, sizes) if bias is not None else [None] * len(sizes)
        return torch.cat([linear(x, part, own) for part, own in zip(weight.parts, biases, strict=True)], dim=1)
    if isinstance(weight, Quantized):
        found: torch.Tensor = import_module("tenuto.kernels.gpu.quantized").linear(x, weight, bias)
        return found
    if x.is_cuda and len(x) <= _FEW_ROWS_GPU and len(weight) <= _FEW_OUTPUTS and x.element_size() == 2:
        return _few_rows(x.device)(x, weight, bias)
    if x.device.type != "cpu" or x.dtype != torch.float32 or not 1 < len(x) <= _FEW_ROWS:
        return functional.linear(x, weight, bias)
    product = (weight @ x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)


@functools.cache
def _few_rows(
    device: torch.device,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Returns our own kernel for few rows on a GPU, or PyTorch's if it cannot be compiled."""
    if not compiles(device):
        return functional.linear
    own: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    own = import_module("tenuto.kernels.gpu.linear").linear
    return own
