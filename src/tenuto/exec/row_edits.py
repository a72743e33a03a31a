"""Edits of rows' logits before tokens are sampled: biases, masked and allowed ids, and penalties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tenuto.base.plan import RowSampling, Words
from tenuto.exec.logits import Logits, Longs
from tenuto.exec.token_counts import TokenCounts
from tenuto.exec.words import words_of


class Edits(Protocol):
    """The edits of each row's logits. Only the thread that runs steps uses it.

    A row may sample several tokens in a step: the first one, and one after each guess. `guesses`, int64 [outputs], are
    the guesses before the outputs of a step, or `NO_GUESS` for the first output of a row.
    """

    def start(self, row: int, new: RowSampling) -> None:
        """Sets the edits of a row, in place of earlier ones. If it fails, the row must start anew."""

    def edit(self, logits: Logits, rows: Longs, positions: Longs, guesses: Longs) -> None:
        """Edits the logits, in place, from which tokens of `rows` at `positions` are sampled, all [outputs]. Guesses
        before an output count as the row's output."""

    def allowed(self, rows: Longs) -> list[tuple[int, Words]]:
        """Returns the indices in `rows` of those whose allowed ids `edit` leaves to the caller, each with a bit for
        every allowed token."""

    def add(self, rows: Longs, tokens: Longs, guesses: Longs) -> None:
        """Records that row `rows[i]` has sampled `tokens[i]`, unless a guess before it was wrong."""


@dataclass(frozen=True, slots=True)
class _Biases:
    """Biases added to a row's logits: `before` at positions below `masked_before`, `after` from there on."""

    before: _Added
    after: _Added
    masked_before: int


class _Added:
    """Biases of some logits: `values`, float32, for `tokens`, int64, all different."""

    def __init__(self, values: Mapping[int, float], vocab: int) -> None:
        known = {token: value for token, value in values.items() if token < vocab}
        self.tokens = np.array(list(known), np.int64)
        self.values = np.array(list(known.values()), np.float32)


class HostEdits:
    """The `Edits` of rows in host memory, for logits on any device."""

    def __init__(self, vocab: int) -> None:
        self._biases: dict[int, _Biases] = {}
        self._allowed: dict[int, Words] = {}
        self._vocab = vocab
        self._counts = TokenCounts()

    def start(self, row: int, new: RowSampling) -> None:
        """See `Edits.start`."""
        options = new.sampling
        self._biases.pop(row, None)
        self._allowed.pop(row, None)
        self._counts.start(row, new)
        if options.allowed_ids:
            self._allowed[row] = words_of(options.allowed_ids, self._vocab)
        if options.logit_bias or new.masked:
            self._biases[row] = self._biases_of(new)

    def _biases_of(self, new: RowSampling) -> _Biases:
        after = dict(new.sampling.logit_bias)
        before = after | dict.fromkeys(new.masked, -np.inf)
        return _Biases(_Added(before, self._vocab), _Added(after, self._vocab), new.masked_before)

    def edit(self, logits: Logits, rows: Longs, positions: Longs, guesses: Longs) -> None:
        """See `Edits.edit`. Allowed ids are left to the caller."""
        biased = [place for place, row in enumerate(rows.tolist()) if row in self._biases] if self._biases else []
        if biased:
            self._add_biases(logits, rows, positions, np.array(biased))
        self._counts.penalise(logits, rows, guesses)

    def _add_biases(self, logits: Logits, rows: Longs, positions: Longs, biased: Longs) -> None:
        added = []
        for place in biased.tolist():
            biases = self._biases[int(rows[place])]
            added.append(biases.before if positions[place] < biases.masked_before else biases.after)
        places = np.repeat(biased, [len(each.tokens) for each in added])
        tokens, values = (np.concatenate(parts) for parts in zip(*((a.tokens, a.values) for a in added), strict=True))
        logits.put(places, tokens, logits.at(places, tokens) + values)

    def allowed(self, rows: Longs) -> list[tuple[int, Words]]:
        """See `Edits.allowed`."""
        if not self._allowed:
            return []
        return [(i, self._allowed[row]) for i, row in enumerate(rows.tolist()) if row in self._allowed]

    def add(self, rows: Longs, tokens: Longs, guesses: Longs) -> None:
        """See `Edits.add`."""
        self._counts.add(rows, tokens, guesses)
