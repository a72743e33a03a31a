"""The numbers of captured steps, in host memory that the device addresses: the host copies nothing and waits for
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tenuto.base.plan import Ints, Plan
from tenuto.exec.gpu.queue import Mark, Queue
from tenuto.kernels.gpu.steps import CHANGED, OWN, Entries
from tenuto.kernels.sampling import OPTIONS, Options

IN_FLIGHT = 3
"""Number of steps whose numbers the host keeps: two in flight, and one whose result is being read."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One step's part of `Entries`, as arrays. `changes` are those of each page table, int32 [CHANGED, most]. `done` is
    behind the last step that used it."""

    counts: Ints
    rows: Ints
    changes: tuple[Ints, ...]
    options: Options
    tokens: Ints
    done: Mark


class Ring:
    """The entries that captured steps take in turn, for steps of at most `most` rows and changes.

    Invariant: the device's `entries.turn` is the entry of the step that is queued next, which is `_next` as soon as all
    queued steps are done.
    """

    def __init__(self, queue: Queue, most: int, states: int, tables: int, device: torch.device) -> None:
        """`states`, `tables`: the numbers of groups with states and with page tables."""
        self.most, self.fields, self._queue = most, OWN + 2 * states, queue
        lines = self.fields + CHANGED * tables

        def shared(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            size = IN_FLIGHT * int(np.prod(shape)) * dtype.itemsize
            return queue.pinned(size).view(dtype).view(IN_FLIGHT, *shape)

        turn, place = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        counts, numbers = shared(torch.int32, 1 + tables), shared(torch.int32, lines, most)
        records = shared(torch.float64, most, len(OPTIONS.names or ()))
        self.entries = Entries(counts, numbers, records, shared(torch.int32, most), turn, place)
        self._counts = counts.numpy()
        self._all = [self._entry(i) for i in range(IN_FLIGHT)]
        self._next = 0

    def _entry(self, number: int) -> _Entry:
        shared, done = self.entries, self._queue.mark()
        done.record()
        numbers, records = shared.numbers[number].numpy(), shared.options[number].numpy()
        each = (numbers[first : first + CHANGED] for first in range(self.fields, len(numbers), CHANGED))
        return _Entry(
            self._counts[number],
            numbers[: self.fields],
            tuple(each),
            records.view(OPTIONS)[:, 0],
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

    def start(self, step: Callable[[], None], plan: Plan, tokens: Ints, options: Options) -> Callable[[], Ints]:
        """Queues a captured step; see `Forward.decode`."""
        entry = self._all[self._next]
        entry.done.synchronize()
        n, rows, counts = len(plan.rows), entry.rows, entry.counts
        counts[0] = n
        rows[0, :n] = tokens
        rows[1, :n] = plan.rows
        rows[2, :n] = plan.starts
        for place, moves in enumerate(plan.states):
            rows[OWN + 2 * place, :n] = moves.reads
            rows[OWN + 2 * place + 1, :n] = moves.writes
        options.take(plan.rows, out=entry.options[:n], mode="clip")  # other modes copy twice
        for place, changes in enumerate(plan.tables):
            counts[1 + place] = changed = len(changes.rows)
            if changed:
                own = entry.changes[place]
                own[0, :changed] = changes.rows
                own[1, :changed] = changes.index
                own[2, :changed] = changes.pages
        step()
        self._next = (self._next + 1) % IN_FLIGHT
        entry.done.record()
        return lambda: _result(entry, n)


def _result(entry: _Entry, n: int) -> Ints:
    entry.done.synchronize()
    return entry.tokens[:n].copy()
