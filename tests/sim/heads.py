"""Heads for multi-token prediction of worlds: they say what the witness will say or, by chance, something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.base.plan import SAMPLED, Plan, Predicted, StepResult
from tenuto.exec.witness_hashes import Hashes, advance, next_token
from tenuto.sched.guesses import NextStep
from tenuto.sched.predictor_proposer import PredictorProposer
from tenuto.session.turn import Turn
from tests.sim.checked import CheckedExecutor
from tests.sim.letters import VOCAB

if TYPE_CHECKING:
    from tests.sim.world import World


class WorldHead(PredictorProposer):
    """Asks the head; in every other world whatever its guesses cost. Remembers how many a turn may get."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._rng = Random(world.config.seed * 19 + 4)
        self._eager = bool(world.config.seed % 2)

    def asks(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[int]:
        asked = super().asks(turns, limits, step)
        return [self._rng.randint(0, limit) for limit in limits] if self._eager else asked


class HeadedExecutor(CheckedExecutor):
    """A checked witness with a head, whose keys and values lie in the slots of the first group with pages. It checks
    what each step asks of the head, and which slots the head writes."""

    def __init__(self, world: World, **options: Any) -> None:
        super().__init__(world, **options)
        self.predicts = True
        self._rng = Random(world.config.seed * 37 + 8)
        self._right = self._rng.choice((0.0, 0.6, 1.0))

    def submit(self, plan: Plan) -> None:
        self._check_work(plan)
        super().submit(plan)

    def _check_work(self, plan: Plan) -> None:
        """Compares a plan's work for the head with the naive model."""
        work, engine = plan.predictor, self._world.engine
        if work is None:
            self._world.found("head", f"step {plan.step} has no work for it")
            return
        ends = (plan.starts + plan.counts).tolist()
        for index, (row, end) in enumerate(zip(plan.rows.tolist(), ends, strict=True)):
            turn, samples = engine.batch.turns[row], int(plan.samples[index])
            naive = self._world.followed(turn)
            said = SAMPLED if samples else naive.sequence.tokens[end]
            if work.following[index] != said:
                self._world.found(
                    "head", f"{turn!r}: {work.following[index]} is said to follow {end} tokens, not {said}"
                )
            asked = int(work.guesses[index])
            most = naive.prompt + naive.most - end - 1 if samples and naive.params.speculate else 0
            if asked > max(0, min(most, engine.config.lookahead)):
                self._world.found("head", f"{turn!r}: {asked} guesses after {end} tokens, at most {most} have a use")

    def _compute(self, plan: Plan, begins: Hashes) -> StepResult:
        result = super()._compute(plan, begins)
        return replace(result, predicted=self._guesses(plan, result)) if plan.predictor is not None else result

    def _guesses(self, plan: Plan, result: StepResult) -> Predicted:
        """Returns the head's guesses: after the last token of a row that follows right guesses only, as many as it asks
        for and as its pages have slots."""
        work, size = plan.predictor, self.spec.page_size
        assert work is not None
        counts, most = np.zeros(len(plan.rows), np.int32), max(1, int(work.guesses.max(initial=0)))
        tokens = np.zeros((len(plan.rows), most), np.int32)
        inputs, sampled = plan.counts.cumsum(), plan.samples.cumsum()
        for index in np.flatnonzero(work.guesses).tolist():
            samples, end = int(plan.samples[index]), int(plan.starts[index] + plan.counts[index])
            said = result.tokens[sampled[index] - samples : sampled[index]].tolist()
            guessed = plan.tokens[inputs[index] - samples + 1 : inputs[index]].tolist()
            right = next((n for n, guess in enumerate(guessed) if guess != said[n]), len(guessed))
            position = end - samples + right
            counts[index] = min(int(work.guesses[index]), -(-end // size) * size - position)
            state = advance(self._write_ahead(plan, index, position, int(counts[index])), said[right])
            for n in range(int(counts[index])):
                token = next_token(state ^ int(self._sampler._seeds[plan.rows[index]]), VOCAB)
                tokens[index, n] = token if self._rng.random() < self._right else self._rng.randrange(VOCAB)
                state = advance(state, int(tokens[index, n]))
        chances = np.array([[self._rng.random() for _ in row] for row in tokens], np.float32)
        return Predicted(tokens, chances, counts, 0.0)

    def _write_ahead(self, plan: Plan, index: int, position: int, count: int) -> int:
        """Checks the slots from `position` on that the head writes for a row's `count` guesses. Returns the hash that
        the first of them has."""
        size = self.spec.page_size
        positions = np.arange(position, position + count)
        slots = self._tables[0][plan.rows[index], positions // size] * size + positions % size
        if self._needed is not None:
            self._check(self._paged[0], slots[1:], f"the head in step {plan.step}")
        return int(self._slots[self._paged[0]][0][slots[0]])
