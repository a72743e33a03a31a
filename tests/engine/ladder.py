"""A simple grammar for tests: at each token, the tokens with a certain remainder are allowed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenuto.base.options import TurnParams
from tenuto.base.plan import Words
from tenuto.base.tools.grammar import Grammar
from tenuto.exec.witness_hashes import advance, history_hash, next_allowed
from tenuto.session.turn import Turn
from tenuto.text.constraint import Constraint
from tests.engine.stage import VOCABULARY, Stage

WORDS = -(-VOCABULARY // 32)
ANY = Grammar("regex", ".*")
"""The grammar that turns declare here; the one they follow is a `Ladder`."""


class Ladder:
    """A matcher: at rung i the tokens with remainder `i + offset` modulo `base` are allowed. Complete after `rungs`
    tokens, broken at rung `broken`."""

    def __init__(self, base: int, offset: int, rungs: int, broken: int = -1) -> None:
        self.base, self.offset, self.rungs, self.broken = base, offset, rungs, broken
        self.said: list[int] = []
        self.failure = ""

    @property
    def complete(self) -> bool:
        return len(self.said) >= self.rungs

    def may(self, rung: int, token: int) -> bool:
        return rung < self.rungs and token % self.base == (rung + self.offset) % self.base

    def consume(self, token: int) -> bool:
        if not self.may(len(self.said), token) or self.failure:
            self.failure = f"{token} is not allowed at rung {len(self.said)}"
            return False
        self.said.append(token)
        return True

    def fill(self, words: Words) -> None:
        if len(self.said) == self.broken:
            self.failure = "too complex"
        words[:] = allowed(self, len(self.said))

    def copy(self) -> Ladder:
        other = Ladder(self.base, self.offset, self.rungs, self.broken)
        other.said, other.failure = self.said.copy(), self.failure
        return other


def allowed(ladder: Ladder, rung: int) -> Words:
    bits = (np.arange(32 * WORDS) % ladder.base == (rung + ladder.offset) % ladder.base) & (rung < ladder.rungs)
    return np.packbits(bits & (np.arange(32 * WORDS) < VOCABULARY), bitorder="little").view(np.uint32)


def climbed(history: Sequence[int], ladder: Ladder, tokens: int) -> list[int]:
    """Returns the expected output of a turn on the ladder after `history`."""
    state, said = history_hash(history), []
    for rung in range(min(tokens, ladder.rungs)):
        said.append(next_allowed(state, VOCABULARY, (), allowed(ladder, rung)))
        state = advance(state, said[-1])
    return said


def climb(stage: Stage, tokens: Sequence[int], ladder: Ladder, output: int = 12, session: str = "s") -> Turn:
    params = TurnParams(max_new_tokens=output, grammar=ANY)
    return stage.engine.turns.submit(session, tokens, params, None, Constraint(ladder, WORDS))
