"""Questions of steps to the model's head for multi-token prediction, and its answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tenuto.base.plan import SAMPLED, Ints, Predicted, PredictorWork
from tenuto.memory.kinds.group import Mask
from tenuto.memory.rows import Longs
from tenuto.sched.batch import Batch
from tenuto.sched.guesses import Guesses, NextStep, StepTimes
from tenuto.sched.predictor_proposer import PREDICTOR, PredictorProposer
from tenuto.session.turn import Turn


class Predictor:
    """Gives every step its work for the head, and the head's guesses to `proposer`."""

    def __init__(self, proposer: PredictorProposer, batch: Batch, times: StepTimes, most: int) -> None:
        """`most`: the most guesses of a turn in a step."""
        self._proposer, self._batch, self._times, self._most = proposer, batch, times, most

    def work(
        self, chosen: Longs, counts: Longs, ends: Longs, samples: Ints, guesses: Mapping[int, Guesses]
    ) -> PredictorWork:
        """Returns the work of a step that computes `counts` tokens of the rows `chosen` up to `ends`, and `guesses`
        among them, by index in `chosen`. Rows that have guesses of another source do not ask."""
        following, asked = np.full(len(chosen), SAMPLED, np.int32), np.zeros(len(chosen), np.int32)
        turns = self._batch.turns[chosen]
        for index in (samples == 0).nonzero()[0].tolist():
            turn, end = turns[index], int(ends[index])
            following[index] = turn.tokens(end, end + 1)[0]
        limits = np.minimum(self._batch.rows.limit[chosen] - ends - 1, self._most)
        asking = (samples > 0) & self._batch.speculates[chosen] & (limits > 0)
        asking[[index for index, each in guesses.items() if each.source != PREDICTOR]] = False
        if asking.any():
            others = int((counts - 1)[samples == 0].sum())
            step = NextStep(self._times, len(chosen), len(chosen) + others, int((samples > 0).sum()))
            asked[asking] = self._proposer.asks(turns[asking].tolist(), limits[asking].tolist(), step)
        return PredictorWork(following, asked)

    def take(self, rows: Longs, predicted: Predicted, live: Mask) -> None:
        """Takes the guesses for `rows`, of which those that are `live` still have their turns, when the step has been
        settled."""
        asked = predicted.counts > 0
        self._proposer.took(int(asked.sum()), predicted.tokens.shape[1], predicted.seconds)
        for index in (asked & live).nonzero()[0].tolist():
            turn: Turn = self._batch.turns[rows[index]]
            count = int(predicted.counts[index])
            self._proposer.note(
                turn, predicted.tokens[index, :count].tolist(), predicted.chances[index, :count].tolist()
            )
