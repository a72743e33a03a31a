"""A draft model: a second, smaller model of the same vocabulary, with its own steps."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenuto.base.clock import Clock
from tenuto.base.errors import StepFailed, TenutoError
from tenuto.base.plan import Executor, MemoryPart, PageCopies, Plan, RowSampling, TableChanges
from tenuto.base.sampling import Sampling
from tenuto.memory.pool import Pool
from tenuto.sched.draft_tables import DraftTable, DraftTables
from tenuto.sched.guesses import StepTimes

MANY = 32
"""The number of tokens per row from which a step measures what a token of a prompt takes."""

log = logging.getLogger("tenuto.guesses")

_NO_COPIES = PageCopies(*(np.empty(0, np.int32),) * 3)


@dataclass(frozen=True, slots=True)
class DraftWork:
    """The next tokens of a table's sequence, at least one, to be computed; then the token that follows is guessed, with
    the options `sampling`, unless it is `None`."""

    table: DraftTable
    tokens: array[int]
    sampling: Sampling | None


class DraftModel:
    """An executor of a draft model with its memory. It computes while it is called, so none of its steps is ever in
    flight. A step that fails loses nothing but time: what it was to write is written again."""

    def __init__(self, executor: Executor, tables: DraftTables, clock: Clock, *, vocab_size: int, context: int) -> None:
        """The executor is prepared for the pools and rows of `tables`. `vocab_size`: the tokens that may be guessed;
        `context`: the longest sequence that the model can go on with."""
        self.tables = tables
        self.context = context
        self.times = StepTimes()
        self.prompt_seconds = 0.0  # what a token of a prompt takes; 0 until it is measured
        self._executor = executor
        self._clock = clock
        self._vocab_size = vocab_size
        self._steps = 0
        self._rest = self._resting = 0  # calls to be left out after a failure, and those still left out
        self._released: frozenset[MemoryPart] = frozenset()

    def may_compute(self) -> bool:
        """Whether it can compute now: no memory is released, and it has not failed lately. Every call counts as time
        passed since a failure."""
        self._resting = max(0, self._resting - 1)
        return not (self._released or self._resting)

    def seconds(self, rows: int, tokens: int, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Returns the times of numbers of `steps`, int64 [n], in which each of `rows` rows computes a token, except for
        the first with `tokens` tokens in total; float64 [n]. 0 until a step is measured."""
        first, other = self.times.seconds(rows, np.array([tokens - rows, 0], np.float64)).tolist()
        return np.where(steps > 0, first + (steps - 1) * other, 0.0)

    def compute(self, work: Sequence[DraftWork]) -> list[int | None]:
        """Carries out a step. Returns, for each part of the work, the guess if one was asked for and there was room;
        parts without room are not computed. Raises `StepFailed`."""
        fits = self.tables.take_room([(part.table, len(part.tokens)) for part in work])
        chosen = [part for part, fit in zip(work, fits, strict=True) if fit]
        guessed = iter(self._step(chosen) if chosen else ())
        return [
            next(guessed) if fit and part.sampling is not None else None for part, fit in zip(work, fits, strict=True)
        ]

    def _step(self, work: Sequence[DraftWork]) -> list[int]:
        """Computes work for which there is room. Returns the guesses of the parts that ask for one."""
        plan, began = self._plan(work), self._clock.now()
        try:
            self._executor.submit(plan)
            tokens: list[int] = self._executor.collect().tokens.tolist()
        except StepFailed as error:
            for part in work:
                part.table.cut(len(part.table.tokens))
            self.tables.rows_lost()
            self._rest = self._resting = min(2 * self._rest + 2, 1024)
            log.warning("a step of the draft model failed", extra={"step": plan.step, "error": str(error)})
            raise
        self._rest = 0
        for part in work:
            part.table.tokens.extend(part.tokens)
        self._measure(len(work), len(plan.tokens), self._clock.now() - began)
        return tokens

    def _measure(self, rows: int, tokens: int, seconds: float) -> None:
        self.times.note(rows, tokens, seconds)
        if tokens >= MANY * rows:
            each = seconds / tokens
            self.prompt_seconds = (
                each if not self.prompt_seconds else self.prompt_seconds + (each - self.prompt_seconds) / 4
            )

    def _plan(self, work: Sequence[DraftWork]) -> Plan:
        self._steps += 1
        sampling = []
        for part in work:
            if part.sampling is not None and part.sampling != part.table.sampling:
                sampling.append((part.table.row, RowSampling(part.sampling)))
                part.table.sampling = part.sampling
        return Plan(
            self._steps,
            np.array([part.table.row for part in work], np.int32),
            np.array([len(part.table.tokens) for part in work], np.int32),
            np.array([len(part.tokens) for part in work], np.int32),
            np.concatenate([np.frombuffer(part.tokens, np.int32) for part in work]),
            np.array([part.sampling is not None for part in work], np.int32),
            self._changes([part.table for part in work]),
            (_NO_COPIES,) * len(self.tables.pools),
            (),
            tuple(sampling),
        )

    def _changes(self, tables: Sequence[DraftTable]) -> tuple[TableChanges, ...]:
        """Returns the page table entries that the executor does not have, for each pool."""
        new = [(table, table.sent, table.pages - table.sent) for table in tables]
        counts = [count for _, _, count in new]
        rows = np.repeat(np.array([table.row for table in tables], np.int32), counts)
        index = np.concatenate([np.arange(first, first + count, dtype=np.int32) for _, first, count in new])
        units = [table.units(first) for table, first, _ in new]
        for table in tables:
            table.sent = table.pages
        return tuple(
            TableChanges(rows, index, np.concatenate([np.array(each[pool], np.int32) for each in units]))
            for pool in range(len(self.tables.pools))
        )

    def is_token(self, token: int) -> bool:
        """Whether the main model has this token: vocabularies are padded differently."""
        return token < self._vocab_size

    def memories(self) -> Iterable[tuple[Sequence[Pool], Executor]]:
        """Returns its pools with its executor, unless their memory is released."""
        return () if "kv_cache" in self._released else ((self.tables.pools, self._executor),)

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Gives memory back to the system, and all pages with it, until `restore`."""
        self.tables.clear()
        self._executor.release(parts)
        self._released |= frozenset(parts)

    def restore(self, parts: Collection[MemoryPart]) -> None:
        """Allocates the released `parts` again. If that fails, it is logged, and nothing is guessed from then on."""
        try:
            self._executor.restore(parts, self._executor.load(None) if "weights" in parts else None)
        except (TenutoError, OSError) as error:
            log.warning("the draft model could not be restored", extra={"error": str(error)})
        else:
            self._released -= frozenset(parts)

    def close(self) -> None:
        """Releases the model; it is not used afterwards."""
        self.tables.clear()
        self._executor.close()
