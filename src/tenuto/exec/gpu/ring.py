"""The numbers of captured steps, in host memory that the device addresses: the host copies nothing and waits for
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tenuto.base.plan import Ints, Logprobs, Plan, Singles, StepResult, Words
from tenuto.base.sampling import MAX_LOGPROBS
from tenuto.exec.gpu.buckets import MOST_SAMPLES, MOST_TOKENS
from tenuto.exec.gpu.queue import Mark, Queue
from tenuto.exec.logits import Longs
from tenuto.kernels.gpu.steps import ADAPTER, CHANGED, OWN, SPAN, Entries
from tenuto.kernels.sampling import OPTIONS, Options

IN_FLIGHT = 3
"""Number of steps whose numbers the host keeps: two in flight, and one whose result is being read."""


CHANGES = 4096
"""The most changes of a page table that a captured step makes: those of a turn that starts from 131,072 tokens in pages
of 32."""
MASKS = 128
"""The most samples with masks of a captured step."""
NO_MASK = -1


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The host's part of a step: the plan, its `tokens` as `Forward.decode` has them, and options by row id. `scored`:
    the samples that want log-probabilities, if there are any, and the number of likeliest tokens that they want too."""

    plan: Plan
    tokens: Ints
    options: Options
    scored: tuple[Longs, int] | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One step's part of `Entries`, as arrays. `changes` are those of each page table, int32 [CHANGED, most]. `masks`
    are unsigned. `done` is behind the last step that used it."""

    counts: Ints
    inputs: Ints
    rows: Ints
    changes: tuple[Ints, ...]
    options: Options
    masked: Ints
    masks: Words
    tokens: Ints
    chosen: Singles
    top_tokens: Ints
    top: Singles
    done: Mark


class Ring:
    """The entries that captured steps take in turn, for steps of at most `most` rows.

    Invariant: the device's `entries.turn` is the entry of the step that is queued next, which is `_next` as soon as all
    queued steps are done.
    """

    def __init__(self, queue: Queue, most: int, states: int, tables: int, vocab: int, device: torch.device) -> None:
        """`states`, `tables`: the numbers of groups with states and with page tables."""
        self.most, self.fields, self._queue, self._vocab = most, OWN + 2 * states, queue, vocab

        def shared(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            size = IN_FLIGHT * int(np.prod(shape)) * dtype.itemsize
            return queue.pinned(size).view(dtype).view(IN_FLIGHT, *shape)

        self.entries = Entries(
            counts=shared(torch.int32, 3 + tables),
            inputs=shared(torch.int32, max(MOST_TOKENS, most)),
            numbers=shared(torch.int32, self.fields, most),
            changes=shared(torch.int32, CHANGED * max(tables, 1), CHANGES),
            options=shared(torch.float64, most, len(OPTIONS.names or ())),
            masked=shared(torch.int32, max(MOST_SAMPLES, most)),
            masks=shared(torch.int32, MASKS, -(-vocab // 32)),
            tokens=shared(torch.int32, max(MOST_SAMPLES, most)),
            chosen=shared(torch.float32, most),
            top_tokens=shared(torch.int32, most, MAX_LOGPROBS),
            top=shared(torch.float32, most, MAX_LOGPROBS),
            turn=torch.zeros(1, dtype=torch.int32, device=device),
            place=torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._counts = self.entries.counts.numpy()
        self._all = [self._entry(i, tables) for i in range(IN_FLIGHT)]
        self._next = 0

    def _entry(self, number: int, tables: int) -> _Entry:
        shared, done = self.entries, self._queue.mark()
        done.record()
        changes = shared.changes[number].numpy()
        return _Entry(
            self._counts[number],
            shared.inputs[number].numpy(),
            shared.numbers[number].numpy(),
            tuple(changes[CHANGED * i : CHANGED * (i + 1)] for i in range(tables)),
            shared.options[number].numpy().view(OPTIONS)[:, 0],
            shared.masked[number].numpy(),
            shared.masks[number].numpy().view(np.uint32),
            shared.tokens[number].numpy(),
            shared.chosen[number].numpy(),
            shared.top_tokens[number].numpy(),
            shared.top[number].numpy(),
            done,
        )

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures a step, which begins and ends as `kernels.gpu.steps` has it. Steps without rows run meanwhile."""
        for entry in self._all:
            entry.done.synchronize()
        self._counts[:] = 0
        try:
            return self._queue.capture(work)
        finally:
            self.entries.turn.fill_(self._next)

    def start(
        self, step: Callable[[], None], given: StepNumbers, end: Callable[[], None] | None = None
    ) -> Callable[[], StepResult]:
        """Queues a captured step; see `Forward.decode`. Nothing is allocated on the device, copied there or waited for:
        the step reads the entry itself. With `end`, `step` ends with logits, and `end` is queued as soon as the plan's
        masks, if any, are known."""
        entry = self._all[self._next]
        entry.done.synchronize()
        self._write(entry, given)
        step()
        try:
            if given.plan.masks:
                self._mask(entry, given.plan)
            if end is not None:
                end()
            self._next = (self._next + 1) % IN_FLIGHT
        finally:  # without its end, the step has not moved `entries.turn` either
            entry.done.record()
        return partial(_result, entry, int(given.plan.samples.sum()), given.scored)

    def _write(self, entry: _Entry, given: StepNumbers) -> None:
        plan, rows, counts = given.plan, entry.rows, entry.counts
        n, many = len(plan.rows), len(plan.tokens)
        counts[:3] = n, many, plan.samples.sum()
        entry.inputs[:many] = given.tokens
        rows[0, :n] = plan.starts
        rows[1, :n] = plan.samples
        rows[2, :n] = plan.samples.cumsum() - plan.samples
        rows[SPAN, :n] = plan.rows
        rows[SPAN + 1, :n] = plan.counts.cumsum() - plan.counts
        rows[SPAN + 2, :n] = plan.counts
        rows[ADAPTER, :n] = 0 if plan.adapters is None else plan.adapters
        for place, moves in enumerate(plan.states):
            rows[SPAN + 3, :n] = moves.absorbs  # the same in all groups
            rows[SPAN + 4, :n] = moves.keeps
            rows[OWN + 2 * place, :n] = moves.reads
            rows[OWN + 2 * place + 1, :n] = moves.writes
        given.options.take(plan.rows, out=entry.options[:n], mode="clip")  # other modes copy twice
        for place, changes in enumerate(plan.tables):
            counts[3 + place] = changed = len(changes.rows)
            if changed:
                own = entry.changes[place]
                own[0, :changed] = changes.rows
                own[1, :changed] = changes.index
                own[2, :changed] = changes.pages

    def _mask(self, entry: _Entry, plan: Plan) -> None:
        """Waits for a plan's masks and writes them; those that allow no token are left out."""
        entry.masked[: int(plan.samples.sum())] = NO_MASK
        number = 0
        for given in plan.masks:
            words = given.allowed.result()
            for i, allowed in enumerate(words if words is not None else ()):
                own = entry.masks[number]
                width = min(len(allowed), len(own))
                own[:width], own[width:] = allowed[:width], 0
                if self._vocab % 32:
                    own[-1] &= np.uint32((1 << self._vocab % 32) - 1)
                if own.any():
                    entry.masked[given.place + i] = number
                    number += 1


def masked_samples(plan: Plan) -> int:
    """Returns how many samples of a plan may have masks."""
    places = np.array([masks.place for masks in plan.masks], np.int64)
    return int(plan.samples[plan.samples.cumsum().searchsorted(places, side="right")].sum())


def _result(entry: _Entry, samples: int, scored: tuple[Longs, int] | None) -> StepResult:
    entry.done.synchronize()
    tokens = entry.tokens[:samples].copy()
    if scored is None:
        return StepResult(tokens)
    places, most = scored
    top_tokens, top = entry.top_tokens[places, :most], entry.top[places, :most]
    none = np.zeros((len(places), 0), np.float32)
    return StepResult(tokens, Logprobs(places.astype(np.int32), entry.chosen[places], top_tokens, top, none))
