"""Guesses of a draft model, beside guesses that cost nothing."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import StepFailed
from tenuto.base.plan import Executor, MemoryPart
from tenuto.base.sampling import Sampling
from tenuto.memory.pool import Holder, Pool
from tenuto.sched.draft_model import DraftModel, DraftWork
from tenuto.sched.draft_tables import DraftTable, common
from tenuto.sched.guesses import NO_GUESSES, WORTH, Guesses, NextStep, Proposer, chosen_counts, prospects
from tenuto.session.turn import Turn

DRAFT = "draft"
"""The source of these guesses."""
PRIOR = 0.7
"""The assumed share of right guesses before any was tried."""
AT_ONCE = 16
"""Up to so many tokens that the draft model lacks are computed with a guess; more are computed before, in pieces."""
PIECES = (16, 64, 512)
"""The fewest tokens of such pieces in a step, their number before times are measured, and the most."""
EVERY = 8
"""After a step for which guesses did not pay, so many calls go by until they are considered again."""
FADING = 0.99
"""What remains of the counts of right and wrong guesses whenever guesses were considered and did not pay. So a model
that does not pay is tried again now and then."""
OUTPUT = 64.0
"""The assumed length of an output before any was committed."""


@dataclass(slots=True)
class Tries:
    """How often guesses were right."""

    right: float = 0.0
    tried: float = 0.0

    def note(self, right: int, tried: int, most: float) -> None:
        """Counts guesses; `most`: the number from which earlier ones count less."""
        self.right, self.tried = self.right + right, self.tried + tried
        if self.tried > most:
            self.fade(0.5)

    def fade(self, share: float) -> None:
        """Lets what has been counted so far count less."""
        self.right, self.tried = self.right * share, self.tried * share

    def chance(self, prior: float, weight: float) -> float:
        """Returns the share of right guesses; `prior` counts as `weight` guesses."""
        return (self.right + weight * prior) / (self.tried + weight)


@dataclass(slots=True)
class Followed:
    """A turn whose tokens the draft model follows. `guesses` are its tokens from position `length` on, as guessed
    before. The first `checked` tokens of `table` are known to be the turn's. `sampling`: how guesses are chosen."""

    table: DraftTable
    sampling: Sampling
    length: int
    checked: int
    guesses: array[int] = field(default_factory=lambda: array("i"))
    tries: Tries = field(default_factory=Tries)


@dataclass(slots=True)
class Candidate:
    """A turn for which at most `limit` tokens may be guessed, each right with the same `chance`. `lacking`: the tokens
    that the draft model has to compute before it guesses the next one."""

    index: int
    turn: Turn
    followed: Followed
    limit: int
    chance: float
    lacking: array[int]


