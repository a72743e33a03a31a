"""Copies between device and host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from tenuto.base.plan import Bytes


class HostCopies:
    """Copies between the memory of a device, which may be the CPU, and the host, without streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, rows: torch.Tensor) -> Bytes:
        """Returns a host copy of `rows`, uint8 [n, bytes] on the device, which no step in flight may write."""
        copied: Bytes = rows.cpu().numpy()
        return copied

    def to_device(self, rows: Sequence[Bytes]) -> torch.Tensor:
        """Copies `rows`, each uint8 [bytes] on the host, to uint8 [n, bytes] on the device. Call it within `beside`."""
        return torch.from_numpy(np.stack(list(rows))).to(self._device)

    def beside(self) -> AbstractContextManager[None]:
        """Returns a context in which device operations run concurrently with steps; leaving it waits for them."""
        return nullcontext()


def pinned(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns pinned host memory, uint8, which a device can copy from and to directly."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


class CudaCopies(HostCopies):
    """Copies between the host and a CUDA device. Host copies are in pinned memory, also while they are parked. Copies
    to the device use a stream of their own, so that only the calling thread waits for them, not the steps.

    `cuda` and `allocate` replace `torch.cuda` and `pinned` in tests.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        allocate: Callable[[tuple[int, ...]], torch.Tensor] = pinned,
    ) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._allocate = allocate
        self._stream = cuda.Stream(device=device)

    def to_host(self, rows: torch.Tensor) -> Bytes:
        """See `HostCopies.to_host`. The copy runs after the steps submitted so far."""
        host = self._allocate(tuple(rows.shape))
        host.copy_(rows, non_blocking=True)
        self._cuda.current_stream(self._device).record_event().synchronize()
        copied: Bytes = host.numpy()
        return copied

    def to_device(self, rows: Sequence[Bytes]) -> torch.Tensor:
        """See `HostCopies.to_device`. Pinned rows are copied directly."""
        there = torch.empty((len(rows), rows[0].nbytes), dtype=torch.uint8, device=self._device)
        for row, data in zip(there, rows, strict=True):
            row.copy_(torch.from_numpy(data), non_blocking=True)
        return there

    @contextmanager
    def beside(self) -> Iterator[None]:
        """See `HostCopies.beside`."""
        with self._cuda.stream(self._stream):
            try:
                yield
            finally:  # also after an error, no write may happen once the block has been left
                self._stream.record_event().synchronize()


def copies_for(device: torch.device) -> HostCopies:
    """Returns the `HostCopies` for a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies(device)
