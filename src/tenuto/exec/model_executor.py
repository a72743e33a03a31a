"""The executor that carries out plans with a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import numpy as np

from tenuto.base.errors import ConfigError, InvariantError, StepFailed
from tenuto.base.plan import (
    AdapterWeights,
    Bytes,
    CopyFailed,
    Ints,
    Logprobs,
    MemoryPart,
    Plan,
    StepResult,
    TokenMasks,
    Weights,
    Words,
)
from tenuto.base.sampling import LEAST_LOGPROB
from tenuto.exec.device import trim
from tenuto.exec.forward import Forward
from tenuto.exec.logits import Logits, Longs, Outputs, Singles
from tenuto.exec.predictor import predict
from tenuto.exec.row_options import RowOptions
from tenuto.exec.samples import Samples, samples_of
from tenuto.kernels.ragged import ragged_arange
from tenuto.kernels.sampling import Masks
from tenuto.models.adapter import Adapter

T = TypeVar("T")


Loader = Callable[[str | None], Forward]
"""Reads the model's weights again, or, from a path, those of a model of the same shape; see `Executor.load`."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights read from `path` (None: those the executor started with), in an unprepared forward pass."""

    forward: Forward
    path: str | None

    def close(self) -> None:
        """Releases the weights."""
        self.forward.close()


