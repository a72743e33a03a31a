"""Carriers of moves for tests, without threads."""

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
        """Does nothing: the move has ended."""

    def close(self) -> None:
        """Does nothing: there are no threads."""


class ByHand:
    """A `Carrier` whose moves advance by hand, the oldest first."""

    def __init__(self, piece: int = 2**24) -> None:
        self.piece = piece
        self.moves: list[Job] = []  # unfinished moves

    def carry(self, move: Job) -> None:
        self.moves.append(move)

    def advance(self, pieces: int = 1) -> None:
        """Copies this many pieces; after its last piece each move takes one more step to end."""
        for _ in range(pieces):
            if self.moves and not self.moves[0].advance():
                self.moves.pop(0)

    def finish(self) -> None:
        """Ends all moves."""
        while self.moves:
            self.advance()

    def withdraw(self, move: Job) -> None:
        pass

    def wait(self, move: Job) -> None:
        while move in self.moves:
            self.advance()

    def close(self) -> None:
        self.finish()
