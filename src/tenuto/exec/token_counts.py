"""Counts the tokens that rows with penalties have seen."""

from __future__ import annotations

import numpy as np

from tenuto.base.plan import RowSampling
from tenuto.base.sampling import Sampling
from tenuto.exec.logits import Logits, Longs
from tenuto.kernels.sampling import penalise

NO_GUESS = -1


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

    def after(self, guesses: list[int]) -> tuple[Longs, Longs]:
        """Returns the distinct tokens and their counts as they are after `guesses` were added."""
        tokens, counts = self._tokens[: len(self._places)], self._counts[: len(self._places)]
        if not guesses:
            return tokens, counts
        new = [token for token in dict.fromkeys(guesses) if token not in self._places]
        places = {token: len(tokens) + i for i, token in enumerate(new)}
        counts = np.concatenate((counts, np.zeros(len(new), np.int64)))
        np.add.at(counts, [places[token] if token in places else self._places[token] for token in guesses], 1)
        return np.concatenate((tokens, np.array(new, np.int64))), counts


class TokenCounts:
    """Counts tokens for rows with penalties. `guesses`: see `row_edits.Edits`."""

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

    def penalise(self, logits: Logits, rows: Longs, guesses: Longs) -> None:
        """Applies the penalties of `rows`, int64 [outputs], to their logits. Guesses before an output count."""
        found: list[tuple[int, Sampling]] = []
        seen: list[tuple[Longs, Longs]] = []
        before: list[int] = []
        for place, (row, guess) in enumerate(zip(rows.tolist(), guesses.tolist(), strict=True)):
            before = [] if guess == NO_GUESS else [*before, guess]
            if (of_row := self._rows.get(row)) is not None:
                found.append((place, of_row.options))
                seen.append(of_row.after(before))
        if not found:
            return
        tokens, counts = (np.concatenate(parts) for parts in zip(*seen, strict=True))
        sizes = [len(ids) for ids, _ in seen]
        places = np.repeat([place for place, _ in found], sizes)
        each = [(o.repetition_penalty, o.presence_penalty, o.frequency_penalty) for _, o in found]
        penalties = np.repeat(np.array(each, np.float32), sizes, axis=0).T
        logits.put(places, tokens, penalise(logits.at(places, tokens), counts, *penalties))

    def add(self, rows: Longs, tokens: Longs, guesses: Longs) -> None:
        """Records that row `rows[i]` has sampled `tokens[i]`, unless a guess before it was wrong."""
        if not self._rows:
            return
        right, last = True, NO_GUESS
        for row, token, guess in zip(rows.tolist(), tokens.tolist(), guesses.tolist(), strict=True):
            right = guess == NO_GUESS or (right and guess == last)
            last = token
            if right and row in self._rows:
                self._rows[row].add(token)
