"""Which scans recurrent layers compute with: on CUDA those of the field's libraries where they are installed, else
plain PyTorch.

The calls follow the libraries' documented arguments and layouts, and tests check them against the reference. They have
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
"""As `mamba2.scan`."""
DeltaScan = Mamba2Scan
"""As `gated_delta.scan`."""


def mamba2_scan(device: torch.device) -> Mamba2Scan:
    """`mamba2.scan`, or the same by `mamba-ssm`."""
    try:
        ops = [_optional(device, f"mamba_ssm.ops.triton.{name}") for name in ("ssd_combined", "selective_state_update")]
    except ImportError:
        return mamba2.scan
    return mamba2_by(ops[0].mamba_chunk_scan_combined, ops[1].selective_state_update)


def gated_delta_scan(device: torch.device, dtype: torch.dtype) -> DeltaScan:
    """`gated_delta.scan`, or the same by `flash-linear-attention`. `dtype`: of the model."""
    try:
        ops = _optional(device, "fla.ops.gated_delta_rule")
    except ImportError:
        return gated_delta.scan
    return gated_delta_by(ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule, dtype)


def _optional(device: torch.device, module: str) -> ModuleType:
    """A module of a library for CUDA, which no package of ours asks for. Raises `ImportError`."""
    if device.type != "cuda":
        raise ImportError(f"{module} is for CUDA; here: {device}")
    return import_module(module)


def mamba2_by(
    combined: Callable[..., tuple[torch.Tensor, torch.Tensor]], update: Callable[..., torch.Tensor]
) -> Mamba2Scan:
    """`mamba2.scan` by `mamba_chunk_scan_combined` and, for single tokens, `selective_state_update`, which changes the
    state that it is given."""

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
    """`gated_delta.scan` by `chunk_gated_delta_rule`, which takes no float32, for what is longer than a block in a
    model of 16 bits, and for all else token by token by `fused_recurrent_gated_delta_rule`."""

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
