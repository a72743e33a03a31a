"""Guessed tokens, and how many of them a step computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

from tenuto.base.plan import Executor, MemoryPart
from tenuto.memory.pool import Holder, Pool
from tenuto.session.turn import Turn


@dataclass(frozen=True, slots=True)
class Guesses:
    """Tokens that may follow a turn's last token, the chance that each is right if those before it are, and the name
    of the source that they come from."""

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    source: str = ""

    def after(self, count: int) -> Guesses:
        """Returns what remains if the first `count` tokens are not guessed, although the others depend on them."""
        if not count:
            return self
        if len(self.tokens) <= count:
            return NO_GUESSES
        first = np.prod(self.chances[: count + 1]).item()
        return Guesses(self.tokens[count:], (first, *self.chances[count + 1 :]), self.source)

    def first(self, count: int) -> Guesses:
        """Returns the first `count` guesses."""
        return Guesses(self.tokens[:count], self.chances[:count], self.source)


NO_GUESSES = Guesses()

KNOTS = np.array([*range(17), 20, 24, 32, 48, 64], np.float64)
"""Numbers of tokens, besides one of each row, for which step times are kept; those of others are estimated."""
PRIOR_SLOPE = 0.2
"""What each further token adds to the time of a step with one row, as a part of it, as long as nothing is measured.
Rows share it by the square root of their number."""
LEARNT = 0.1
"""The least part of a deviation by which the time of a number of tokens changes, relative to others. It is larger for
the first measurements."""
FOLLOWED = 0.25
"""The part of a deviation by which the time of all steps with as many rows changes: contexts grow, and other programs
take cores."""
WORTH = 1.05
"""Guesses are computed only if a step then samples so many times the tokens per second: chances and times are
estimates."""


class _Factors:
    """The times of steps with about as many rows at `KNOTS`, relative to no further tokens. `scale`: that time."""

    def __init__(self, rows: int, scale: float) -> None:
        self.scale = scale
        self._slope = PRIOR_SLOPE / np.sqrt(rows)
        self._factors = np.ones(len(KNOTS))
        self._measured = np.zeros(len(KNOTS))  # how often
        self._measured[0] = 1  # by definition

    def at(self, further: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns factors for numbers of `further` tokens: between those that were measured by interpolation."""
        known = self._measured > 0
        knots = KNOTS[known]
        beyond: npt.NDArray[np.float64] = np.maximum(further - knots[-1], 0) * self._slope
        return beyond + np.interp(further, knots, self._factors[known])

    def note(self, further: int, seconds: float) -> None:
        if not further:  # most steps; NumPy would take longer than the rest of this
            self.scale *= min(4.0, max(0.25, seconds / self.scale)) ** FOLLOWED
            return
        deviation = seconds / (self.scale * self.at(np.array([further], np.float64))[0])
        knot = int(np.abs(KNOTS - further).argmin())
        if not self._measured[knot]:
            self._factors[knot] = self.at(KNOTS[knot : knot + 1])[0]
        self._measured[knot] += 1
        rate = max(LEARNT, 1 / self._measured[knot])
        self._factors[knot] *= deviation**rate
        self.scale *= min(4.0, max(0.25, deviation)) ** (FOLLOWED * (1 - rate))


class StepTimes:
    """Measured times of steps by the number of their rows and of further tokens, relative to steps without any.

    Rows are grouped by powers of two. The time of a step is a scale, which follows recent steps quickly, times a factor
    for its number of tokens, which is learned slowly. So factors stay comparable although each number of tokens is
    measured at another moment. A number that was never measured is taken for cheap, and soon measured.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Factors] = {}

    def factors(self, rows: int, further: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the times of steps of `rows` rows and numbers of `further` tokens, relative to none, float64 [n]."""
        group = self._groups.get(rows.bit_length())
        return group.at(further) if group is not None else _Factors(rows, 1.0).at(further)

    def seconds(self, rows: int, further: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the times of steps of `rows` rows and numbers of `further` tokens, float64 [n]. Where no step with
        about as many rows was measured, that of the nearest number stands for it; without any, times are 0."""
        if not self._groups:
            return np.zeros(len(further))
        group = self._groups[min(self._groups, key=lambda measured: abs(measured - rows.bit_length()))]
        return group.scale * group.at(further)

    def note(self, rows: int, tokens: int, seconds: float) -> None:
        """Takes note of a step of `tokens` tokens in total that took `seconds`."""
        further = tokens - rows
        if further > KNOTS[-1] or seconds <= 0:
            return
        group = self._groups.get(rows.bit_length())
        if group is None:
            group = _Factors(rows, 1.0)
            group.scale = seconds / group.at(np.array([further], np.float64))[0]
            self._groups[rows.bit_length()] = group
        group.note(further, seconds)


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step that guesses would join: without them it has `rows` rows and `tokens` tokens, after which it samples
    `sampled` tokens. `times`: those of steps measured so far."""

    times: StepTimes
    rows: int
    tokens: int
    sampled: int

    @property
    def further(self) -> int:
        """The number of its tokens besides one of each row."""
        return self.tokens - self.rows


class Proposer(ABC):
    """Guesses the next tokens of turns; they are computed ahead and compared with the sampled ones."""

    @abstractmethod
    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:
        """Returns at most `limits[i]` guesses for each turn, possibly none. May be called several times for a step."""

    def committed(self, turn: Turn) -> None:
        """Takes note of the output of a turn that was committed."""
        return

    def forget(self, tenant: str) -> None:
        """Forgets the outputs of all turns of a tenant, and gives up all units of `pools`."""
        return

    def memories(self) -> Iterable[tuple[Sequence[Pool], Executor]]:
        """Returns `pools`, except those of released memory, by the executor that has their units."""
        return ()

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Its own pools, of memory that only serves guesses. No unit of them is touched between calls."""
        return ()

    def holders(self) -> Iterable[Holder]:
        """Returns all holders of units of `pools`."""
        return ()

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Gives memory back to the system, as the engine does at the same time; see `Executor.release`."""
        return

    def restore(self, parts: Collection[MemoryPart]) -> None:
        """Takes the memory of `parts` again. A failure is logged, and costs nothing but guesses."""
        return

    def close(self) -> None:
        """Releases everything; it is not used afterwards."""
        return


def prospects(step: NextStep, guesses: Sequence[Guesses]) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Returns the rows of all guesses, those that are likeliest to become output first, and the number of tokens that
    the step may be expected to sample with the first 0, 1, 2, ... of them, float64 [guesses + 1]. A guess adds a token
    if it and those before it are right."""
    chances = [list(accumulate(each.chances, mul)) for each in guesses]
    likeliest = sorted(((-chance, row) for row, each in enumerate(chances) for chance in each))
    return [row for _, row in likeliest], step.sampled + np.cumsum([0.0, *(-chance for chance, _ in likeliest)])


def chosen_counts(step: NextStep, guesses: Sequence[Guesses]) -> list[int]:
    """Returns how many of each row's guesses a step computes so that it samples the most tokens per second.

    Beside prompts, guesses are weighed by the time that they add, as if the prompts were not there: a long step does
    not become a reason to compute guesses that would not be worth their time in a step of their own."""
    likeliest, expected = prospects(step, guesses)
    counts = [0] * len(guesses)
    if not likeliest:
        return counts
    times = step.times.factors(step.rows, step.further + np.arange(len(expected), dtype=np.float64))
    rates = expected / (1 + times - times[0])
    rates[0] *= WORTH
    for row in likeliest[: int(np.argmax(rates))]:
        counts[row] += 1
    return counts
