"""A proposer that asks a model's head at every step, whatever that costs."""

from collections.abc import Sequence
from dataclasses import replace

from tenuto.sched.guesses import Guesses, NextStep
from tenuto.sched.predictor_proposer import PredictorProposer
from tenuto.session.turn import Turn


class Eager(PredictorProposer):
    """Always asks for as many guesses as are allowed, and is sure of them, so that all are computed."""

    def asks(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[int]:
        super().asks(turns, limits, step)
        return list(limits)

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:
        found = super().propose(turns, limits, step)
        return [replace(each, chances=[0.999] * len(each.tokens)) for each in found]
