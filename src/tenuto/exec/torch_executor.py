"""Carries out plans with a PyTorch model, on any device PyTorch knows."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from tenuto.base.errors import ConfigError, InvariantError, StepFailed
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.plan import InputScores, Logprobs, Plan, StepResult, TableChanges
from tenuto.exec.row_options import RowOptions
from tenuto.kernels.paged import PagedAttention, PagedKV, ragged_arange
from tenuto.kernels.sampling import logprobs, sample
from tenuto.models.checkpoint import open_checkpoint
from tenuto.models.llama import Llama
from tenuto.models.store import ModelFiles

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchExecutor:
    """An `Executor` for models with one full-attention group.

    A step runs in one worker thread, so that the next can be planned while it computes; all that a step changes is
    written by that thread alone. The executor is not for use by several threads at once.
    """

    def __init__(self, model: Llama, page_size: int) -> None:
        c = model.config
        self.model = model
        token_bytes = c.layers * 2 * c.kv_heads * c.head_dim * model.dtype.itemsize
        self._spec = MemorySpec(page_size, (GroupSpec(Kind.FULL, page_size * token_bytes),))
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenuto-step")
        self._in_flight: deque[Future[StepResult]] = deque()

    @property
    def spec(self) -> MemorySpec:
        """One group of kind full; a unit is a page of keys and values of all layers."""
        return self._spec

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        """See `Executor.prepare`. Raises `ConfigError` if the device cannot hold so many pages."""
        (pages,) = units
        c, device = self.model.config, self.model.device
        try:
            self._kv = PagedKV(c.layers, pages, self._spec.page_size, c.kv_heads, c.head_dim, device, self.model.dtype)
        except RuntimeError as error:
            size = pages * self._spec.groups[0].bytes_per_unit
            raise ConfigError(f"{device} cannot hold {pages} pages, {size} bytes: {error}") from error
        self._table = torch.zeros((rows, 1), device=device, dtype=torch.int64)
        self._last_sampled = torch.zeros(rows, device=device, dtype=torch.int64)
        self._options = RowOptions(rows, c.vocab, device)

    def submit(self, plan: Plan) -> None:
        """See `Executor.submit`. Raises `InvariantError` if two steps are in flight."""
        if len(self._in_flight) > 1:
            raise InvariantError(f"step {plan.step} was submitted while two others are in flight")
        self._in_flight.append(self._worker.submit(self._step, plan))

    def collect(self) -> StepResult:
        """See `Executor.collect`. What a device or an allocator can cause is `StepFailed`; all else is our bug and
        comes out as it is. Raises `InvariantError` if no step is in flight."""
        if not self._in_flight:
            raise InvariantError("collect was called with no step in flight")
        try:
            return self._in_flight.popleft().result()
        except (NotImplementedError, RecursionError):  # runtime errors too, but no device's
            raise
        except (RuntimeError, MemoryError) as error:  # PyTorch's device and out-of-memory errors are runtime errors
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    def logits(self, plan: Plan) -> torch.Tensor:
        """Carry out `plan` but sample nothing: float32 [sum(plan.samples), vocab] on the device. For tests and
        measurements, with no step in flight."""
        return self._worker.submit(self._forward, plan).result()

    def close(self) -> None:
        """Wait for the step in flight and end the worker thread."""
        self._worker.shutdown()

    @torch.inference_mode()
    def _step(self, plan: Plan) -> StepResult:
        logits, scored = self._forward(plan), None
        if plan.scores is not None:
            sampled_from = len(logits) - len(plan.scores.offsets)
            scored = self._score(logits[sampled_from:], plan.scores)
            logits = logits[:sampled_from]
        tokens, sampled = self._sample(plan, logits)
        sampling = plan.samples > 0
        rows, last = plan.rows[sampling], np.cumsum(plan.samples)[sampling] - 1
        self._last_sampled[self._indices(rows)] = tokens[self._indices(last)]
        return StepResult(tokens.cpu().numpy().astype(np.int32), sampled, scored)

    @torch.inference_mode()
    def _forward(self, plan: Plan) -> torch.Tensor:
        """Apply the plan, compute its tokens, return the logits it samples from and then those it scores by."""
        self._apply(plan)
        c = self.model.config
        attention = PagedAttention(
            self._kv, self._table, plan.rows, plan.starts, plan.counts, group=c.heads // c.kv_heads
        )
        outputs = np.repeat(np.cumsum(plan.counts) - plan.samples, plan.samples) + ragged_arange(plan.samples)
        if plan.scores is not None:
            outputs = np.concatenate((outputs, plan.scores.offsets))
        return self.model.forward(self._tokens(plan), attention.positions, self._indices(outputs), attention)

    def _apply(self, plan: Plan) -> None:
        """What outlasts the step, even one that fails: page tables, copies, sampling options."""
        (tables,), (copies,) = plan.tables, plan.copies
        self._change(tables)
        self._kv.copy(copies.sources, copies.targets, copies.slots)
        for row, new in plan.sampling:
            self._options.start(row, new)

    def _change(self, changes: TableChanges) -> None:
        """Write new page-table entries, first widening the table if they lie beyond it."""
        if len(changes.rows) == 0:
            return
        rows, width = self._table.shape
        needed = int(changes.index.max()) + 1
        if needed > width:
            wider = self._table.new_zeros((rows, max(needed, 2 * width)))
            wider[:, :width] = self._table
            self._table = wider
        self._table[self._indices(changes.rows), self._indices(changes.index)] = self._indices(changes.pages)

    def _tokens(self, plan: Plan) -> torch.Tensor:
        """Input ids, int64 [tokens], with references to earlier samples resolved on the device."""
        tokens = self._indices(plan.tokens)
        unknown = np.flatnonzero(plan.tokens < 0)
        if len(unknown):
            rows = np.repeat(plan.rows, plan.counts)[unknown]
            tokens[self._indices(unknown)] = self._last_sampled[self._indices(rows)]
        return tokens

    def _sample(self, plan: Plan, logits: torch.Tensor) -> tuple[torch.Tensor, Logprobs | None]:
        """Tokens int64 [sum(plan.samples)], each drawn by its row's options and its own position, and how likely they
        were, if any row asks. May change `logits`."""
        options, sampled = self._options, None
        rows = np.repeat(plan.rows, plan.samples).astype(np.int64)
        positions = np.repeat(plan.starts + plan.counts - plan.samples, plan.samples) + ragged_arange(plan.samples) + 1
        if options.plain:
            return sample(logits, options.choice(rows, positions)), None
        wanted, most = options.wanted_logprobs(rows)
        places = self._indices(wanted)
        raw = logits.index_select(0, places) if len(wanted) else logits
        options.edit(logits, rows, positions)
        tokens = sample(logits, options.choice(rows, positions))
        options.counts.add(rows, tokens)
        if len(wanted):
            sampled = _logprobs(wanted, raw, tokens[places], most)
        return tokens, sampled

    def _score(self, logits: torch.Tensor, scores: InputScores) -> Logprobs:
        """How likely the targets of `scores` were by their logits, float32 [scores, vocab]."""
        return _logprobs(np.arange(len(logits)), logits, self._indices(scores.targets), scores.top)

    def _indices(self, values: np.ndarray[tuple[int], np.dtype[np.integer]]) -> torch.Tensor:
        """Host indices as int64 on the device."""
        return torch.from_numpy(values.astype(np.int64)).to(self.model.device)


def _logprobs(
    places: np.ndarray[tuple[int], np.dtype[np.integer]], logits: torch.Tensor, tokens: torch.Tensor, most: int
) -> Logprobs:
    """Log-probabilities of `tokens`, int64 [n], by `logits`, float32 [n, vocab], on the host."""
    chosen, ids, top = (part.cpu().numpy() for part in logprobs(logits, tokens, most))
    return Logprobs(places.astype(np.int32), chosen, ids.astype(np.int32), top)


def load_executor(files: ModelFiles, page_size: int, device: str = "cpu", dtype: str | None = None) -> TorchExecutor:
    """Read a model and make an executor for it, not yet prepared.

    `dtype` is one of `DTYPES`; None is float32 on a CPU and bfloat16 elsewhere. Raises `ModelError` for the files and
    `ConfigError` for the device or dtype.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used: {error}") from error
    name = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; allowed: {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(files)
    return TorchExecutor(Llama(checkpoint.config, checkpoint.weights(), place, DTYPES[name]), page_size)
