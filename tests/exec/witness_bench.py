"""A witness driven by hand: plans, their results, and the expected tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.plan import (
    NO_SLOT,
    PageCopies,
    Plan,
    RowSampling,
    StateMoves,
    TableChanges,
)
from tenuto.base.sampling import GREEDY
from tenuto.exec.witness import WitnessExecutor
from tenuto.exec.witness_hashes import history_hash, next_token

FULL, SLIDING, STATE = Kind.FULL, Kind.SLIDING, Kind.STATE
PAGE, WINDOW, VOCABULARY, PAGES, LOOKAHEAD = 4, 6, 997, 40, 3
Work = tuple[int, int, list[int], int]
"""A row, start, tokens, and the number of last tokens after which to sample."""

every_kind = pytest.mark.parametrize("kinds", [(FULL,), (SLIDING,), (STATE,), (FULL, SLIDING, STATE)], ids=str)
paged = pytest.mark.parametrize("kind", [FULL, SLIDING], ids=["full", "sliding"])
TOLD = RowSampling(GREEDY, None, None, (), 0, None)


def ints(values) -> np.ndarray:
    return np.array(list(values), np.int32)


class Bench:
    """A witness with two rows: row r has pages 10 r, 10 r + 1, ... of every paged group, and state slot r."""

    def __init__(self, *kinds: Kind, **options: Any) -> None:
        groups = [GroupSpec(kind, 1, WINDOW if kind is SLIDING else 0) for kind in kinds]
        self.paged = [kind for kind in kinds if kind is not STATE]
        self.states = len(kinds) - len(self.paged)
        self.witness = WitnessExecutor(PAGE, groups, VOCABULARY, **options)
        self.witness.prepare((PAGES,) * len(kinds), 4, lookahead=LOOKAHEAD)
        self.steps = 0

    def plan(
        self,
        *work: Work,
        tables=((0, range(10)), (1, range(10, 20))),
        copies=(),
        reads=None,
        writes=None,
        absorbs=None,
        keeps=None,
        sampling=(),
    ) -> Plan:
        """`tables`: rows and their pages; `copies`: (source, target, slots); `sampling`: rows and their options."""
        self.steps += 1
        slots = [NO_SLOT if start == 0 else row for row, start, _, _ in work]
        moves = StateMoves(
            ints(slots if reads is None else reads),
            ints([w[0] for w in work] if writes is None else writes),
            ints(absorbs or [0] * len(work)),
            ints(keeps or [0] * len(work)),
        )
        change = TableChanges(
            ints(row for row, pages in tables for _ in pages),
            ints(i for _, pages in tables for i in range(len(pages))),
            ints(page for _, pages in tables for page in pages),
        )
        copy = PageCopies(*(ints(c[i] for c in copies) for i in range(3)))
        return Plan(
            self.steps,
            ints(w[0] for w in work),
            ints(w[1] for w in work),
            ints(len(w[2]) for w in work),
            ints(token for w in work for token in w[2]),
            ints(w[3] for w in work),
            (change,) * len(self.paged),
            (copy,) * len(self.paged),
            (moves,) * self.states,
            sampling,
        )

    def run(self, *work: Work, **more) -> list[int]:
        self.witness.submit(self.plan(*work, **more))
        return self.witness.collect().tokens.tolist()


def said(*tokens: int) -> int:
    return next_token(history_hash(tokens), VOCABULARY)
