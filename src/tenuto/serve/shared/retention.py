"""Retention of ended turns."""

from __future__ import annotations

from collections import deque

from tenuto.serve.shared.live_turn import LiveTurn

MAX_TURNS = 4096
"""Maximum number of ended turns kept for returning readers and repeated requests."""
MAX_WEIGHT = 2**18
"""Maximum total weight of ended turns kept. A delta weighs 1, about 400 bytes."""
SCORE_WEIGHT = 16
"""Weight of one token's log-probabilities."""
TOKENS = 8
"""Number of tokens that weigh as much as a delta."""


class EndedTurns:
    """The most recently ended turns.

    Invariant: `_turns` are ordered by their ends, and `_weight` is the sum of their weights. There are at most
    `MAX_TURNS`, and their weight is at most `MAX_WEIGHT` unless there is only one.
    """

    def __init__(self) -> None:
        self._turns: deque[tuple[LiveTurn, int]] = deque()  # with their weights
        self._weight = 0

    def add(self, turn: LiveTurn) -> list[LiveTurn]:
        """Adds a turn. Returns the turns that are no longer kept."""
        weight = _weight(turn)
        self._turns.append((turn, weight))
        self._weight += weight
        dropped: list[LiveTurn] = []
        while len(self._turns) > MAX_TURNS or (self._weight > MAX_WEIGHT and len(self._turns) > 1):
            oldest, weight = self._turns.popleft()
            dropped.append(oldest)
            self._weight -= weight
        return dropped

    def forget(self, turn: LiveTurn) -> None:
        """Removes a turn."""
        for each in self._turns:
            if each[0] is turn:
                self._turns.remove(each)
                self._weight -= each[1]
                return


def _weight(turn: LiveTurn) -> int:
    scores = sum(delta.scores for delta in turn.deltas)
    tokens = sum(len(delta.tokens) for delta in turn.deltas) + (len(turn.ticket.prompt) if turn.ticket else 0)
    return len(turn.deltas) + SCORE_WEIGHT * scores + tokens // TOKENS