class DraftProposer(Proposer):
    """Guesses what a draft model says next, for turns for which another proposer, whose guesses cost nothing, has fewer
    that can be expected to be right, and as many as pay by the times measured.

    The tokens of a turn are all that it goes by. Before it guesses, it compares them with those that the draft model
    has computed, and cuts these back to the common beginning. So it follows whatever happens to a session.
    """

    def __init__(self, model: DraftModel, beside: Proposer) -> None:
        self._model = model
        self._beside = beside
        self._turns: WeakKeyDictionary[Turn, Followed] = WeakKeyDictionary()
        self._tries = Tries()
        self._usual = OUTPUT  # the usual length of an output
        self._paused = 0  # calls until guesses are considered again

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:
        """See `Proposer`. Computes steps of the draft model; a failed one only costs guesses."""
        found = self._beside.propose(turns, limits, step)
        self._paused -= 1
        if self._paused >= 0 or not self._model.may_compute():
            return found
        candidates = self._candidates(turns, limits, found)
        close = [each for each in candidates if len(each.lacking) <= AT_ONCE]
        count, gain = self._best(candidates, found, step)
        pieces: list[DraftWork] = []
        if len(close) < len(candidates) and gain > WORTH:
            pieces = self._pieces([each for each in candidates if len(each.lacking) > AT_ONCE], step, gain)
            count, gain = self._best(close, found, step)
        if gain <= WORTH:
            close = []
            self._did_not_pay(candidates, pieces)
        self._compute(close, count, pieces)
        for each in close:
            guesses = each.followed.guesses[: min(count, each.limit)]
            if guesses:
                found[each.index] = Guesses(guesses, [each.chance] * len(guesses), DRAFT)
        return found

    def committed(self, turn: Turn) -> None:
        """See `Proposer`."""
        self._beside.committed(turn)
        self._usual += (len(turn.output) - self._usual) / 16

    def forget(self, tenant: str) -> None:
        """See `Proposer`."""
        self._beside.forget(tenant)
        self._model.tables.clear()

    def _did_not_pay(self, candidates: Sequence[Candidate], pieces: Sequence[DraftWork]) -> None:
        if candidates and not pieces:
            self._paused = EVERY
            self._tries.fade(FADING)
            for each in candidates:
                each.followed.tries.fade(FADING)

    def _candidates(self, turns: Sequence[Turn], limits: Sequence[int], found: Sequence[Guesses]) -> list[Candidate]:
        """Returns the turns of which the draft model can be expected to guess more tokens than were found."""
        usual, candidates = self._tries.chance(PRIOR, 8), []
        for index, (turn, limit, beside) in enumerate(zip(turns, limits, found, strict=True)):
            followed = self._follow(turn)
            most = min(limit, self._model.context - turn.length)
            chance = followed.tries.chance(usual, 4)
            if most > 0 and _expected(np.array(chance), np.array(most)) > sum(accumulate(beside.chances, mul)):
                lacking = (
                    turn.tokens(len(followed.table.tokens), turn.length)
                    + followed.guesses[max(0, len(followed.table.tokens) - turn.length) :]
                )
                candidates.append(Candidate(index, turn, followed, most, chance, lacking))
        return candidates

    def _follow(self, turn: Turn) -> Followed:
        """Compares a turn's tokens with its guesses and with those that the draft model has computed, and cuts these
        back to the tokens that both have. At least one is left to compute, after which the next is guessed."""
        followed, length = self._turns.get(turn), turn.length
        if followed is None:
            plain = replace(turn.params.sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
            table = self._model.tables.of(turn.session, turn.tokens(0, length))
            self._turns[turn] = followed = Followed(table, plain, length, len(table.tokens))
        guesses, new = followed.guesses, turn.tokens(followed.length, length)
        if guesses and new:
            right = common(guesses, new)
            tried = min(right + 1, len(guesses), len(new))
            followed.tries.note(right, tried, 64)
            self._tries.note(right, tried, 512)
            followed.guesses = guesses[len(new) :] if right == len(new) else array("i")
        followed.length = length
        table = followed.table
        checked = min(followed.checked, len(table.tokens))
        same = checked + common(table.tokens[checked:], turn.tokens(checked, length) + followed.guesses)
        if (kept := min(same, length + len(followed.guesses) - 1)) < len(table.tokens):
            table.cut(kept)
        followed.checked = min(len(table.tokens), length)
        return followed

    def _best(self, candidates: Sequence[Candidate], found: Sequence[Guesses], step: NextStep) -> tuple[int, float]:
        """Returns the number of guesses for each of the candidates, of which all have what guessing needs, with which
        the step samples the most tokens per second, and how many times as many as with those found."""
        if not candidates:
            return 0, 0.0
        drafted = {each.index for each in candidates}
        others = [NO_GUESSES if index in drafted else each for index, each in enumerate(found)]
        beside = sum(chosen_counts(step, others))
        expected = prospects(step, others)[1][beside]
        counts = np.arange(1, max(each.limit for each in candidates) + 1)
        each_limit = np.array([each.limit for each in candidates])
        guessed = np.minimum(counts, each_limit[:, None])  # [candidates, counts]
        gains = _expected(np.array([each.chance for each in candidates])[:, None], guessed).sum(axis=0)
        have = np.array([len(each.followed.guesses) for each in candidates])
        steps = np.maximum(guessed - have[:, None], 0).max(axis=0)
        tokens = sum(min(len(each.lacking), AT_ONCE) for each in candidates)
        drafting = self._model.seconds(len(candidates), tokens, steps)
        rates = (expected + gains) / (_main_seconds(step, step.further + beside + guessed.sum(axis=0)) + drafting)
        best = int(rates.argmax())
        plain = prospects(step, found)[1]
        without = (plain / _main_seconds(step, step.further + np.arange(len(plain)))).max()
        return int(counts[best]), float(rates[best] / without)

    def _pieces(self, behind: Sequence[Candidate], step: NextStep, gain: float) -> list[DraftWork]:
        """Returns the tokens to compute for turns of which the draft model lacks many, if it can be expected to save
        more time than they take. They take no longer than the step itself."""
        alone, each_token = float(_main_seconds(step, np.array([step.further]))[0]), self._model.prompt_seconds
        fewest, usual, most = PIECES
        left = min(most, max(fewest, int(alone / each_token))) if each_token else usual
        pieces = []
        for each in behind:
            rest = min(each.turn.last_position + 1 - each.turn.length, max(self._usual, len(each.turn.output)))
            if left and len(each.lacking) * each_token <= rest * alone * (1 - 1 / gain):
                piece = each.lacking[: min(left, len(each.lacking) - 1)]
                pieces.append(DraftWork(each.followed.table, piece, None))
                left -= len(piece)
        return pieces

    def _compute(self, close: Sequence[Candidate], count: int, pieces: Sequence[DraftWork]) -> None:
        """Has the draft model compute `pieces`, and guess up to `count` tokens of each of the other turns."""
        work = [
            (each, DraftWork(each.followed.table, each.lacking, each.followed.sampling))
            for each in close
            if len(each.followed.guesses) < min(count, each.limit)
        ]
        while work or pieces:
            try:
                guessed = self._model.compute([*(part for _, part in work), *pieces])
            except StepFailed:
                return
            pieces, before, work = (), work, []
            for (each, _), token in zip(before, guessed, strict=False):
                if token is not None and self._model.is_token(token):
                    guesses = each.followed.guesses
                    guesses.append(token)
                    if len(guesses) < min(count, each.limit):
                        part = DraftWork(each.followed.table, guesses[-1:], each.followed.sampling)
                        work.append((each, part))

    # -- memory

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (*self._beside.pools, *self._model.tables.pools)

    def holders(self) -> Iterable[Holder]:
        return (*self._beside.holders(), *self._model.tables)

    def memories(self) -> Iterable[tuple[Sequence[Pool], Executor]]:
        return (*self._beside.memories(), *self._model.memories())

    def release(self, parts: Collection[MemoryPart]) -> None:
        self._beside.release(parts)
        self._model.release(parts)

    def restore(self, parts: Collection[MemoryPart]) -> None:
        self._beside.restore(parts)
        self._model.restore(parts)

    def close(self) -> None:
        self._beside.close()
        self._model.close()


def _expected(chance: npt.NDArray[np.float64], count: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns how many of the first `count` guesses can be expected to be right if each is right with this `chance`,
    less than 1, and those before it are. Arrays are broadcast."""
    return np.asarray(chance * (1 - chance**count) / (1 - chance))


def _main_seconds(step: NextStep, further: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns the times of the step with numbers of `further` tokens, float64 [n]; as long as none is measured, in
    steps without any."""
    given = further.astype(np.float64)
    seconds = step.times.seconds(step.rows, given)
    return seconds if seconds.any() else step.times.factors(step.rows, given)
