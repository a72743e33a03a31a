"""The sums of several processes, by `torch.distributed`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from tenuto.exec.device import is_cpu
from tenuto.exec.torch_forward import TorchForward
from tenuto.exec.torch_load import Part, torch_forward
from tenuto.models.checkpoint import ModelCheckpoint, open_checkpoint, weights_of
from tenuto.models.shards import shard_weights

WAIT = timedelta(seconds=300)
"""Time for the other ranks to reach the same operation."""


class GroupRanks:
    """The `Ranks` of processes on this machine: gloo adds up on the CPU, NCCL on CUDA."""

    def __init__(self, rank: int, size: int, meeting: str, device: str) -> None:
        """`meeting`: the path of a file, not there yet, by which the processes find each other."""
        self.rank, self.size = rank, size
        self._meeting, self._device = meeting, device
        self._group: Any = None

    def connect(self) -> None:
        """Waits for all other ranks. Raises `RuntimeError` if they do not come."""
        c10d: Any = distributed  # its types are incomplete
        store = c10d.FileStore(self._meeting, self.size)
        store.set_timeout(WAIT)
        if is_cpu(self._device):
            options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001 - the only way to choose an address
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
            options._timeout = WAIT  # noqa: SLF001
            self._group = c10d.ProcessGroupGloo(store, self.rank, self.size, options)
        else:
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = WAIT  # noqa: SLF001
            torch.cuda.set_device(self._device)
            self._group = c10d.ProcessGroupNCCL(store, self.rank, self.size, options)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.sum`."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.join`."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=1)


def part_forward(part: Part, threads: int, checkpoint: ModelCheckpoint | None, ranks: GroupRanks) -> TorchForward:
    """Builds the forward pass of this rank's part; `part.config` is that of one rank. On a CPU it computes with
    `threads` threads. `checkpoint`: that of the model, by default opened here. Raises `ModelError`."""
    if is_cpu(part.device):
        torch.set_num_threads(threads)
    opened = checkpoint or open_checkpoint(part.files)
    return torch_forward(part, shard_weights(weights_of(opened, part.config), ranks.rank, ranks.size), ranks)
