"""Draft models of worlds: witnesses that say what the engine's says, or something else.

Their tokens follow from those before, so any other guess shows that it has computed other tokens than the turn's.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.plan import Ints, Plan
from tenuto.exec.witness import WitnessExecutor
from tenuto.exec.witness_hashes import mark_of, next_token, seeded
from tenuto.sched.draft_model import DraftModel
from tenuto.sched.draft_proposer import Candidate, DraftProposer
from tenuto.sched.draft_tables import DraftTables
from tenuto.sched.guesses import Guesses, NextStep
from tenuto.sched.suffix_proposer import SuffixProposer
from tenuto.session.turn import Turn
from tests.clock import ManualClock
from tests.sim.letters import VOCAB
from tests.sim.naive import TokenRun

if TYPE_CHECKING:
    from tests.sim.world import World

MIXES: tuple[tuple[GroupSpec, ...], ...] = (
    (GroupSpec(Kind.FULL, 1),),
    (GroupSpec(Kind.SLIDING, 1, 4),),
    (GroupSpec(Kind.FULL, 1), GroupSpec(Kind.SLIDING, 1, 7)),
)


class RandomClock(ManualClock):
    """A clock that goes on whenever it is read, by nothing in some worlds."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self._most = rng.choice((0.0, 0.1, 0.1, 3.0))

    def now(self) -> float:
        self.advance(self._most * self._rng.random())
        return super().now()


class DraftWitness(WitnessExecutor):
    """A witness that knows the tokens of the draft model's tables."""

    tables: DraftTables

    def histories(self, plan: Plan) -> list[Ints]:
        tokens = {table.row: table.tokens for table in self.tables if table.row >= 0}
        return [np.array(tokens[row], np.int32) for row in plan.rows.tolist()]


class WorldDraft(DraftProposer):
    """Checks, after every call, what the draft model has and what it guessed. In every other world, it guesses whatever
    that costs."""

    def __init__(self, world: World, *, right: bool) -> None:
        config, rng = world.config, Random(world.config.seed * 13 + 2)
        self._world, self._rng = world, rng
        self._mark = 0 if right else mark_of("another")
        self._eager = bool(config.seed // 3 % 2)
        one = -(-config.context // config.page_size)
        executor = DraftWitness(
            config.page_size,
            MIXES[config.seed % len(MIXES)],
            VOCAB,
            eager=True,
            fail=lambda: rng.random() < 0.05,
            written=lambda: rng.choice((0.0, 1.0, rng.random())),
        )
        tables = DraftTables(executor.spec, max(one, rng.choice((1, one, 2 * one, 8 * one))), config.running)
        executor.tables = tables
        executor.prepare(tuple(pool.capacity for pool in tables.pools), config.running, 0)
        if not right:
            executor.restore((), executor.load("another"))
        model = DraftModel(
            executor, tables, RandomClock(rng), vocab_size=VOCAB, context=rng.choice((20, 10**6, 10**6, 10**6))
        )
        self.tables = tables
        super().__init__(model, SuffixProposer(most_bytes=4000))

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:
        found = super().propose(turns, limits, step)
        for turn, limit, guesses in zip(turns, limits, found, strict=True):
            if len(guesses.tokens) > limit or len(guesses.chances) != len(guesses.tokens):
                self._world.found("draft", f"{turn!r}: {guesses} of at most {limit}")
            if (followed := self._turns.get(turn)) is None:
                continue
            tokens = turn.tokens(0, followed.length) + followed.guesses
            if followed.table.tokens != tokens[: len(followed.table.tokens)]:
                self._world.found("draft", f"{followed.table.tokens} were computed, not those of {turn!r}: {tokens}")
            if list(followed.guesses) != (said := self._said(turn, followed.length, len(followed.guesses))):
                self._world.found("draft", f"{turn!r}: {followed.guesses} was guessed, but {said} follows")
        self._check_tables()
        return found

    def _best(self, candidates: Sequence[Candidate], found: Sequence[Guesses], step: NextStep) -> tuple[int, float]:
        if self._eager and candidates:
            return self._rng.randint(1, max(each.limit for each in candidates)), 2.0
        return super()._best(candidates, found, step)

    def _said(self, turn: Turn, length: int, count: int) -> list[int]:
        """Returns the `count` tokens that the draft model says after the turn's first `length`."""
        ahead, said = TokenRun(mark=self._mark), list[int]()
        ahead.extend(turn.tokens(0, length))
        for _ in range(count):
            said.append(next_token(seeded(ahead.hashes[-1], turn.params.sampling.seed), VOCAB))
            ahead.extend(said[-1:])
        return said

    def _check_tables(self) -> None:
        scopes: dict[tuple[int, int], object] = {}
        for table in self.tables:
            for group, units in enumerate(table.units(0)):
                if len(units) != table.pages_for(len(table.tokens)):
                    self._world.found("draft", f"{table.holder_name}: {len(units)} pages, {len(table.tokens)} tokens")
                for unit in units:
                    if scopes.setdefault((group, unit), table.scope) != table.scope:
                        self._world.found("draft", f"{table.holder_name} shares a page beyond its scope")
