"""How long ended turns are kept."""

from __future__ import annotations

from collections import deque

from tenuto.serve.shared.live_turn import LiveTurn

MAX_TURNS = 4096
"""Ended turns kept for returning readers and repeated requests."""
MAX_DELTAS = 2**18
"""Deltas kept of ended turns; those with log-probabilities count more."""
LOGPROBS_WEIGHT = 16
"""How many deltas one with log-probabilities counts as."""


class EndedTurns:
    """The turns that ended last.

    Invariant: `_turns` are in the order of their ends, and `_weight` is the sum of their weights. There are at most
    `MAX_TURNS`, weighing at most `MAX_DELTAS` unless there is only one.
    """

    def __init__(self) -> None:
        self._turns: deque[LiveTurn] = deque()
        self._weight = 0

    def add(self, turn: LiveTurn) -> list[LiveTurn]:
        """Keep one more turn. Returns those no longer kept."""
        self._turns.append(turn)
        self._weight += _weight(turn)
        dropped: list[LiveTurn] = []
        while len(self._turns) > MAX_TURNS or (self._weight > MAX_DELTAS and len(self._turns) > 1):
            dropped.append(self._turns.popleft())
            self._weight -= _weight(dropped[-1])
        return dropped


def _weight(turn: LiveTurn) -> int:
    return len(turn.deltas) * (LOGPROBS_WEIGHT if turn.request.params.logprobs is not None else 1)
