"""Bisection to find the turns that make steps fail, so that a few do not slow down many."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tenuto.session.turn import Turn

MAX_FAILURES = 3
"""Number of failed steps with a turn alone in them after which that turn is ended."""


class Suspects:
    """Turns that were in a failed step and have not yet reached the position where it would have ended, in groups.

    While any suspect can run, each step runs one group alone. A group that fails is split in two; a turn that reaches
    the end of its failed step is cleared. So if k of n turns make every step fail, this costs at most k * (ceil(log2 n)
    + `MAX_FAILURES`) failed steps and as many partial ones, not counting steps that recompute tokens after a turn with
    recurrent state went back to a checkpoint.

    A suspect that cannot run now does not block other turns, because it may be waiting for them.

    Invariant: a turn is in at most one group.
    """

    def __init__(self) -> None:
        self._groups: list[list[Turn]] = []  # the last runs first

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __contains__(self, turn: Turn) -> bool:
        return any(turn in group for group in self._groups)

    def rows(self, held: Collection[int]) -> list[int]:
        """Returns the rows of the next group to run; empty if no suspect can run, and then all other rows may. Rows in
        `held` cannot run."""
        for group in reversed(self._groups):
            rows = [row for row in map(_row, group) if row >= 0 and row not in held]
            if rows:
                return rows
        return []

    def step_failed(self, turns: Sequence[Turn], *, alone: bool) -> None:
        """Makes suspects of the turns of a failed step that are still open; `alone`: the step had no other turns."""
        self._groups = [[turn for turn in group if turn not in turns] for group in self._groups]
        for turn in turns:
            memory = turn.session.memory.turn
            turn.failed_end = memory.scheduled if memory is not None else 0
        if len(turns) == 1:
            turns[0].failures += int(alone)
            self._groups.append(list(turns))
        elif turns:
            middle = len(turns) // 2
            self._groups += [list(turns[middle:]), list(turns[:middle])]
        self._tidy()

    def step_succeeded(self) -> None:
        """Clears the turns that have reached the end of their failed step, and forgets those that have ended."""
        for group in self._groups:
            for turn in list(group):
                memory = turn.session.memory.turn
                if memory is not None and memory.computed >= turn.failed_end:
                    turn.failures = 0
                    group.remove(turn)
        self._tidy()

    def _tidy(self) -> None:
        groups = ([turn for turn in group if not turn.state.ended] for group in self._groups)
        self._groups = [group for group in groups if group]


def _row(turn: Turn) -> int:
    """Returns the row of a turn; -1 for a turn without one, or that has ended."""
    memory = turn.session.memory.turn
    return -1 if turn.state.ended or memory is None else memory.row
