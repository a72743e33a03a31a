"""Who carries moves in tests: nobody waits for threads."""

from __future__ import annotations

from tenuto.memory.tiers.moves import Job


class AtOnce:
    """A `Carrier` that has moved everything when it returns."""

    piece = 2**24

    def carry(self, move: Job) -> None:
        move.carry()

    def withdraw(self, move: Job) -> None:
        pass

    def wait(self, move: Job) -> None:
        """It has ended."""

    def close(self) -> None:
        """There are no threads."""


class ByHand:
    """A `Carrier` whose moves advance when a test says so, the oldest first."""

    def __init__(self, piece: int = 2**24) -> None:
        self.piece = piece
        self.moves: list[Job] = []  # that have not ended

    def carry(self, move: Job) -> None:
        self.moves.append(move)

    def advance(self, pieces: int = 1) -> None:
        """Copy so many pieces; each move has one more step, in which it ends."""
        for _ in range(pieces):
            if self.moves and not self.moves[0].advance():
                self.moves.pop(0)

    def finish(self) -> None:
        """Have all moves end."""
        while self.moves:
            self.advance()

    def withdraw(self, move: Job) -> None:
        pass

    def wait(self, move: Job) -> None:
        while move in self.moves:
            self.advance()

    def close(self) -> None:
        self.finish()
