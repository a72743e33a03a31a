"""What one step does, as flat arrays, and the protocol of those who do it.

A plan is plain data: making it changes nothing. The engine makes it, an executor carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tenuto.base.groups import MemorySpec
from tenuto.base.sampling import Sampling

Ints = npt.NDArray[np.int32]

PREVIOUS_SAMPLE = -1
"""In `Plan.tokens`: the token this row sampled in the step submitted just before (not known to the planner yet)."""

NO_SLOT = -1
"""In `StateMoves.reads`: the row starts from the zero state."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """New entries of one paged group's page table: `table[rows[i], index[i]] = pages[i]`. All int32 [changes]."""

    rows: Ints
    index: Ints
    pages: Ints


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Page copies of one paged group, done before the step computes: the first `slots[i]` token slots of page
    `sources[i]` go to page `targets[i]`. All int32 [copies]."""

    sources: Ints
    targets: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class StateMoves:
    """For one state group and each scheduled row: the slot holding the state before the row's first token (`NO_SLOT`:
    the zero state) and the slot that takes the state after its last. They may be equal. Both int32 [rows]."""

    reads: Ints
    writes: Ints


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass over a mixed batch of prefill chunks and decodes.

    Row `rows[i]` computes `counts[i]` tokens at positions `starts[i] ...`; their ids are the next `counts[i]` entries
    of `tokens`. It samples after each of its last `samples[i]` tokens (0 in the middle of a prefill, 1 for a decode, 1
    + k with k lookahead tokens, whose guesses are the last k input tokens).

    `tables` and `copies` have one entry a memory group of kind full or sliding, and `states` one a group of kind state,
    each in the order of the memory spec. Page tables persist between steps: an executor keeps one row of pages a row
    id, applies `tables` first, then `copies`, then computes. Entries of a sliding group that lie wholly before the
    window of `starts[i]` are stale and must not be read. `sampling` lists the rows whose sampling options are new.
    """

    step: int
    rows: Ints
    starts: Ints
    counts: Ints
    tokens: Ints
    samples: Ints
    tables: tuple[TableChanges, ...]
    copies: tuple[PageCopies, ...]
    states: tuple[StateMoves, ...]
    sampling: tuple[tuple[int, Sampling], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens of a step, int32 [sum(plan.samples)], rows in plan order."""

    tokens: Ints


class Executor(Protocol):
    """Carries out plans, at most one in flight: `submit`, then `collect`, in turn."""

    @property
    def spec(self) -> MemorySpec:
        """The memory groups this model needs."""
        ...

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        """Allocate memory for `units[g]` units of each group of `spec` and page tables for row ids 0 .. `rows` - 1.
        Called once, before the first `submit`."""
        ...

    def submit(self, plan: Plan) -> None:
        """Start a step and return. Raises nothing the plan's turns can cause; failures come out of `collect`."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step in flight. Raises `StepFailed` if it could not be finished."""
        ...

    def close(self) -> None:
        """Release what it computes with; nothing is submitted any more."""
        ...
