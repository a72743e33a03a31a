"""What a device has to spare."""

from __future__ import annotations

import os

import torch

SHARE_OF_MACHINE = 0.25
SHARE_OF_DEVICE = 0.85


def spare_bytes(device: str) -> int:
    """Bytes that a server may take for model state, the weights being loaded: a share of the machine's memory, or of
    what is free on a CUDA device."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_DEVICE)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * SHARE_OF_MACHINE)
