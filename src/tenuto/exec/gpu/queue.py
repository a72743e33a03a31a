"""The queue of a GPU's work: captured steps, and host memory that they address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

WARM_UP = 2
"""Number of times that work runs before it is captured, so that kernels are compiled and workspaces allocated."""


class Mark(Protocol):
    """A place in the queue, see `torch.cuda.Event`."""

    def record(self) -> None:
        """Moves the mark to the end of the queue."""

    def synchronize(self) -> None:
        """Waits until all work before the mark is done."""


class Queue(Protocol):
    """The work of one device in order. Work is queued without waiting for it."""

    def pinned(self, size: int) -> torch.Tensor:
        """Returns host memory, uint8 [size], that the device addresses."""

    def mark(self) -> Mark:
        """Returns a mark, not recorded yet."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures `work`, which reads and writes tensors at fixed addresses, and may run it before. Returns a function
        that queues it."""


class CudaQueue:
    """The `Queue` of a CUDA device's current stream. Captured work shares one pool of memory for what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def pinned(self, size: int) -> torch.Tensor:
        """See `Queue.pinned`."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        """See `Queue.mark`."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Queue.capture`. Other threads may use the device meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream(self._device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=beside, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay
