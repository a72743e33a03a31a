"""Executors of models with random weights, and rows that compute on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import torch

from bench.random_models import attention, model
from tenuto.base.plan import (
    PREVIOUS_SAMPLE,
    Ints,
    PageCopies,
    Plan,
    RowSampling,
    StateMoves,
    TableChanges,
    TokenMasks,
    Words,
)
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.gpu.queue import CudaQueue, Queue
from tenuto.exec.model_executor import ModelExecutor, ReadAdapter
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.gpu.fused import FUSED
from tenuto.models.adapter import Adapter
from tenuto.models.config import Experts, GatedDelta, Mamba, Mamba2, ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.weights import StoredWeight

PAGE = 32
CUDA = torch.device("cuda")
HALF = torch.bfloat16
NOTHING = np.zeros(0, np.int32)


SMALL = {
    "full attention": model(4, 256, [attention(4, 2, 64)], 512, 1000, 4096),
    "windows, sinks, norms": model(4, 256, [attention(4, 1, 64, window=40, sinks=True, qk_norm=True)], 512, 1000, 4096),
    "gated delta net": model(4, 256, [GatedDelta(2, 4, 32, 32, 4), attention(4, 2, 64, gated=True)], 512, 1000, 4096),
    "experts": model(4, 256, [attention(4, 2, 64)], Experts(8, 3, 128, normalised=True), 1000, 4096),
}
"""Small models whose turns are compared."""
RECURRENT = {
    "Mamba-2": model(4, 256, [Mamba2(8, 64, 32, 2, 4, conv_bias=True, proj_bias=False)], 512, 1000, 4096),
    "Mamba": model(4, 256, [Mamba(512, 16, 16, 4, conv_bias=True, proj_bias=False)], 512, 1000, 4096),
}
"""More small models, for guesses."""


class Eager(GpuForward):
    """Queues the kernels of every step one by one."""

    def decode(self, *_: object) -> None:
        return None


def queue() -> Queue:
    """Returns a queue of the device."""
    return CudaQueue(CUDA)


class TimedQueue:
    """See `Queue`; notes the seconds that each launch of captured work takes."""

    def __init__(self, queue: Queue) -> None:
        self.pinned, self.mark, self._queue = queue.pinned, queue.mark, queue
        self.seconds: list[float] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Queue.capture`."""
        again = self._queue.capture(work)

        def timed() -> None:
            begin = time.perf_counter()
            again()
            self.seconds.append(time.perf_counter() - begin)

        return timed


class Rows:
    """Rows of one executor, each with its own pages and state slot, at the same position."""

    def __init__(
        self,
        executor: ModelExecutor,
        rows: int,
        context: int,
        sampling: Sampling | RowSampling = GREEDY,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Prepares the executor for rows of `context` tokens, all with the same options. The first has no adapter, and
        the others have the `adapters` in turn."""
        self.executor, self.rows, self.at = executor, rows, 0
        for slot, adapter in enumerate(adapters, start=1):
            executor.set_adapter(slot, ReadAdapter(adapter.digest, executor.forward.packer(adapter)))
        slots = [1 + row % len(adapters) if row else 0 for row in range(rows)] if adapters else []
        self._adapters = np.array(slots, np.int32) if any(slots) else None
        self._pages = -(-context // PAGE)
        paged = [group.paged for group in executor.spec.groups]
        executor.prepare(tuple(rows * self._pages if page else rows for page in paged), rows, overlap=1)
        self._paged, self._states = sum(paged), len(paged) - sum(paged)
        asked = sampling if isinstance(sampling, RowSampling) else RowSampling(sampling)
        self._sampling: tuple[tuple[int, RowSampling], ...] = tuple((i, asked) for i in range(rows))
        self._steps = 0
        self.allowed: Words | None = None
        """The tokens that every row may sample, uint32 [1, words], if not all."""

    def plan(self, tokens: Ints) -> Plan:
        """Returns the next step; `tokens` is int32 [rows, tokens of each]. Every row samples once."""
        rows, count = tokens.shape
        ids = np.arange(rows, dtype=np.int32)
        first, last = -(-self.at // PAGE), -(-(self.at + count) // PAGE)
        index = np.tile(np.arange(first, last, dtype=np.int32), rows)
        owners = np.repeat(ids, last - first)
        changes = TableChanges(owners, index, owners * self._pages + index)
        none = np.zeros(rows, np.int32)
        moves = StateMoves(ids if self.at else ids * 0 - 1, ids, none, none)
        sampling, self._sampling = self._sampling, ()
        plan = Plan(
            step=self._steps,
            rows=ids,
            starts=np.full(rows, self.at, np.int32),
            counts=np.full(rows, count, np.int32),
            tokens=tokens.reshape(-1),
            samples=np.ones(rows, np.int32),
            tables=(changes,) * self._paged,
            copies=(PageCopies(NOTHING, NOTHING, NOTHING),) * self._paged,
            states=(moves,) * self._states,
            sampling=sampling,
            adapters=self._adapters,
            masks=tuple(TokenMasks(row, _known(self.allowed)) for row in range(rows))
            if self.allowed is not None
            else (),
        )
        self._steps += 1
        self.at += count
        return plan

    def run(self, tokens: Ints) -> Ints:
        """Computes `tokens` and returns the sampled ones."""
        self.executor.submit(self.plan(tokens))
        return self.executor.collect().tokens

    def fill(self, context: int) -> None:
        """Gives all rows random keys and values for `context` tokens."""
        pages = np.arange(self.rows * self._pages, dtype=np.int32)
        table = TableChanges(pages // self._pages, pages % self._pages, pages)
        none = PageCopies(NOTHING, NOTHING, NOTHING)
        plan = Plan(0, *(NOTHING,) * 5, tables=(table,), copies=(none,), states=(), sampling=())
        forward = self.executor.forward
        assert isinstance(forward, TorchForward)
        forward.apply(plan)
        for group in forward.memories.pages.values():
            group.units[0].normal_(std=0.5)
        self.at = context

    def turns(self, prompts: Ints, steps: int, overlap: int = 1) -> Ints:
        """Computes prompts, int32 [rows, tokens], then `steps` decodes; returns the sampled tokens, [1 + steps,
        rows]."""
        first = self.run(prompts)
        return np.stack([first, *self.decode(first, steps, overlap)])

    def decode(self, tokens: Ints, steps: int, overlap: int = 1) -> list[Ints]:
        """Computes `steps` decodes from `tokens`, int32 [rows], on, and returns what each samples, int32 [rows]. With
        `overlap`, a step is submitted before the one before it has been collected."""
        found = []
        for step in range(steps):
            known = tokens if step == 0 or not overlap else np.full_like(tokens, PREVIOUS_SAMPLE)
            self.executor.submit(self.plan(known[:, None]))
            if step >= overlap:
                tokens = self.executor.collect().tokens
                found.append(tokens)
        return found + [self.executor.collect().tokens for _ in range(min(overlap, steps))]


def _known(allowed: Words) -> Future[Words | None]:
    found: Future[Words | None] = Future()
    found.set_result(allowed)
    return found


@contextmanager
def executor(
    config: ModelConfig,
    dtype: torch.dtype,
    kind: Callable[..., TorchForward],
    weights: Iterable[tuple[str, StoredWeight]] | None = None,
    own: Queue | None = None,
) -> Iterator[ModelExecutor]:
    """Yields an executor with `weights`, or else with random ones, always the same. Its queue is its `own`, or a new
    one."""
    torch.manual_seed(0)
    fused = None if kind is TorchForward else FUSED
    with torch.inference_mode():
        decoder = Decoder(config, weights, CUDA, dtype, fused)
    forward = kind(decoder, PAGE) if kind is TorchForward else kind(decoder, PAGE, own or queue())
    made = ModelExecutor(forward)
    try:
        yield made
    finally:
        made.close()
