"""Copies that take their time: several steps, or a part of one."""

from __future__ import annotations

from random import Random

from tests.carriers import ByHand

PIECE = 200
"""Bytes: a page or two."""


class SlowCopies(ByHand):
    """A `Carrier` whose moves advance while steps are computed, and between them, by chance."""

    def __init__(self, chance: Random) -> None:
        super().__init__(PIECE)
        self._chance = chance

    def go_on(self) -> None:
        """A little time passes."""
        for move in list(self.moves):
            while self._chance.random() < 0.5:
                if not move.advance():
                    self.moves.remove(move)
                    break
