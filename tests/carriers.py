"""Who carries moves in tests: nobody waits for threads."""

from __future__ import annotations

from tenuto.memory.moves import Move


class AtOnce:
    """A `Carrier` that has moved everything when it returns."""

    piece = 2**24

    def carry(self, move: Move) -> None:
        move.carry()

    def wait(self, move: Move) -> None:
        """It has ended."""

    def close(self) -> None:
        """There are no threads."""


class ByHand:
    """A `Carrier` whose moves advance when a test says so, the oldest first."""

    def __init__(self, piece: int = 2**24) -> None:
        self.piece = piece
        self.moves: list[Move] = []  # that have not ended

    def carry(self, move: Move) -> None:
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

    def wait(self, move: Move) -> None:
        while move in self.moves:
            self.advance()

    def close(self) -> None:
        self.finish()
