"""The proposers of worlds: their guesses are right, wrong, both, or those of the suffix index, a draft model or the
model's head."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from tenuto.sched.guesses import Guesses, NextStep, Proposer
from tenuto.sched.suffix_proposer import SuffixProposer
from tenuto.session.turn import Turn
from tests.sim.drafts import WorldDraft
from tests.sim.heads import WorldHead
from tests.sim.letters import VOCAB

if TYPE_CHECKING:  # a world has a proposer
    from tests.sim.world import World

RIGHT = {"mixed": 0.7, "right": 1.0, "hostile": 0.0}
"""The share of right tokens among those of each kind of proposer."""


class WorldProposer(Proposer):
    """Guesses from the naive model. A hostile one always guesses wrong, and is sure of it."""

    def __init__(self, world: World, kind: str) -> None:
        self._world = world
        self._kind = kind
        self._rng: Random = world.rng

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:
        return [self._guess(turn, limit) for turn, limit in zip(turns, limits, strict=True)]

    def _guess(self, turn: Turn, limit: int) -> Guesses:
        naive = self._world.followed(turn)
        self._world.training.follow(turn)
        if self._kind == "hostile":
            tokens = [(token + 1) % VOCAB for token in naive.guess(limit)]
            return Guesses(tokens, [1.0] * len(tokens))
        guesses = naive.guess(self._rng.randint(0, limit))
        tokens = [g if self._rng.random() < RIGHT[self._kind] else self._rng.randrange(VOCAB) for g in guesses]
        return Guesses(tokens, [self._rng.random() for _ in tokens])


def proposer_of(world: World, kind: str) -> Proposer | None:
    """Returns a new proposer of a kind in `RIGHT`, or of "suffixes", a right or wrong "draft" or a "head"; without a
    kind, `None`."""
    if kind == "head":
        return WorldHead(world)
    if kind.endswith("draft"):
        return WorldDraft(world, right=kind == "right draft")
    if kind == "suffixes":
        return SuffixProposer(most_bytes=4000)
    return WorldProposer(world, kind) if kind else None