AdapterReader = Callable[[str], Adapter]
"""Reads an adapter for the model; see `Executor.read_adapter`."""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter, packed by the forward pass."""

    digest: str
    packed: object


class ModelExecutor:
    """An `Executor` that runs a model's forward pass and samples. It is not thread-safe.

    With `overlap`, steps run in one worker thread, so that the next step can be planned meanwhile; no other thread
    writes the state that steps change. Without it, `collect` runs the step in the calling thread, because switching
    threads twice would take longer than planning.
    """

    def __init__(
        self, forward: Forward, loader: Loader | None = None, adapter_reader: AdapterReader | None = None
    ) -> None:
        """Without a `loader`, the weights cannot be read again; without an `adapter_reader`, there are no adapters."""
        self._forward: Forward | None = forward  # None while the weights are released
        self.spec, self.layout = forward.spec, forward.layout
        self.batch_invariant = forward.batch_invariant
        self.predicts = bool(forward.config.predictor)
        self.defaults = forward.defaults
        self._loader = loader
        self._adapter_reader = adapter_reader
        self._pack = forward.packer
        self._adapters: dict[int, ReadAdapter] = {}  # by slot
        self._path: str | None = None  # of the weights; None: those it started with
        self._units_released = False
        self._overlap = 0  # set by `prepare`
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenuto-step")
        self._in_flight: deque[Callable[[], Callable[[], StepResult]]] = deque()  # see `_step`
        self._unknown: Callable[[], None] | None = None  # waits for the last step, if it did not; sets `_last_sampled`
        self._masks: deque[TokenMasks] = deque()  # of the steps in flight, and perhaps of earlier ones

    @property
    def forward(self) -> Forward:
        """The forward pass. Raises `InvariantError` while the weights are released."""
        if self._forward is None:
            raise InvariantError("the weights are released and not yet restored")
        return self._forward

    def prepare(self, units: tuple[int, ...], rows: int, overlap: int = 1, lookahead: int = 0) -> None:
        """See `Executor.prepare`. Raises `ConfigError` if the device cannot hold so many units."""
        prepared = units, rows, lookahead + 1 if lookahead else 0
        self.forward.prepare(*prepared)
        self._prepared = prepared
        self._overlap, self._unknown = overlap, None
        self._last_sampled = np.zeros(rows, np.int32)
        self._options = RowOptions(rows, self.forward.edits(rows))

    # -- giving memory back

    def release(self, parts: Collection[MemoryPart]) -> None:
        """See `Executor.release`. Releasing the weights closes the forward pass, and with it the memory of units."""
        if self._in_flight:
            raise InvariantError("memory was released with a step in flight")
        if self._forward is not None:
            if "weights" in parts:
                self._forward.close()
                self._forward = None
            elif "kv_cache" in parts and not self._units_released:
                self._forward.release_units()
        self._units_released |= "kv_cache" in parts
        trim()

    def load(self, path: str | None) -> LoadedWeights:
        """See `Executor.load`."""
        if self._loader is None:
            raise ConfigError("this executor was built from weights in memory and cannot read them again")
        wanted = path if path is not None else self._path
        return LoadedWeights(self._loader(wanted), wanted)

    def restore(self, parts: Collection[MemoryPart], weights: Weights | None, kept: Sequence[Ints] = ()) -> None:
        """See `Executor.restore`. Units that stay are copied through host memory."""
        if self._in_flight:
            raise InvariantError("memory was restored with a step in flight")
        loaded = weights if isinstance(weights, LoadedWeights) else None
        before, after = self._forward, loaded.forward if loaded is not None else self._forward
        without = self._units_released and "kv_cache" not in parts
        if after is not None and not without and (after is not before or self._units_released):
            self._allocate(before, after, kept)
        if loaded is not None:
            if before is not None:
                before.close()
            self._path = loaded.path
            for slot, adapter in self._adapters.items():
                loaded.forward.set_adapter(slot, adapter.packed)
        self._forward, self._units_released = after, without
        trim()

    def _allocate(self, before: Forward | None, after: Forward, kept: Sequence[Ints]) -> None:
        """Allocates units for `after` in place of those of `before`, of which those `kept` of each group keep their
        contents. If it raises `ConfigError`, nothing has changed."""
        replaced = before is not None and before is not after and not self._units_released
        contents: list[tuple[int, Ints, Bytes]] = []
        if before is not None and replaced:
            held = ((group, units) for group, units in enumerate(kept) if len(units))
            contents = [(group, units, before.read_units(group, units)) for group, units in held]
            before.release_units()
        try:
            after.prepare(*self._prepared)
        except ConfigError:
            if before is not None and replaced:
                before.prepare(*self._prepared)
                _write(before, contents)
            raise
        _write(after, contents)

    # -- adapters

    def read_adapter(self, path: str) -> ReadAdapter:
        """See `Executor.read_adapter`."""
        if self._adapter_reader is None:
            raise ConfigError("this executor was built from weights in memory and has no adapters")
        read = self._adapter_reader(path)
        return ReadAdapter(read.digest, self._pack(read))

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        """See `Executor.set_adapter`. Waits for steps in flight, whose rows have other adapters."""
        if adapter is None:
            del self._adapters[slot]
        else:
            self._adapters[slot] = cast("ReadAdapter", adapter)
        if self._forward is not None:
            packed = self._adapters[slot].packed if adapter is not None else None
            change = partial(self._forward.set_adapter, slot, packed)
            _ = self._worker.submit(change).result() if self._overlap else change()

    # -- steps

    def submit(self, plan: Plan) -> None:
        """See `Executor.submit`. Raises `InvariantError` if two steps are in flight."""
        if len(self._in_flight) > 1:
            raise InvariantError(f"step {plan.step} was submitted while two others are in flight")
        while self._masks and self._masks[0].allowed.done():
            self._masks.popleft()
        self._masks += plan.masks
        step = partial(self._step, plan)
        self._in_flight.append(self._worker.submit(step).result if self._overlap else step)

    def queue(self, plan: Plan) -> Callable[[], StepResult]:
        """Carries out a step in the calling thread, as far as the device does not do it alone. Returns a function that
        waits for it and returns its result. For measurements, with no step in flight."""
        return self._step(plan)

    def collect(self) -> StepResult:
        """See `Executor.collect`. Raises `StepFailed` for errors of a device or an allocator; other errors are bugs and
        raised unchanged. Raises `InvariantError` if no step is in flight."""
        if not self._in_flight:
            raise InvariantError("collect was called with no step in flight")
        try:
            return self._in_flight.popleft()()()
        except CancelledError:
            raise StepFailed("the executor was closed") from None
        except (NotImplementedError, RecursionError):  # subclasses of RuntimeError, but never a device's
            raise
        except (RuntimeError, MemoryError) as error:  # PyTorch's device and out-of-memory errors are RuntimeErrors
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    def unit_bytes(self, group: int) -> int:
        """See `Copier.unit_bytes`."""
        return self.spec.groups[group].bytes_per_unit

    def read_units(self, group: int, units: Ints) -> Bytes:
        """See `Copier.read_units`. Waits for steps in flight."""
        read = partial(self.forward.read_units, group, units)
        return _copied(self._worker.submit(read).result if self._overlap else read)

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """See `Copier.write_units`. Steps continue meanwhile."""
        _copied(lambda: self.forward.write_units(group, units, data))

    def logits(self, plan: Plan) -> Singles:
        """Carries out `plan` without sampling and returns the logits, float32 [sum(plan.samples), vocab]. For tests and
        measurements, with no step in flight."""

        def compute() -> Singles:
            return self._compute(plan, self._tokens(plan), samples_of(plan).outputs).logits.host()

        return self._worker.submit(compute).result()

    def close(self) -> None:
        """Cancels masks that steps in flight still wait for, waits for these steps, ends the worker thread and releases
        the model."""
        for masks in self._masks:
            masks.allowed.cancel()
        self._worker.shutdown()
        if self._forward is not None:
            self._forward.close()

    def _step(self, plan: Plan) -> Callable[[], StepResult]:
        """Carries out a step. Returns a function that returns its result, and for steps which the device carries out
        alone waits for it."""
        for row, new in plan.sampling:
            self._options.start(row, new)
        alone = self._decode(plan)
        if alone is not None:
            return alone
        result = self._computed(plan)
        return lambda: result

    def _decode(self, plan: Plan) -> Callable[[], StepResult] | None:
        """Lets the device carry out a step alone; see `Forward.decode`."""

        def tokens() -> Ints:
            return plan.tokens if self._unknown is not None else self._tokens(plan)

        found = self.forward.decode(plan, tokens, self._options)
        if found is not None:
            self._unknown = partial(self._put_sampled, plan, found)
        return found

    def _put_sampled(self, plan: Plan, result: Callable[[], StepResult]) -> None:
        sampling = plan.samples > 0
        self._last_sampled[plan.rows[sampling]] = result().tokens[plan.samples.cumsum()[sampling] - 1]

    def _computed(self, plan: Plan) -> StepResult:
        samples = samples_of(plan)
        given = self._tokens(plan)
        greedy = self._options.plain(plan.rows) and not plan.masks and not self._options.draws(samples.rows)
        computed, scored = self._compute(plan, given, samples.outputs, best_only=greedy and plan.scores is None), None
        vectors = computed.vectors
        if plan.scores is not None:
            sampled_from = len(computed.logits) - len(plan.scores.offsets)
            targets = plan.scores.targets.astype(np.int64)  # target i is scored by the logits of output i
            outputs, top = computed.logits[sampled_from:], plan.scores.top
            scored = _scored(np.arange(len(targets)), outputs, targets, top, plan.scores.named)
            best = computed.best[:sampled_from] if computed.best is not None else None
            computed = Outputs(computed.logits[:sampled_from], best)
        tokens, sampled = self._sample(samples, computed, plan.masks)
        self._last_sampled[samples.rows[samples.last]] = tokens[samples.last]
        predicted = predict(self.forward, self._options, plan, samples, tokens, given)
        return StepResult(tokens, sampled, scored, vectors, predicted)

    def _compute(self, plan: Plan, tokens: Ints, outputs: Longs, *, best_only: bool = False) -> Outputs:
        """Applies the plan and computes its `tokens`. Returns the logits after those at `outputs`, or with `best_only`
        perhaps the likeliest tokens alone, then those for `plan.scores`. First makes the changes that outlast the step,
        so that they persist even if it fails."""
        self.forward.apply(plan)
        if plan.scores is not None:
            outputs = np.concatenate((outputs, plan.scores.offsets))
        return self.forward.run(plan, tokens, outputs.astype(np.int32), best_only=best_only)

    def _tokens(self, plan: Plan) -> Ints:
        """Returns the input ids, int32 [tokens], with references to earlier samples resolved."""
        if self._unknown is not None:
            wait, self._unknown = self._unknown, None
            wait()
        unknown = (plan.tokens < 0).nonzero()[0]
        if not len(unknown):
            return plan.tokens
        tokens, rows = plan.tokens.copy(), np.repeat(plan.rows, plan.counts)
        tokens[unknown] = self._last_sampled[rows[unknown]]
        return tokens

    def _sample(self, samples: Samples, computed: Outputs, given: Sequence[TokenMasks]) -> tuple[Ints, Logprobs | None]:
        """Samples tokens, int32 [samples], by their rows' options and their positions; also returns log-probabilities
        if any row wants them. May change the logits."""
        options, edits, sampled, logits = self._options, self._options.edits, None, computed.logits
        rows, positions = samples.rows, samples.positions
        masks, plain = _masks(given, edits.allowed(rows)), options.plain(rows)
        if plain and masks is None:
            if computed.best is not None and not options.draws(rows):
                return computed.best, None
            return logits.sample(options.choice(rows, positions)).astype(np.int32), None
        wanted, most = options.scored(rows)
        raw = logits.copy(wanted) if len(wanted) else logits
        if not plain:
            edits.edit(logits, rows, positions, samples.guesses)
        tokens = logits.sample(options.choice(rows, positions), masks)
        if not plain:
            edits.add(rows, tokens, samples.guesses)
        if len(wanted):
            sampled = _scored(wanted, raw, tokens[wanted], most, options.named(rows[wanted]))
        return tokens.astype(np.int32), sampled


def _copied(copy: Callable[[], T]) -> T:
    """Returns the result of `copy`. Raises `CopyFailed` for errors of a device or an allocator."""
    try:
        return copy()
    except (NotImplementedError, RecursionError):
        raise
    except (RuntimeError, MemoryError) as error:  # like in `collect`
        raise CopyFailed(f"{type(error).__name__}: {error}") from error


def _masks(given: Sequence[TokenMasks], allowed: Sequence[tuple[int, Words]]) -> Masks | None:
    """Waits until all masks are known and joins them with the allowed tokens of other samples. None if there is no
    limit for any sample."""
    known = [(masks.place, words) for masks in given if (words := masks.allowed.result()) is not None]
    known += [(place, words[None]) for place, words in allowed]
    if not known:
        return None
    rows = np.concatenate([place + np.arange(len(words)) for place, words in known])
    width = max(words.shape[1] for _, words in known)
    return Masks(rows, np.concatenate([np.pad(words, ((0, 0), (0, width - words.shape[1]))) for _, words in known]))


def _scored(places: Longs, logits: Logits, tokens: Longs, most: int, named: Sequence[tuple[int, ...]]) -> Logprobs:
    """Returns the log-probabilities of `tokens`, int64, one for each of the logits, of the `most` likeliest tokens, and
    of the tokens that are `named` for each of the logits, if any."""
    chosen, ids, top = logits.score(tokens, most)
    others = _of_named(logits, tokens, chosen, named)
    return Logprobs(places.astype(np.int32), chosen, ids.astype(np.int32), top, others)


def _of_named(logits: Logits, tokens: Longs, chosen: Singles, named: Sequence[tuple[int, ...]]) -> Singles:
    """Returns the log-probabilities of `named` tokens, float32 [outputs, most of them], given those of `tokens`, which
    are `chosen`: log-probabilities differ as logits do."""
    counts = np.array([len(each) for each in named] or [0] * len(tokens))
    found = np.full((len(tokens), counts.max(initial=0)), LEAST_LOGPROB, np.float32)
    if found.size:
        outputs = np.arange(len(tokens)).repeat(counts)
        others = np.array([token for each in named for token in each])
        apart = logits.at(outputs, others) - logits.at(outputs, tokens[outputs])
        values = np.nan_to_num(chosen[outputs] + apart, nan=LEAST_LOGPROB)
        found[outputs, ragged_arange(counts)] = values.clip(LEAST_LOGPROB, 0)
    return found


def _write(forward: Forward, contents: Iterable[tuple[int, Ints, Bytes]]) -> None:
    for group, units, data in contents:
        forward.write_units(group, units, list(data))
