"""Selects the scans of recurrent layers: on CUDA those of `mamba-ssm` and `flash-linear-attention` if they are
installed, otherwise plain PyTorch.

The calls follow the libraries' documented arguments and layouts, and tests compare them with the reference. They have
not been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch

from tenuto.kernels import gated_delta, mamba2
from tenuto.kernels.recurrent import SCAN_BLOCK

Mamba2Scan = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]
"""A function with the arguments and results of `mamba2.scan`."""
DeltaScan = Mamba2Scan
"""A function with the arguments and results of `gated_delta.scan`."""


def mamba2_scan(device: torch.device) -> Mamba2Scan:
    """Returns `mamba2.scan`, or its equivalent in `mamba-ssm`."""
    try:
        ops = [_optional(device, f"mamba_ssm.ops.triton.{name}") for name in ("ssd_combined", "selective_state_update")]
    except ImportError:
        return mamba2.scan
    return mamba2_by(ops[0].mamba_chunk_scan_combined, ops[1].selective_state_update)


def gated_delta_scan(device: torch.device, dtype: torch.dtype) -> DeltaScan:
    """Returns `gated_delta.scan`, or its equivalent in `flash-linear-attention`. `dtype` is that of the model."""
    try:
        ops = _optional(device, "fla.ops.gated_delta_rule")
    except ImportError:
        return gated_delta.scan
    return gated_delta_by(ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule, dtype)


def _optional(device: torch.device, module: str) -> ModuleType:
    """Imports a module of an optional library for CUDA. Raises `ImportError`."""
    if device.type != "cuda":
        raise ImportError(f"{module} is for CUDA; here: {device}")
    return import_module(module)


def mamba2_by(
    combined: Callable[..., tuple[torch.Tensor, torch.Tensor]], update: Callable[..., torch.Tensor]
) -> Mamba2Scan:
    """Returns `mamba2.scan` in terms of `mamba_chunk_scan_combined` and, for single tokens, `selective_state_update`,
    which changes its state in place."""

    def scan(
        x: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[1] > 1:
            given, after = combined(
                x, steps, rates, b, c, chunk_size=SCAN_BLOCK, initial_states=state, return_final_states=True
            )
            return given.float(), after.float()
        after = state.clone(memory_format=torch.contiguous_format)
        rows, heads, head_dim, size = state.shape
        given = update(
            after,
            x[:, 0],
            steps[:, 0, :, None].expand(rows, heads, head_dim),
            rates[:, None, None].expand(heads, head_dim, size),
            b[:, 0],
            c[:, 0],
        )
        return given[:, None].float(), after

    return scan


def gated_delta_by(
    chunk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    recurrent: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
) -> DeltaScan:
    """Returns `gated_delta.scan` in terms of two functions. `chunk_gated_delta_rule`, which does not accept float32,
    computes rows longer than a block in 16-bit models. `fused_recurrent_gated_delta_rule` computes all other rows,
    token by token."""

    def scan(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by_chunks = q.shape[1] > SCAN_BLOCK and dtype != torch.float32
        if by_chunks:
            q, k, v = (part.to(dtype) for part in (q, k, v))
        given, after = (chunk if by_chunks else recurrent)(
            q, k, v, g=decay, beta=beta, scale=1.0, initial_state=state, output_final_state=True
        )
        return given.float(), after.float()

    return scan
