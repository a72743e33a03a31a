"""A trace: the steps of a while, and the turns in them."""

from __future__ import annotations

from tenuto.base.map_views import TracedStep, TracedTurn, TraceView
from tenuto.sched.proposal import Flight
from tenuto.session.turn import Turn

MAX_ENTRIES = 500_000
"""The most rows of all steps of a trace together."""


class Trace:
    """Records steps until `end`. It refers to the turns that it has seen, so that it can say how they ended."""

    def __init__(self, began: float, wall: float) -> None:
        self._began = began
        self._wall = wall
        self._steps: list[TracedStep] = []
        self._turns: dict[int, Turn] = {}
        self._entries = 0

    def step(self, flight: Flight, turns: list[Turn | None], began: float, ended: float) -> None:
        """Records a step that has been collected and is not settled yet. `turns`: those of its rows, `None` if they
        have left."""
        self._entries += len(turns)
        if self._entries > MAX_ENTRIES:
            return
        counts, samples = flight.plan.counts.tolist(), flight.plan.samples.tolist()
        rows = [
            (turn.number, count, sampled)
            for turn, count, sampled in zip(turns, counts, samples, strict=True)
            if turn is not None
        ]
        self._turns.update((turn.number, turn) for turn in turns if turn is not None)
        self._steps.append(TracedStep(step=flight.plan.step, began=began, ended=ended, turns=rows))

    def end(self, now: float, waiting: list[Turn]) -> TraceView:
        """Returns what was recorded. `waiting`: turns in the queue."""
        self._turns.update((turn.number, turn) for turn in waiting)
        return TraceView(
            began=self._began,
            ended=now,
            wall=self._wall,
            more=self._entries > MAX_ENTRIES,
            steps=self._steps,
            turns=[_traced(turn) for turn in self._turns.values()],
        )


def _traced(turn: Turn) -> TracedTurn:
    return TracedTurn(
        number=turn.number,
        session=turn.session.id,
        tenant=turn.session.policy.tenant,
        arrived=turn.arrival,
        prompt=turn.prompt_length,
        cached=max(0, turn.cached),
        output=len(turn.output),
        ended=turn.result.reason.value if turn.result is not None else "",
    )
