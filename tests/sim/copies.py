"""Copies that take several steps, or part of one."""

from __future__ import annotations

from random import Random

from tenuto.memory.tiers.moves import Job
from tests.carriers import ByHand

PIECE = 200
"""In bytes: a page or two."""


class SlowCopies(ByHand):
    """A `Carrier` whose moves advance at random, during steps and between them. A cancelled move still copies the piece
    it had begun."""

    def __init__(self, chance: Random) -> None:
        super().__init__(PIECE)
        self._chance = chance
        self._stopped: set[Job] = set()

    def go_on(self) -> None:
        """Lets a little time pass."""
        for move in list(self.moves):
            while self._chance.random() < 0.5:
                if not self._advance(move):
                    self.moves.remove(move)
                    self._stopped.discard(move)
                    break

    def _advance(self, move: Job) -> bool:
        if not move.cancelled or move in self._stopped:
            return move.advance()
        self._stopped.add(move)
        move.cancelled = False
        going_on = move.advance()
        move.cancelled = True
        return going_on
