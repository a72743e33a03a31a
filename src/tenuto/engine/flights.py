"""Steps in flight: planned, submitted, then settled, or retried when one fails."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

from tenuto.base.errors import InvariantError, StepFailed
from tenuto.base.plan import Executor, StepResult
from tenuto.base.turns import EndReason
from tenuto.engine.lifecycle import Lifecycle
from tenuto.memory.memory import Memory
from tenuto.sched.planner import Flight, Planner
from tenuto.sched.settle import Settler
from tenuto.sched.suspects import MAX_FAILURES, Suspects
from tenuto.session.session import Turn

log = logging.getLogger("tenuto.engine")


class Flights:
    """Steps submitted and not yet collected, the oldest first, and what `Engine.step` does with them."""

    def __init__(
        self,
        executor: Executor,
        memory: Memory,
        lifecycle: Lifecycle,
        planner: Planner,
        settler: Settler,
        suspects: Suspects,
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._lifecycle = lifecycle
        self._batch = lifecycle.batch
        self._planner = planner
        self._settler = settler
        self._suspects = suspects
        self._flights: deque[Flight] = deque()
        self._void = 0  # the last step whose result is dropped because an earlier one failed

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def plan(self) -> Flight | None:
        """Plan the next step; if memory is short, others yield first. `None` if nothing can run now."""
        pressure = self._lifecycle.pressure
        while len(self._batch):
            proposal, made = self._planner.propose(), True
            while (lacking := proposal.lacking) is not None and made:
                made = pressure.make_room(lacking, in_flight=bool(self._flights))
                proposal = self._planner.propose()  # even if the room is still to come: somebody may have yielded
                if made and proposal.lacking is not None and proposal.lacking.same(lacking):
                    raise InvariantError(f"{lacking.turn.name} was given the room it lacked, and lacks it still")
            if len(proposal.rows):
                return self._planner.apply(proposal)
            stuck = proposal.lacking.turn if proposal.lacking is not None and self._suspects else None
            if self._flights or not pressure.unstick(stuck):
                break
        return None

    def submit(self, planned: Flight) -> None:
        """Have the executor compute it."""
        self._memory.step_submitted()
        self._flights.append(planned)
        self._executor.submit(planned.plan)

    def collect(self) -> tuple[Flight, StepResult | None]:
        """Wait for the oldest step; its result is `None` if it failed."""
        flight, result = self._flights.popleft(), None
        try:
            result = self._executor.collect()
        except StepFailed as error:
            if not self.is_void(flight):
                self._lifecycle.count("step failed")
                turns = [turn.name for turn in self._live(flight)]
                log.warning("a step failed", extra={"step": flight.plan.step, "turns": turns, "error": str(error)})
        self._memory.step_settled()
        return flight, result

    def is_void(self, flight: Flight) -> bool:
        """Whether its result is dropped because an earlier step failed."""
        return flight.plan.step <= self._void

    def settle(self, flight: Flight, result: StepResult) -> list[Turn]:
        """Take in what was computed, and end the turns that are done. Returns the turns with new output."""
        settled = self._settler.settle(flight, result)
        if self._suspects:
            self._suspects.step_succeeded()
        for turn, reason in settled.ended:
            self._lifecycle.commit(turn, reason)
        for turn in settled.prefilled:
            if turn.drafting:
                self._lifecycle.rest(turn)
            else:
                self._lifecycle.commit(turn, EndReason.APPENDED)
        return settled.progressed

    def retry(self, failed: Flight) -> None:
        """A step failed, and so did those submitted since: their turns go on from what is settled, and the turns of the
        failed step become suspects."""
        void = [failed, *self._flights]
        self._void = void[-1].plan.step
        suspects = [*self._live(failed), *self._batch.take_left(failed.plan.step)]
        self._suspects.step_failed(suspects, alone=len(failed.rows) == 1)
        others = [turn for flight in void for turn in self._live(flight)] + self._batch.take_left(self._void)
        for turn in dict.fromkeys(suspects + others):
            if turn.failures >= MAX_FAILURES:
                self._lifecycle.abort(turn, EndReason.FAILED)
            else:
                self._lifecycle.retry(turn)
        for flight in void:
            self._batch.return_news(flight.news)

    def _live(self, flight: Flight) -> list[Turn]:
        """The turns of a flight that are still in their rows."""
        same = self._memory.rows.run[flight.rows] == flight.runs
        return list(self._batch.turns[flight.rows[same]])
