"""The witness's state slots, and the inputs it keeps of tokens that may be rejected."""

from __future__ import annotations

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import NO_SLOT, StateMoves
from tenuto.exec.witness_hashes import Hashes, Longs, advance_all
from tenuto.kernels.ragged import ragged_arange


class KeptInputs:
    """The inputs that one state group keeps, by row: tokens, and the hash after each, [rows, most], and the position of
    the first, int64 [rows]. The inputs of recurrent layers depend on the whole history, so the hash stands for them."""

    def __init__(self, rows: int, most: int) -> None:
        self._tokens = np.zeros((rows, most), np.int64)
        self._hashes = np.zeros((rows, most), np.uint64)
        self._starts = np.full(rows, -1, np.int64)
        self._counts = np.zeros(rows, np.int64)

    def keep(self, moves: StateMoves, rows: Longs, starts: Longs, counts: Longs, tokens: Longs, hashes: Hashes) -> None:
        """Keeps the inputs of the rows that `moves` names, in place of their earlier ones. `tokens` and `hashes` are
        those of all rows' tokens, one row after another."""
        keeping = moves.keeps > 0
        owner = np.repeat(np.arange(len(rows)), counts)
        of_kept = keeping[owner]
        places = rows[owner[of_kept]], ragged_arange(counts)[of_kept]
        self._tokens[places], self._hashes[places] = tokens[of_kept], hashes[of_kept]
        self._starts[rows[keeping]], self._counts[rows[keeping]] = starts[keeping], counts[keeping]

    def lose(self, rows: list[int]) -> None:
        """Forgets the inputs of rows."""
        self._starts[rows] = -1

    def read(
        self,
        slots: tuple[Hashes, Longs],
        moves: StateMoves,
        rows: Longs,
        starts: Longs,
        begins: Hashes,
        weights: Longs,
        *,
        trusting: bool,
    ) -> Hashes:
        """Returns the hashes of the rows' histories before their tokens: those in `slots`, hashes and positions, or for
        the zero state in `begins`, which then absorb inputs. Raises `InvariantError` for a wrong position or as
        `absorb`, unless `trusting`."""
        hashes, positions = slots
        zero, absorbs = moves.reads == NO_SLOT, moves.absorbs
        if (zero & (starts > 0)).any():
            raise InvariantError("a row starts from the zero state in the middle of its history")
        at = np.where(zero, 0, positions[np.maximum(moves.reads, 0)])
        if (at + absorbs != starts).any() and not trusting:
            row = int(np.flatnonzero(at + absorbs != starts)[0])
            absorbed = f" and absorbs {absorbs[row]} inputs" if absorbs[row] else ""
            raise InvariantError(
                f"state slot {moves.reads[row]} is at {at[row]}{absorbed}, but its row computes from {starts[row]}"
            )
        found = np.where(zero, begins, hashes[np.maximum(moves.reads, 0)])
        return self.absorb(moves, rows, at, found, weights, trusting=trusting)

    def absorb(
        self, moves: StateMoves, rows: Longs, at: Longs, found: Hashes, weights: Longs, *, trusting: bool
    ) -> Hashes:
        """Returns the hashes to which states lead once they have absorbed what `moves` says, which was computed with
        `weights`. The states stand at
        positions `at`, int64 [rows], and have the hashes `found`. Raises `InvariantError`, unless `trusting`, if these
        inputs were not kept there for this history."""
        absorbs, found = moves.absorbs.astype(np.int64), found.copy()
        wrong = (absorbs > 0) & ((self._starts[rows] != at) | (self._counts[rows] < absorbs))
        if wrong.any() and not trusting:
            i = int(np.flatnonzero(wrong)[0])
            row = rows[i]
            raise InvariantError(
                f"row {row} absorbs {absorbs[i]} inputs from position {at[i]} on; "
                f"kept: {self._counts[row]} from {self._starts[row]} on"
            )
        for i in range(int(absorbs.max(initial=0))):
            live = np.flatnonzero(absorbs > i)
            found[live] = advance_all(found[live], self._tokens[rows[live], i], weights)
            strange = found[live] != self._hashes[rows[live], i]
            if strange.any() and not trusting:
                index = live[strange][0]
                raise InvariantError(
                    f"row {rows[index]} absorbs the input of another history at position {at[index] + i}"
                )
        return found
