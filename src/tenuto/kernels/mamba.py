"""The recurrence of Mamba in plain PyTorch: the selective scan of Gu and Dao, arXiv:2312.00752, section 3."""

from __future__ import annotations

import torch

from tenuto.kernels.recurrent import SCAN_BLOCK


def scan(
    x: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, the state `h` of each channel becomes `exp(step * rate) * h + step * x * b` and gives `h c`.

    All float32: `x` and `steps` [rows, length, channels], steps at least 0; `rates` [channels, size], at most 0; `b`
    and `c` [rows, length, size]; `state` [rows, channels, size]. Returns what the channels give, as `x`, and the state
    after the last token.
    """
    given = torch.empty_like(x)
    for first in range(0, x.shape[1], SCAN_BLOCK):  # which bounds the memory that this takes
        block = slice(first, first + SCAN_BLOCK)
        kept = (steps[:, block, :, None] * rates).exp_()
        entering = (steps[:, block] * x[:, block])[..., None] * b[:, block, None]
        states = torch.empty_like(kept)
        for i in range(kept.shape[1]):
            state = kept[:, i] * state + entering[:, i]
            states[:, i] = state
        given[:, block] = torch.einsum("rtcn,rtn->rtc", states, c[:, block])
    return given, state
