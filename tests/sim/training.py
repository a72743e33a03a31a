"""Weights that are replaced while sessions go on, with and without their state.

Which weights compute a token is the engine's choice. So the naive model asks it, believes it only if that is allowed,
and expects the outputs and the contents of memory that follow: the witness's hash of a token depends on the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from tenuto.base.turns import TurnState
from tenuto.exec.witness_hashes import mark_of
from tenuto.memory.lineage import Lineage
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.sim.naive import Had, Marks, NaiveTurn

if TYPE_CHECKING:
    from tests.sim.mirror import MirroredWorld
    from tests.sim.world import World


class Training:
    """The weights of a world. `identities`: of all that were ever in use, in order, all different; update n replaces
    the weights with index n by those with the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.identities = [""]
        self.name = "default"  # of the weights in use

    def begin(self) -> None:
        """Puts the weights in use into the executor of a new engine."""
        self.name = "default"
        executor = self._world.executor
        if self.identities[-1]:
            executor.restore((), executor.load(self.identities[-1]))

    @staticmethod
    def marks(lineage: Lineage) -> Marks:
        """Returns the marks that the witness gives to tokens of this lineage."""
        marks = [(start, mark_of(weights.identity) if weights.identity else 0) for start, weights in lineage]
        return marks or [(0, 0)]

    def follow(self, turn: Turn) -> None:
        """Lets the naive turn expect what the weights give that have computed the turn's tokens."""
        memory = turn.session.memory.turn
        if self._world.config.trains and memory is not None:
            naive = self._world.turns[turn.number]
            naive.sequence = naive.sequence.weighed(self.marks(memory.lineage))

    # -- operations

    def update(self, world: MirroredWorld) -> None:
        """Replaces the weights, mostly so that sessions keep their state."""
        rng, number = world.rng, len(self.identities) - 1
        keep, abort = rng.random() < 0.7, rng.random() < 0.15
        open_turns = [session.turn for session in world.engine.registry if session.turn is not None]
        for turn in open_turns:
            naive = world.followed(turn)
            naive.versions.append((len(naive.output), self.name))
            naive.disturbed = True
            if abort and turn.state is not TurnState.DRAFTING:
                world.asked[turn.number] = None
        for session in world.naive.values():
            session.had = _noted(session.had, number, len(session.tokens), keep=keep)
            if session.turn is not None:
                session.turn.had = _noted(session.turn.had, number, len(session.turn.sequence), keep=keep)
        identity, name = f"weights {number + 1}", f"version {number + 1}"
        weights = world.executor.load(identity)
        world.engine.occupation.update(weights, identity, version=name, abort=abort, keep_state=keep)
        self.identities.append(identity)
        for turn in open_turns:
            if turn.result is not None:
                world.ended(turn)
        self.name = name
        if not keep and any(s.memory.computed or s.memory.turn is not None for s in world.engine.registry):
            world.found("weights", "a session has kept state that was to be dropped")
        self.check()

    # -- checks

    def check(self) -> None:
        """Checks that sessions and their turns only have state of weights that they may have."""
        for session in self._world.engine.registry if self._world.config.trains else ():
            self._check_session(session)

    def _check_session(self, session: Session) -> None:
        naive, memory = self._world.naive[session.id], session.memory
        had, turn = naive.had, self._world.turns.get(session.turn.number) if session.turn is not None else None
        if turn is not None:  # the session may have state of the turn's input, found elsewhere
            had = {update: max(had.get(update, 0), turn.had.get(update, 0)) for update in {*had, *turn.had}}
            if memory.turn is not None:
                self._check_state(f"turn {turn.number}", memory.turn.lineage, memory.turn.scheduled, turn.had)
        self._check_state(session.id, memory.lineage, memory.computed, had)

    def _check_state(self, owner: str, lineage: Lineage, computed: int, had: Had) -> None:
        """Checks the state of the first `computed` tokens of a sequence."""
        numbers = [self.identities.index(stamp.weights.identity) for stamp in lineage]
        if sorted(set(numbers)) != numbers:
            self._world.found("weights", f"{owner} has state of weights in this order: {numbers}")
        ends = [min(end, computed) for _, end in pairwise([*(stamp.start for stamp in lineage), computed])]
        for update in range(len(self.identities) - 1):
            first = had.get(update, 0)  # tokens from here on came later
            if any(end > first and number <= update for number, end in zip(numbers, ends, strict=True)):
                self._world.found(
                    "weights", f"{owner} had {first} tokens at update {update}, and has state of {numbers} up to {ends}"
                )

    def check_versions(self, turn: Turn, naive: NaiveTurn) -> None:
        """Checks that an ended turn says which weights have sampled its output."""
        assert turn.result is not None
        told = [(span.output_tokens, span.weight_version) for span in turn.result.weight_versions]
        if told != (wanted := _spans([*naive.versions, (len(naive.output), self.name)])):
            self._world.found("weights", f"{turn!r} says that {told} have sampled it, not {wanted}")


def _noted(had: Had, number: int, tokens: int, *, keep: bool) -> Had:
    return {**had, number: tokens} if keep else {}


def _spans(versions: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    last = (0, "")
    for last in versions:
        if last[0] > (found[-1][0] if found else 0):
            found.append(last)
    return found or [last]
