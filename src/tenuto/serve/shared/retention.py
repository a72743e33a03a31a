"""How long turns are kept that have ended."""

from __future__ import annotations

from collections import deque

from tenuto.serve.shared.live_turn import LiveTurn

MAX_TURNS = 4096
"""Ended turns that are kept for readers who come back, and for repeated requests."""
MAX_DELTAS = 2**18
"""Deltas of ended turns that are kept; those with log-probabilities count more."""
LOGPROBS_WEIGHT = 16
"""As how many deltas one with log-probabilities counts."""


class EndedTurns:
    """The turns that have ended last.

    Invariant: `_turns` are in the order of their ends, and `_weight` is the sum of their weights. They are at most
    `MAX_TURNS`, and weigh at most `MAX_DELTAS` unless there is only one.
    """

    def __init__(self) -> None:
        self._turns: deque[LiveTurn] = deque()
        self._weight = 0

    def add(self, turn: LiveTurn) -> list[LiveTurn]:
        """Keep one more turn. Returns those that are no longer kept."""
        self._turns.append(turn)
        self._weight += _weight(turn)
        dropped: list[LiveTurn] = []
        while len(self._turns) > MAX_TURNS or (self._weight > MAX_DELTAS and len(self._turns) > 1):
            dropped.append(self._turns.popleft())
            self._weight -= _weight(dropped[-1])
        return dropped


def _weight(turn: LiveTurn) -> int:
    return len(turn.deltas) * (LOGPROBS_WEIGHT if turn.request.params.logprobs is not None else 1)
