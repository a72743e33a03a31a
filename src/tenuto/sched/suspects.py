"""Finds the turns that make steps fail by bisection, so that a few do not slow down many."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tenuto.session.session import Turn

MAX_FAILURES = 3
"""Steps that may fail with a turn alone in them before that turn is ended."""


class Suspects:
    """Turns that were in a failed step and have not reached its end since, in groups.

    While there are suspects that can run, each step runs one group alone. A group that fails is split in two; a
    turn that has computed everything the failed step was to compute of it is cleared. So k turns that make every step
    fail, among n, cost at most k * (ceil(log2 n) + `MAX_FAILURES`) failed steps, and no more partial steps, except
    those that recompute what a turn with state lost when it went back to a checkpoint.

    A suspect that waits, in its row or for one, does not hold up other turns: it may wait for what they compute.

    Invariant: a turn is in at most one group.
    """

    def __init__(self) -> None:
        self._groups: list[list[Turn]] = []  # the last runs first

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __contains__(self, turn: Turn) -> bool:
        return any(turn in group for group in self._groups)

    def rows(self, held: Collection[int]) -> list[int]:
        """The rows that the next step may run; empty if no suspect can run, so that all others may. The rows `held`
        compute nothing for now."""
        for group in reversed(self._groups):
            rows = [row for row in map(_row, group) if row >= 0 and row not in held]
            if rows:
                return rows
        return []

    def step_failed(self, turns: Sequence[Turn], *, alone: bool) -> None:
        """A step failed with these turns, still open, in it; `alone`: with nobody else."""
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
        """Clear the turns that have reached the end of their failed step, and forget those that have ended."""
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
    memory = turn.session.memory.turn
    return -1 if turn.state.ended or memory is None else memory.row
