"""Fills memory with data that no sequence wrote."""

from collections.abc import Sequence

import numpy as np
import torch

from tenuto.exec.forward import Forward
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.parallel.forward import ParallelForward
from tenuto.exec.torch_forward import TorchForward

LARGE = 1e4


def spoil(forward: Forward, group: int, units: Sequence[int]) -> None:
    """Overwrites units of a prepared memory group: pages with large numbers, state slots with NaN."""
    chosen = list(units)
    if isinstance(forward, NativeForward):
        memory = forward.memory(group)
        if forward.spec.groups[group].paged:
            memory.view(np.uint16)[chosen] = torch.tensor(LARGE, dtype=torch.bfloat16).view(torch.uint16).item()
        else:
            memory.view(np.float32)[chosen] = np.nan
        return
    if isinstance(forward, ParallelForward):
        numbers = np.full(forward.spec.groups[group].bytes_per_unit // 4, LARGE, np.float32)
        if chosen:
            forward.write_units(group, np.array(chosen, np.int32), [numbers.view(np.uint8)] * len(chosen))
        return
    assert isinstance(forward, TorchForward)
    if group in forward.memories.pages:
        forward.memories.pages[group].units[0][:, :, chosen] = LARGE
    else:
        for part in forward.memories.states[group].parts:
            part[:, chosen] = torch.nan
