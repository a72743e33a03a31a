"""Copies between the memory of a device and that of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from tenuto.base.plan import Bytes


class HostCopies(Protocol):
    """How a device's memory is copied."""

    def to_host(self, rows: torch.Tensor) -> Bytes:
        """A copy of uint8 [n, bytes] on the device, which steps in flight do not write."""
        ...

    def to_device(self, rows: Sequence[Bytes]) -> torch.Tensor:
        """Copies, each uint8 [bytes], as uint8 [n, bytes] on the device. Within `beside`."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """What is done in the block runs beside steps, and has been done at its end."""
        ...


class PlainCopies:
    """Of the CPU, or a device without streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, rows: torch.Tensor) -> Bytes:
        """See `HostCopies.to_host`."""
        copied: Bytes = rows.cpu().numpy()
        return copied

    def to_device(self, rows: Sequence[Bytes]) -> torch.Tensor:
        """See `HostCopies.to_device`."""
        return torch.from_numpy(np.stack(list(rows))).to(self._device)

    def beside(self) -> AbstractContextManager[None]:
        """See `HostCopies.beside`."""
        return nullcontext()


def pinned(shape: tuple[int, ...]) -> torch.Tensor:
    """Host memory, uint8, that the device copies from and to by itself."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


class CudaCopies:
    """Of a CUDA device. What comes to the host is in pinned memory, and stays there while it is parked; what goes back
    does so on a stream of its own. The thread that asks waits for an event, and no step does.

    `cuda` and `allocate` stand in for `torch.cuda` and `pinned` in tests.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        allocate: Callable[[tuple[int, ...]], torch.Tensor] = pinned,
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._allocate = allocate
        self._stream = cuda.Stream(device=device)

    def to_host(self, rows: torch.Tensor) -> Bytes:
        """See `HostCopies.to_host`. Behind the steps submitted so far."""
        host = self._allocate(tuple(rows.shape))
        host.copy_(rows, non_blocking=True)
        self._cuda.current_stream(self._device).record_event().synchronize()
        copied: Bytes = host.numpy()
        return copied

    def to_device(self, rows: Sequence[Bytes]) -> torch.Tensor:
        """See `HostCopies.to_device`. What is pinned is not copied in the host's memory first."""
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
            finally:  # nothing is written once this has been left, whatever happened
                self._stream.record_event().synchronize()


def copies_for(device: torch.device) -> HostCopies:
    """How this device's memory is copied."""
    return CudaCopies(device) if device.type == "cuda" else PlainCopies(device)
