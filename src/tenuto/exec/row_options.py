"""Sampling options of rows, and the biases, masks, penalties and log-probabilities that only some rows need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tenuto.base.plan import RowSampling, Words
from tenuto.exec.forward import Logits, Longs
from tenuto.exec.token_counts import TokenCounts
from tenuto.exec.words import words_of
from tenuto.kernels.sampling import OPTIONS, Choice, Options, uniforms

NOT_ASKED = -1


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


class RowOptions:
    """Sampling options by row id, in host arrays [rows]. The thread that runs steps sets a row's options when a plan
    lists the row in `Plan.sampling`.

    Invariant: `_asking` has the rows with biases, masked or allowed ids, penalties or log-probabilities. While it is
    empty, steps skip these.
    """

    def __init__(self, rows: int, vocab: int) -> None:
        self.records: Options = np.zeros(rows, OPTIONS)  # of all rows; the owner reads them
        self.records["top_p"] = 1.0
        self._top = np.full(rows, NOT_ASKED)
        self._biased = np.zeros(rows, np.bool_)
        self._biases: dict[int, _Biases] = {}
        self._allowed: dict[int, Words] = {}
        self._named: dict[int, tuple[int, ...]] = {}
        self._asking: set[int] = set()
        self._vocab = vocab
        self.counts = TokenCounts()

    def start(self, row: int, new: RowSampling) -> None:
        """Sets the options of a row."""
        options = new.sampling
        self.records[row] = options.temperature, options.top_p, options.min_p, options.top_k, options.seed
        limited = options.logit_bias or options.allowed_ids or new.masked
        asks = options.penalised or limited or new.top is not None
        if not asks and row not in self._asking:
            return
        self._asking.add(row)  # first: if the rest fails, the next start of the row must reset it
        self.counts.start(row, new)
        self._top[row] = NOT_ASKED if new.top is None else new.top
        self._biased[row] = bool(options.logit_bias or new.masked)
        self._biases.pop(row, None)
        self._allowed.pop(row, None)
        self._named.pop(row, None)
        if options.allowed_ids:
            self._allowed[row] = words_of(options.allowed_ids, self._vocab)
        if new.named:
            self._named[row] = new.named
        if self._biased[row]:
            self._biases[row] = self._biases_of(new)
        if not asks:
            self._asking.discard(row)

    def _biases_of(self, new: RowSampling) -> _Biases:
        after = dict(new.sampling.logit_bias)
        before = after | dict.fromkeys(new.masked, -np.inf)
        return _Biases(_Added(before, self._vocab), _Added(after, self._vocab), new.masked_before)

    @property
    def plain(self) -> bool:
        """Whether no row has biases, masked or allowed ids, penalties or log-probabilities."""
        return not self._asking

    def draws(self, rows: Longs) -> bool:
        """Whether any of `rows` is not greedy."""
        return bool(self.records["temperature"][rows].any())

    def choice(self, rows: Longs, positions: Longs) -> Choice:
        """Returns the parameters for choosing the tokens of `rows` at `positions`, both int64 [n]."""
        given = {name: np.ascontiguousarray(self.records[name][rows]) for name in OPTIONS.names or ()}
        return Choice(uniform=uniforms(given.pop("seed"), positions), **given)

    def edit(self, logits: Logits, rows: Longs, positions: Longs, guesses: Longs) -> None:
        """Applies biases, masks and penalties to the logits of `rows` in place. `guesses`: see `TokenCounts`."""
        biased = np.flatnonzero(self._biased[rows])
        if len(biased):
            self._add_biases(logits, rows, positions, biased)
        self.counts.penalise(logits, rows, guesses)

    def _add_biases(self, logits: Logits, rows: Longs, positions: Longs, biased: Longs) -> None:
        added = []
        for place in biased.tolist():
            biases = self._biases[int(rows[place])]
            added.append(biases.before if positions[place] < biases.masked_before else biases.after)
        places = np.repeat(biased, [len(each.tokens) for each in added])
        tokens, values = (np.concatenate(parts) for parts in zip(*((a.tokens, a.values) for a in added), strict=True))
        logits.put(places, tokens, logits.at(places, tokens) + values)

    def allowed(self, rows: Longs) -> list[tuple[int, Words]]:
        """Returns the indices in `rows` of those with allowed ids, each with a bit for every allowed token."""
        if not self._allowed:
            return []
        return [(i, self._allowed[row]) for i, row in enumerate(rows.tolist()) if row in self._allowed]

    def named(self, rows: Longs) -> list[tuple[int, ...]]:
        """Returns the ids whose log-probabilities each of `rows` names."""
        return [self._named.get(row, ()) for row in rows.tolist()] if self._named else []

    def scored(self, rows: Longs) -> tuple[Longs, int]:
        """Returns the indices in `rows` of those that want log-probabilities, and the largest number of top tokens that
        any of them wants."""
        most = self._top[rows]
        return np.flatnonzero(most != NOT_ASKED), int(most.max(initial=0))
