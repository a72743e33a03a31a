"""Counts the tokens that rows with penalties have seen."""

from __future__ import annotations

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import RowSampling
from tenuto.base.sampling import Sampling
from tenuto.exec.forward import Logits, Longs
from tenuto.kernels.sampling import penalise


class SeenTokens:
    """The distinct tokens of one row and the number of times each occurs in its output. `_tokens` and `_counts`, int64,
    are filled up to the length of `_places`, which maps each token to its index there."""

    def __init__(self, new: RowSampling) -> None:
        none = np.zeros(0, np.int64)
        prompt = np.asarray(new.prompt if new.prompt is not None else none, np.int64)
        output = np.asarray(new.output if new.output is not None else none, np.int64)
        self.options: Sampling = new.sampling
        self._tokens, places = np.unique(np.concatenate((prompt, output)), return_inverse=True)
        self._counts = np.bincount(places[len(prompt) :], minlength=len(self._tokens))
        self._places = {token: place for place, token in enumerate(self._tokens.tolist())}

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            more = np.zeros(max(16, place), np.int64)
            self._tokens, self._counts = np.concatenate((self._tokens, more)), np.concatenate((self._counts, more))
        self._tokens[place] = token
        self._counts[place] += 1

    @property
    def tokens(self) -> Longs:
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> Longs:
        return self._counts[: len(self._places)]


class TokenCounts:
    """Counts tokens for rows with penalties. Only the thread that runs steps uses it."""

    def __init__(self) -> None:
        self._rows: dict[int, SeenTokens] = {}

    def __len__(self) -> int:
        """Number of rows whose tokens are counted."""
        return len(self._rows)

    def start(self, row: int, new: RowSampling) -> None:
        """Starts a row anew, with the prompt and output tokens of `new`."""
        self._rows.pop(row, None)
        if new.sampling.penalised:
            self._rows[row] = SeenTokens(new)

    def penalise(self, logits: Logits, rows: Longs) -> None:
        """Applies the penalties of `rows`, int64 [outputs], to their logits. Raises `InvariantError` if a row with
        penalties occurs twice."""
        found = [(place, self._rows[row]) for place, row in enumerate(rows.tolist()) if row in self._rows]
        if not found:
            return
        if len({id(seen) for _, seen in found}) < len(found):
            raise InvariantError("a row with penalties samples more than one token in a step")
        tokens, counts = (
            np.concatenate(parts) for parts in zip(*((s.tokens, s.counts) for _, s in found), strict=True)
        )
        sizes = [len(seen.tokens) for _, seen in found]
        places = np.repeat([place for place, _ in found], sizes)
        each = [
            (s.options.repetition_penalty, s.options.presence_penalty, s.options.frequency_penalty) for _, s in found
        ]
        penalties = np.repeat(np.array(each, np.float32), sizes, axis=0).T
        logits.put(places, tokens, penalise(logits.at(places, tokens), counts, *penalties))

    def add(self, rows: Longs, tokens: Longs) -> None:
        """Records that row `rows[i]` has sampled `tokens[i]`."""
        if self._rows:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if row in self._rows:
                    self._rows[row].add(token)
