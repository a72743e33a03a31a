"""The recurrence of Mamba in plain PyTorch: the selective scan of Gu and Dao, arXiv:2312.00752, section 3."""

from __future__ import annotations

import torch

from tenuto.kernels.recurrent import SCAN_BLOCK


def scan(
    x: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the recurrence over each row's tokens: the state `h` of each channel becomes `exp(step * rate) * h +
    step * x * b`, and the channel's output is `h c`.

    All arrays are float32. `x` and `steps`, at least 0, are [rows, length, channels]. `rates`, at most 0, are
    [channels, size]. `b` and `c` are [rows, length, size]. `state` is [rows, channels, size]. Returns the outputs, of
    the shape of `x`, and the state after the last token.
    """
    given = torch.empty_like(x)
    for first in range(0, x.shape[1], SCAN_BLOCK):  # blocks bound the memory of intermediate results
        block = slice(first, first + SCAN_BLOCK)
        kept = (steps[:, block, :, None] * rates).exp_()
        entering = (steps[:, block] * x[:, block])[..., None] * b[:, block, None]
        states = torch.empty_like(kept)
        for i in range(kept.shape[1]):
            state = kept[:, i] * state + entering[:, i]
            states[:, i] = state
        given[:, block] = torch.einsum("rtcn,rtn->rtc", states, c[:, block])
    return given, state
