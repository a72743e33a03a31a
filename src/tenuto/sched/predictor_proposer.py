"""Guesses of the model's own head for multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tenuto.sched.guesses import NO_GUESSES, Guesses, NextStep, Proposer, StepTimes, chosen_counts
from tenuto.session.turn import Turn

PREDICTOR = "mtp"
"""The source of these guesses."""
MOST = 6
"""The most guesses of a turn that the head is asked for at once."""
EVERY = 32
"""A turn for which guesses do not pay asks for some after so many tokens, to see whether they do now."""
TRIED = 2
"""The number of guesses that it asks for then."""
GROUPS = np.array([0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97])
"""Guesses are grouped by the head's probabilities: these are the highest of each group but the last."""
BY_GROUP = (0.05, 0.2, 0.35, 0.5, 0.65, 0.75, 0.85, 0.93, 0.98)
BY_NUMBER = (0.7, 0.6, 0.5, 0.4, 0.4, 0.4)
"""Assumed shares of right guesses before any was made: by group, and by their number among a turn's guesses."""


class Shares:
    """Shares of right guesses, in groups. Later guesses count more."""

    def __init__(self, priors: Sequence[float], most: int) -> None:
        """A prior counts as much as four guesses; `most`: the number of guesses from which earlier ones count less."""
        self.values = list(priors)
        self._tried = [4] * len(priors)
        self._most = most

    def note(self, group: int, *, right: bool) -> None:
        """Counts a guess, which followed right ones."""
        self._tried[group] = tried = min(self._most, self._tried[group] + 1)
        self.values[group] += (right - self.values[group]) / tried


@dataclass(slots=True)
class Outlook:
    """The head's guesses for a turn when it had `length` tokens. `groups`: those of the guesses' probabilities;
    `by_number`: the turn's own shares; `asked`: the turn's length when guesses were last asked for."""

    by_number: Shares
    length: int = 0
    tokens: Sequence[int] = ()
    groups: list[int] = field(default_factory=list)
    asked: int = 0


class _TimesWithHead(StepTimes):
    """The times of steps that compute guesses which the head first has to make."""

    def __init__(self, step: NextStep, each: float) -> None:
        """`each`: what a guess takes, in seconds."""
        super().__init__()
        self._step, self._each = step, each

    def factors(self, rows: int, further: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        times = self._step.times
        one = times.seconds(rows, np.zeros(1))[0]
        guesses = further - (self._step.tokens - self._step.rows)
        return times.factors(rows, further) + (guesses * self._each / one if one > 0 else 0.0)


class PredictorProposer(Proposer):
    """Proposes what the head guessed after the turn's last step, if it was asked to.

    It guesses only where guesses are expected to pay, by the times of steps and of the head, and by how many of the
    turn's guesses were right. How likely a guess is right is learned from those with similar probabilities.
    """

    def __init__(self) -> None:
        self._by_group = Shares(BY_GROUP, 512)
        self._by_number = Shares(BY_NUMBER, 512)
        self._seconds: dict[int, float] = {}  # the head's for a guess of each of its rows, by the rows' bit length

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:  # noqa: ARG002 - the head was asked before
        """See `Proposer`."""
        return [self._guess(turn, limit) for turn, limit in zip(turns, limits, strict=True)]

    def asks(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[int]:
        """Returns how many guesses of each turn the head should make, at most `limits[i]`, for the step after this one,
        which is expected to be like `step`."""
        outlooks = [self._outlook(turn) for turn in turns]
        hopes = [each.by_number.values[: min(limit, MOST)] for each, limit in zip(outlooks, limits, strict=True)]
        rows = len(turns)
        times = _TimesWithHead(step, self._seconds.get(rows.bit_length(), 0.0) / rows)
        counts = chosen_counts(replace(step, times=times), [Guesses([0] * len(each), each) for each in hopes])
        for i, (turn, outlook, limit) in enumerate(zip(turns, outlooks, limits, strict=True)):
            if not counts[i] and turn.length - outlook.asked >= EVERY:
                counts[i] = min(TRIED, limit)
            if counts[i]:
                outlook.asked = turn.length
        return counts

    def note(self, turn: Turn, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Takes note of the head's guesses of the tokens after a turn's last one, and of their probabilities."""
        outlook = self._outlook(turn)
        outlook.length, outlook.tokens = turn.length, tokens
        outlook.groups = np.searchsorted(GROUPS, chances).tolist()

    def took(self, rows: int, passes: int, seconds: float) -> None:
        """Takes note of the time of the head's guesses for `rows` rows, in `passes` passes."""
        key, each = rows.bit_length(), seconds / passes
        self._seconds[key] = self._seconds.get(key, each) * 0.8 + each * 0.2

    def _outlook(self, turn: Turn) -> Outlook:
        """Returns the turn's outlook, after its guesses have been compared with what it said since."""
        outlook = turn.outlook
        if not isinstance(outlook, Outlook):
            turn.outlook = outlook = Outlook(Shares(self._by_number.values, 32), asked=turn.length - EVERY)
        said = turn.tokens(outlook.length, turn.length) if outlook.tokens else ()
        if len(said):
            for number, (token, guess) in enumerate(zip(said, outlook.tokens, strict=False)):
                right = token == guess
                self._by_group.note(outlook.groups[number], right=right)
                self._by_number.note(number, right=right)
                outlook.by_number.note(number, right=right)
                if not right:
                    break
            outlook.tokens = ()
        return outlook

    def _guess(self, turn: Turn, limit: int) -> Guesses:
        outlook = self._outlook(turn)
        if not outlook.tokens:
            return NO_GUESSES
        chances = [self._by_group.values[group] for group in outlook.groups]
        return Guesses(outlook.tokens, chances, PREDICTOR).first(limit)
