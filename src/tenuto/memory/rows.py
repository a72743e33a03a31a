"""The registers of running turns: one row per turn, so that a step's bookkeeping is a few array operations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError

Longs = npt.NDArray[np.int64]

FAR = np.int64(2**62)
"""A position that no sequence reaches."""


class Rows:
    """Arrays indexed by row id, with one row per running turn. Positions count tokens of the whole sequence.

    The token line of a row::

        0 ........ computed ........ scheduled ........ known ........ expected .... limit
        | in memory, settled | in steps in flight | known tokens not | sampled by  | no token at or past this
        |                    |                    | in a step yet    | those steps | position is ever computed

    Invariant: computed <= scheduled <= limit, known <= expected, scheduled <= expected. `scheduled` and `expected` move
    when a plan is applied; `computed` and `known` when it settles. `mark` is the next position at which a checkpoint is
    wanted. The registers of a memory group are in that group.

    Recurrent state stands `kept` tokens before `scheduled`: the executor keeps the inputs of these tokens, and the
    row's next step absorbs those of them that were accepted. Invariant: `kept` > 0 only after a step with guesses, and
    while the row is not given back; only tokens that are part of the sequence, or in flight, are counted.
    """

    def __init__(self, rows: int) -> None:
        self.computed = np.zeros(rows, np.int64)
        self.scheduled = np.zeros(rows, np.int64)
        self.kept = np.zeros(rows, np.int64)  # written by `Memory.advance`, `Memory.reject` and `TurnMemory.attach`
        self.known = np.zeros(rows, np.int64)
        self.expected = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.mark = np.full(rows, FAR, np.int64)
        self.next_token = np.zeros(rows, np.int32)  # the last known token
        self.samples = np.zeros(rows, np.bool_)  # whether the turn generates
        self.uncertain = np.zeros(rows, np.bool_)  # whether lookahead tokens are in flight; the row waits for them
        self.step = np.zeros(rows, np.int64)  # the last step the row was in
        self.run = np.zeros(rows, np.int64)  # raised at every release, to distinguish late results from live ones
        self._free = list(range(rows - 1, -1, -1))

    def stands(self, rows: Longs | int) -> Longs:
        """Returns the lowest positions where `rows` may go on once their last steps have settled, except at a
        checkpoint."""
        return np.minimum(self.computed[rows], self.scheduled[rows] - self.kept[rows])

    @property
    def free(self) -> int:
        """The number of free rows."""
        return len(self._free)

    @property
    def used(self) -> int:
        """The number of rows that running turns have."""
        return len(self.run) - len(self._free)

    def take(self) -> int:
        """Takes a free row."""
        if not self._free:
            raise InvariantError("a turn was started without a free row")
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Frees the row that a turn has left; results still to come for that turn are dropped."""
        self.run[row] += 1
        self.uncertain[row] = False
        self.mark[row] = FAR
        self._free.append(row)
