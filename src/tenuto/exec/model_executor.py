"""Carries out plans with a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tenuto.base.errors import InvariantError, StepFailed
from tenuto.base.groups import MemorySpec
from tenuto.base.plan import Bytes, CopyFailed, InputScores, Ints, Logprobs, Plan, StepResult, TokenMasks
from tenuto.exec.forward import Forward, Logits, Longs, Outputs, Singles
from tenuto.exec.row_options import RowOptions
from tenuto.kernels.ragged import ragged_arange
from tenuto.kernels.sampling import Masks

T = TypeVar("T")


class ModelExecutor:
    """An `Executor` that runs a model's forward pass and samples.

    A step runs in one worker thread, so that the next can be planned while it computes; all that a step changes is
    written by that thread alone. The executor is not for use by several threads at once.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenuto-step")
        self._in_flight: deque[Future[StepResult]] = deque()
        self._masks: deque[TokenMasks] = deque()  # of the steps in flight, and perhaps of earlier ones

    @property
    def spec(self) -> MemorySpec:
        """The memory groups of the model."""
        return self.forward.spec

    @property
    def layout(self) -> str:
        """See `Executor.layout`."""
        return self.forward.layout

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        """See `Executor.prepare`. Raises `ConfigError` if the device cannot hold so many units."""
        self.forward.prepare(units, rows)
        self._last_sampled = np.zeros(rows, np.int32)
        self._options = RowOptions(rows, self.forward.config.vocab)

    def submit(self, plan: Plan) -> None:
        """See `Executor.submit`. Raises `InvariantError` if two steps are in flight."""
        if len(self._in_flight) > 1:
            raise InvariantError(f"step {plan.step} was submitted while two others are in flight")
        while self._masks and self._masks[0].allowed.done():
            self._masks.popleft()
        self._masks += plan.masks
        self._in_flight.append(self._worker.submit(self._step, plan))

    def collect(self) -> StepResult:
        """See `Executor.collect`. What a device or an allocator can cause is `StepFailed`; all else is our bug and
        comes out as it is. Raises `InvariantError` if no step is in flight."""
        if not self._in_flight:
            raise InvariantError("collect was called with no step in flight")
        try:
            return self._in_flight.popleft().result()
        except CancelledError:
            raise StepFailed("the executor was closed") from None
        except (NotImplementedError, RecursionError):  # runtime errors too, but no device's
            raise
        except (RuntimeError, MemoryError) as error:  # PyTorch's device and out-of-memory errors are runtime errors
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    def unit_bytes(self, group: int) -> int:
        """See `Copier.unit_bytes`."""
        return self.spec.groups[group].bytes_per_unit

    def read_units(self, group: int, units: Ints) -> Bytes:
        """See `Copier.read_units`. Steps in flight are waited for."""
        return self._copied(lambda: self.forward.read_units(group, units))

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """See `Copier.write_units`. Steps in flight are waited for."""
        self._copied(lambda: self.forward.write_units(group, units, data))

    def _copied(self, copy: Callable[[], T]) -> T:
        try:
            return self._worker.submit(copy).result()
        except (NotImplementedError, RecursionError):
            raise
        except (RuntimeError, MemoryError) as error:  # as of steps
            raise CopyFailed(f"{type(error).__name__}: {error}") from error

    def logits(self, plan: Plan) -> Singles:
        """Carry out `plan` but sample nothing: float32 [sum(plan.samples), vocab]. For tests and measurements, with no
        step in flight."""

        def compute() -> Singles:
            return self._compute(plan).logits.host()

        return self._worker.submit(compute).result()

    def close(self) -> None:
        """Wait for the step in flight, end the worker thread and release the model. Masks that the step still waits for
        do not come any more."""
        for masks in self._masks:
            masks.allowed.cancel()
        self._worker.shutdown()
        self.forward.close()

    def _step(self, plan: Plan) -> StepResult:
        computed, scored = self._compute(plan), None
        if plan.scores is not None:
            sampled_from = len(computed.logits) - len(plan.scores.offsets)
            scored = self._score(computed.logits[sampled_from:], plan.scores)
            best = computed.best[:sampled_from] if computed.best is not None else None
            computed = Outputs(computed.logits[:sampled_from], best)
        tokens, sampled = self._sample(plan, computed)
        sampling = plan.samples > 0
        rows, last = plan.rows[sampling], np.cumsum(plan.samples)[sampling] - 1
        self._last_sampled[rows] = tokens[last]
        return StepResult(tokens, sampled, scored)

    def _compute(self, plan: Plan) -> Outputs:
        """Apply the plan, compute its tokens, return the logits it samples from and then those it scores by. What
        outlasts the step comes first: it is applied even if the step fails."""
        self.forward.apply(plan)
        for row, new in plan.sampling:
            self._options.start(row, new)
        outputs = np.repeat(np.cumsum(plan.counts) - plan.samples, plan.samples) + ragged_arange(plan.samples)
        if plan.scores is not None:
            outputs = np.concatenate((outputs, plan.scores.offsets))
        return self.forward.run(plan, self._tokens(plan), outputs.astype(np.int32))

    def _tokens(self, plan: Plan) -> Ints:
        """Input ids, int32 [tokens], with references to earlier samples resolved."""
        unknown = np.flatnonzero(plan.tokens < 0)
        if not len(unknown):
            return plan.tokens
        tokens, rows = plan.tokens.copy(), np.repeat(plan.rows, plan.counts)
        tokens[unknown] = self._last_sampled[rows[unknown]]
        return tokens

    def _sample(self, plan: Plan, computed: Outputs) -> tuple[Ints, Logprobs | None]:
        """Tokens int32 [sum(plan.samples)], each drawn by its row's options and its own position, and how likely they
        were, if any row asks. May change the logits."""
        options, sampled, logits = self._options, None, computed.logits
        rows = np.repeat(plan.rows, plan.samples).astype(np.int64)
        positions = np.repeat(plan.starts + plan.counts - plan.samples, plan.samples) + ragged_arange(plan.samples) + 1
        masks = _masks(plan.masks)
        if options.plain and masks is None:
            if computed.best is not None and not options.draws(rows):
                return computed.best.astype(np.int32), None
            return logits.sample(options.choice(rows, positions)).astype(np.int32), None
        wanted, most = options.wanted_logprobs(rows)
        raw = logits.copy(wanted) if len(wanted) else logits
        options.edit(logits, rows, positions)
        tokens = logits.sample(options.choice(rows, positions), masks)
        options.counts.add(rows, tokens)
        if len(wanted):
            sampled = _logprobs(wanted, raw, tokens[wanted], most)
        return tokens.astype(np.int32), sampled

    def _score(self, logits: Logits, scores: InputScores) -> Logprobs:
        """How likely the targets of `scores` were by their logits, one each."""
        return _logprobs(np.arange(len(logits)), logits, scores.targets.astype(np.int64), scores.top)


def _masks(given: Sequence[TokenMasks]) -> Masks | None:
    """What rows of samples may be, once all of it is known."""
    known = [(masks.place, words) for masks in given if (words := masks.allowed.result()) is not None]
    if not known:
        return None
    rows = np.concatenate([place + np.arange(len(words)) for place, words in known])
    return Masks(rows, np.concatenate([words for _, words in known]))


def _logprobs(places: Longs, logits: Logits, tokens: Longs, most: int) -> Logprobs:
    """Log-probabilities of `tokens`, int64, one for each of the logits."""
    chosen, ids, top = logits.logprobs(tokens, most)
    return Logprobs(places.astype(np.int32), chosen, ids.astype(np.int32), top)
