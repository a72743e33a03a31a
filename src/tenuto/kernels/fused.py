"""Kernels of our own for parts of layers on a GPU, each of which does the work of several of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch


@dataclass(frozen=True, slots=True)
class Fused:
    """`rms_norm(x, weight, epsilon, groups)` does what `models.block.Norm` does. `add_rms_norm(x, branch, scale,
    weight, epsilon)` does what its `added` does for one group, and `activate(activation, projected, gate_scale)` what
    `models.block.activate` does. The others are those of `kernels.gpu.experts` and `kernels.gpu.recurrent`, which
    describe them."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, int], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    gated_norm: Callable[..., torch.Tensor]
    activate: Callable[[str, torch.Tensor, float], torch.Tensor]
    mix_experts: Callable[..., torch.Tensor]
    convolve_step: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_delta_step: Callable[..., torch.Tensor]
    mamba2_step: Callable[..., torch.Tensor]
    mamba_step: Callable[..., torch.Tensor]


def compiles(device: torch.device) -> bool:
    """Whether our kernels can be compiled for `device`: a CUDA device of compute capability 8.0 or newer, if Triton is
    installed."""
    return (
        device.type == "cuda" and find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )
