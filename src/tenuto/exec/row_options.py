"""Sampling options of rows, and what only some rows ask for: edited logits and log-probabilities."""

from __future__ import annotations

import numpy as np

from tenuto.base.plan import Ints, RowSampling
from tenuto.exec.logits import Longs
from tenuto.exec.row_edits import Edits
from tenuto.kernels.sampling import OPTIONS, Choice, Options, uniforms

NOT_ASKED = -1


class RowOptions:
    """Sampling options by row id, in host arrays [rows]. The thread that runs steps sets a row's options when a plan
    lists the row in `Plan.sampling`.

    Invariant: `_asking` has the rows with edits or log-probabilities. Steps without such a row skip these.
    """

    def __init__(self, rows: int, edits: Edits) -> None:
        """`edits`: those of the rows, of which none has started."""
        self.records: Options = np.zeros(rows, OPTIONS)  # of all rows; the owner reads them
        self.records["top_p"] = 1.0
        self.edits = edits
        self._edited = np.zeros(rows, np.bool_)
        self._top = np.full(rows, NOT_ASKED)
        self._named: dict[int, tuple[int, ...]] = {}
        self._asking: set[int] = set()

    def start(self, row: int, new: RowSampling) -> None:
        """Sets the options of a row."""
        options = new.sampling
        self.records[row] = options.temperature, options.top_p, options.min_p, options.top_k, options.seed
        asks = new.edited or new.top is not None
        if not asks and row not in self._asking:
            return
        self._asking.add(row)  # first: if the rest fails, the next start of the row must reset it
        self._edited[row] = True
        self._top[row] = NOT_ASKED if new.top is None else new.top
        self._named.pop(row, None)
        if new.named:
            self._named[row] = new.named
        self.edits.start(row, new)
        self._edited[row] = new.edited
        if not asks:
            self._asking.discard(row)

    def plain(self, rows: Ints | Longs) -> bool:
        """Whether none of `rows` has edits or log-probabilities."""
        return not self._asking or self._asking.isdisjoint(rows.tolist())

    def edited(self, rows: Ints | Longs) -> bool:
        """Whether any of `rows` has edits."""
        return bool(self._edited[rows].any())

    def draws(self, rows: Longs) -> bool:
        """Whether any of `rows` is not greedy."""
        return bool(self.records["temperature"][rows].any())

    def choice(self, rows: Longs, positions: Longs) -> Choice:
        """Returns the parameters for choosing the tokens of `rows` at `positions`, both int64 [n]."""
        given = {name: np.ascontiguousarray(self.records[name][rows]) for name in OPTIONS.names or ()}
        return Choice(uniform=uniforms(given.pop("seed"), positions), **given)

    def named(self, rows: Ints | Longs) -> list[tuple[int, ...]]:
        """Returns the ids whose log-probabilities each of `rows` names."""
        return [self._named.get(row, ()) for row in rows.tolist()] if self._named else []

    def scored(self, rows: Longs) -> tuple[Longs, int]:
        """Returns the indices in `rows` of those that want log-probabilities, and the largest number of top tokens that
        any of them wants."""
        most = self._top[rows]
        return np.flatnonzero(most != NOT_ASKED), int(most.max(initial=0))
