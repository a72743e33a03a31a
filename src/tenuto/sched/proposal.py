"""Proposals for the next step, and flights: proposals that were applied."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tenuto.base.plan import Plan
from tenuto.memory.rows import Longs
from tenuto.sched.batch import RowUpdates
from tenuto.sched.guesses import Guesses
from tenuto.session.turn import Turn


@dataclass(frozen=True, slots=True)
class Lacking:
    """A running turn without room to continue, at index `place` of the running order. `needed`, int64 [groups]: the
    units that it and the turns before it must acquire; `alone`: those that it needs itself."""

    turn: Turn
    place: int
    needed: Longs
    alone: Longs

    def same(self, other: Lacking) -> bool:
        """Whether turn, place and needed units are equal."""
        return self.turn is other.turn and self.place == other.place and bool((self.needed == other.needed).all())


@dataclass(frozen=True, slots=True)
class Proposal:
    """A possible next step: `rows`, `starts`, `counts`, int64 [n] in running order, and `needs`, int64 [groups, n], the
    units to acquire. `lacking`: the first turn, excluding drafts, left out for lack of units; `last_lacking`: the last
    one, including drafts. `guesses`: lookahead tokens by index in `rows`."""

    rows: Longs
    starts: Longs
    counts: Longs
    needs: npt.NDArray[np.int64]
    lacking: Lacking | None
    last_lacking: Turn | None
    guesses: dict[int, Guesses] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InputPart:
    """Input tokens, at positions [start, stop), of a plan's row at `index`."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Flight:
    """An applied plan. `runs`: `Rows.run` of its `rows` when it was applied, both int64 [n]; a row whose run has
    changed since was given back, and its results are dropped. `guesses`: lookahead tokens by index in `rows`. `scored`:
    the input tokens that `plan.scores` scores, in order. `masked`: for each of `plan.masks`, the index of its row in
    `rows`. `pooled`: the input tokens of each of the sums in `plan.vectors`."""

    plan: Plan
    rows: Longs
    runs: Longs
    guesses: dict[int, Guesses]
    updates: RowUpdates
    scored: tuple[InputPart, ...] = ()
    masked: tuple[int, ...] = ()
    pooled: tuple[InputPart, ...] = ()

    @property
    def decides_the_next(self) -> bool:
        """Whether the next step should not be planned before this one is settled: it has guesses, or asks for some."""
        work = self.plan.predictor
        return bool(self.guesses) or (work is not None and bool(work.guesses.any()))
