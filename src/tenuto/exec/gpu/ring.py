"""The numbers of captured steps, in host memory that the device addresses: the host copies nothing and waits for
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tenuto.base.plan import Ints, Plan
from tenuto.exec.gpu.buckets import MOST_TOKENS
from tenuto.exec.gpu.queue import Mark, Queue
from tenuto.kernels.gpu.steps import CHANGED, OWN, Entries
from tenuto.kernels.sampling import OPTIONS, Options

IN_FLIGHT = 3
"""Number of steps whose numbers the host keeps: two in flight, and one whose result is being read."""


CHANGES = 4096
"""The most changes of a page table that a captured step makes: those of a turn that starts from 131,072 tokens in pages
of 32."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The host's part of a step: the plan, its `tokens` as `Forward.decode` has them, and options by row id."""

    plan: Plan
    tokens: Ints
    options: Options


@dataclass(frozen=True, slots=True)
class _Entry:
    """One step's part of `Entries`, as arrays. `changes` are those of each page table, int32 [CHANGED, most]. `done` is
    behind the last step that used it."""

    counts: Ints
    inputs: Ints
    rows: Ints
    changes: tuple[Ints, ...]
    options: Options
    tokens: Ints
    done: Mark


class Ring:
    """The entries that captured steps take in turn, for steps of at most `most` rows.

    Invariant: the device's `entries.turn` is the entry of the step that is queued next, which is `_next` as soon as all
    queued steps are done.
    """

    def __init__(self, queue: Queue, most: int, states: int, tables: int, device: torch.device) -> None:
        """`states`, `tables`: the numbers of groups with states and with page tables."""
        self.most, self.fields, self._queue = most, OWN + 2 * states, queue

        def shared(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            size = IN_FLIGHT * int(np.prod(shape)) * dtype.itemsize
            return queue.pinned(size).view(dtype).view(IN_FLIGHT, *shape)

        self.entries = Entries(
            counts=shared(torch.int32, 2 + tables),
            inputs=shared(torch.int32, max(MOST_TOKENS, most)),
            numbers=shared(torch.int32, self.fields, most),
            changes=shared(torch.int32, CHANGED * max(tables, 1), CHANGES),
            options=shared(torch.float64, most, len(OPTIONS.names or ())),
            tokens=shared(torch.int32, most),
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
            shared.tokens[number].numpy(),
            done,
        )

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures a step, which begins and ends as `kernels.gpu.steps` has it. Steps without rows run meanwhile."""
        for entry in self._all:
            entry.done.synchronize()
        self._counts[:] = 0
        again = self._queue.capture(work)
        self.entries.turn.fill_(self._next)
        return again

    def start(self, step: Callable[[], None], given: StepNumbers) -> Callable[[], Ints]:
        """Queues a captured step; see `Forward.decode`. Nothing is allocated on the device, copied there or waited for:
        the step reads the entry itself."""
        entry, plan = self._all[self._next], given.plan
        entry.done.synchronize()
        n, many, rows, counts = len(plan.rows), len(plan.tokens), entry.rows, entry.counts
        counts[0], counts[1] = n, many
        entry.inputs[:many] = given.tokens
        rows[0, :n] = plan.rows
        rows[1, :n] = plan.starts
        rows[2, :n] = plan.counts
        rows[3, 0] = 0
        np.cumsum(plan.counts[:-1], out=rows[3, 1:n])
        rows[4, :n] = plan.samples
        for place, moves in enumerate(plan.states):
            rows[OWN + 2 * place, :n] = moves.reads
            rows[OWN + 2 * place + 1, :n] = moves.writes
        given.options.take(plan.rows, out=entry.options[:n], mode="clip")  # other modes copy twice
        for place, changes in enumerate(plan.tables):
            counts[2 + place] = changed = len(changes.rows)
            if changed:
                own = entry.changes[place]
                own[0, :changed] = changes.rows
                own[1, :changed] = changes.index
                own[2, :changed] = changes.pages
        step()
        self._next = (self._next + 1) % IN_FLIGHT
        entry.done.record()
        return partial(_result, entry, plan.samples)


def _result(entry: _Entry, samples: Ints) -> Ints:
    entry.done.synchronize()
    found: Ints = entry.tokens[: len(samples)][samples > 0]
    return found
