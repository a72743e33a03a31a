"""The witness's next tokens: functions of the hash of the history, and of the row's options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tenuto.base.plan import InputScores, Logprobs, Plan, RowSampling, TokenMasks, Words
from tenuto.base.sampling import LEAST_LOGPROB
from tenuto.exec.witness_hashes import Hashes, Longs, next_allowed, next_unmasked, seeded
from tenuto.exec.words import words_of
from tenuto.kernels.ragged import ragged_arange

_ALL = np.uint32(0xFFFFFFFF)


class WitnessSampler:
    """Samples for the rows of a witness. `last`: each row's latest sample."""

    def __init__(self, vocab_size: int, rows: int) -> None:
        self._vocab_size = vocab_size
        self.last = np.zeros(rows, np.int64)
        self._seeds = np.zeros(rows, np.uint64)  # of each row's turn, times `MULTIPLIER`
        self._asking: dict[int, RowSampling] = {}  # rows with limited ids or log-probabilities

    def set_options(self, sampling: Iterable[tuple[int, RowSampling]]) -> None:
        """Sets the options of rows."""
        for row, new in sampling:
            self._seeds[row] = 0 if new.sampling.greedy else seeded(0, new.sampling.seed)
            self._asking.pop(row, None)
            if new.masked or new.sampling.allowed_ids or new.top is not None:
                self._asking[row] = new

    def lose(self, rows: list[int]) -> None:
        """Forgets the options of rows and makes their seeds wrong, so that sampling without new options changes the
        output."""
        self._seeds[rows] = ~self._seeds[rows]
        for row in rows:
            self._asking.pop(row, None)

    def sample(
        self, plan: Plan, rows: Longs, stops: Longs, hashes: Hashes
    ) -> tuple[npt.NDArray[np.int32], Logprobs | None]:
        """Returns the tokens that follow the last `plan.samples` hashes of each row, which end before `stops`, and
        their log-probabilities if any row asks for them."""
        samples = plan.samples.astype(np.int64)
        owner = np.repeat(np.arange(len(rows)), samples)
        within = ragged_arange(samples)
        sampled = hashes[stops[owner] - samples[owner] + within] ^ self._seeds[rows[owner]]
        tokens = self._next_tokens(sampled)
        if self._asking or plan.masks:
            positions = (plan.starts + plan.counts - samples)[owner] + within + 1
            self._mask(rows[owner], positions, sampled, tokens, plan.masks)
        self.last[rows[owner]] = tokens  # a row's last sample wins
        return np.asarray(tokens, np.int32), self._scored(rows[owner], tokens) if self._asking else None

    def _next_tokens(self, states: Hashes) -> Longs:
        mixed = (states >> np.uint64(17)) ^ (states >> np.uint64(41))
        return (mixed % np.uint64(self._vocab_size)).astype(np.int64)

    def _mask(self, rows: Longs, positions: Longs, states: Hashes, tokens: Longs, masks: Sequence[TokenMasks]) -> None:
        """Replaces, in `tokens`, those that masked ids or `masks` do not allow at their positions."""
        allowed: dict[int, Words] = {}
        for each in masks:
            words = each.allowed.result()
            if words is not None:  # a mask of all tokens does not limit them
                allowed |= {i: mask for i, mask in enumerate(words, each.place) if not (mask == _ALL).all()}
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            asked = self._asking.get(row)
            masked = asked.masked if asked is not None and position < asked.masked_before else ()
            if asked is not None and asked.sampling.allowed_ids:
                allowed[i] = words_of(asked.sampling.allowed_ids, self._vocab_size)
            if i in allowed:
                tokens[i] = next_allowed(int(states[i]), self._vocab_size, masked, allowed[i])
            elif masked:
                tokens[i] = next_unmasked(int(states[i]), self._vocab_size, masked)

    def _scored(self, rows: Longs, tokens: Longs) -> Logprobs | None:
        most = [(asked.top if (asked := self._asking.get(row)) is not None else None) for row in rows.tolist()]
        places = np.array([i for i, n in enumerate(most) if n is not None], np.int32)
        if not len(places):
            return None
        width = min(1, max(n for n in most if n is not None))
        said = np.asarray(tokens[places], np.int32)
        return _certain(places, said, said, width, [self._asking[row].named for row in rows[places].tolist()])

    def score(self, scores: InputScores, hashes: Hashes) -> Logprobs:
        """Scores input tokens, with seed 0."""
        said = np.asarray(self._next_tokens(hashes[scores.offsets]), np.int32)
        return _certain(np.arange(len(said), dtype=np.int32), scores.targets, said, min(1, scores.top), scores.named)


def _certain(
    places: npt.NDArray[np.int32],
    tokens: npt.NDArray[np.int32],
    certain: npt.NDArray[np.int32],
    width: int,
    named: Sequence[tuple[int, ...]],
) -> Logprobs:
    """Returns the log-probabilities of `tokens`, and of the `named` ones, where the tokens `certain` have probability
    1, and with `width` 1 the latter as the likeliest."""
    chosen = np.where(tokens == certain, 0, LEAST_LOGPROB).astype(np.float32)
    others = np.full((len(certain), max(map(len, named), default=0)), LEAST_LOGPROB, np.float32)
    for row, ids in enumerate(named):
        others[row, [place for place, token in enumerate(ids) if token == certain[row]]] = 0
    return Logprobs(places, chosen, certain[:, None][:, :width], np.zeros((len(certain), width), np.float32), others)
