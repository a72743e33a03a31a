"""Steps in flight: planned, submitted, and settled, or retried after a failure."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from tenuto.base.errors import InvariantError, StepFailed
from tenuto.base.plan import StepResult
from tenuto.base.turns import EndReason
from tenuto.engine.core import Core
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.trace import Trace
from tenuto.sched.guesses import NO_GUESSES
from tenuto.sched.planner import Planner
from tenuto.sched.proposal import Flight, Proposal
from tenuto.sched.settle import Settler
from tenuto.sched.suspects import MAX_FAILURES, Suspects
from tenuto.session.turn import Turn
from tenuto.text.masks import MaskRequest, Masks, give_up

PREFILL_TOKENS = 16
"""The average number of tokens per row from which a step counts as prefill."""

log = logging.getLogger("tenuto.engine")


class Flights:
    """The submitted steps that are not yet collected, the oldest first, and the stages of `Engine.step` for them."""

    def __init__(
        self, core: Core, lifecycle: Lifecycle, planner: Planner, settler: Settler, suspects: Suspects, masks: Masks
    ) -> None:
        self._executor = core.executor
        self._clock = core.clock
        self._masks = masks
        self._memory = core.memory
        self._lifecycle = lifecycle
        self._batch = core.batch
        self._idle_memory = core.idle_memory
        self._counts = core.counts
        self._planner = planner
        self._settler = settler
        self._suspects = suspects
        self._flights: deque[Flight] = deque()
        self._began = 0.0  # the time when the oldest step in flight was submitted, or the step before it ended
        self.computed = 0  # tokens that steps have computed, in total
        self.sampled = 0  # tokens that became output
        self.seconds = 0.0  # the time that these steps took
        self.trace: Trace | None = None  # records steps, if there is one
        self._void = 0  # the last step whose result is dropped because an earlier step failed

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def plan(self) -> Flight | None:
        """Plans the next step; if memory is short, other turns and sessions yield first. Returns `None` if no turn can
        run now."""
        while len(self._batch):
            proposal = self._with_room()
            lacking = proposal.last_lacking
            if not (len(proposal.rows) or self._room_may_come()):
                proposal = self._with_room(at_worst=True)
            if len(proposal.rows):
                return self._planner.apply(proposal)
            if lacking is None or lacking not in self._batch:
                lacking = proposal.last_lacking
            if self._room_may_come() or not self._lifecycle.pressure.unstick(lacking):
                break
        return None

    def _with_room(self, *, at_worst: bool = False) -> Proposal:
        """Proposes a step, for which other turns and sessions have yielded if memory was short."""
        proposal, made = self._planner.propose(at_worst=at_worst), True
        while (lacking := proposal.lacking) is not None and made:
            made = self._lifecycle.pressure.make_room(lacking, in_flight=bool(self._flights))
            proposal = self._planner.propose(at_worst=at_worst)  # even if room comes later: a turn may have yielded
            if made and proposal.lacking is not None and proposal.lacking.same(lacking):
                raise InvariantError(f"{lacking.turn.name} was given the room it lacked, but still lacks it")
        return proposal

    def _room_may_come(self) -> bool:
        """Whether a turn that lacks room may get it without another one being preempted, or none runs any more: the
        last one may have left its row, to begin again."""
        unfinished = self._idle_memory.copying or self._lifecycle.pressure.unfinished
        return bool(self._flights) or unfinished or not len(self._batch)

    def submit(self, planned: Flight) -> None:
        """Submits the planned step to the executor."""
        self._memory.step_submitted()
        if not self._flights:
            self._began = self._clock.now()
        self._flights.append(planned)
        if len(self._flights) == 1:
            self._ask_masks()
        self._executor.submit(planned.plan)

    def land(self, remaining: int = 0) -> list[Turn]:
        """Collects the oldest steps until `remaining` are in flight. Each is settled or, if it failed, its turns are
        retried and the results of the steps submitted since are dropped. Returns the turns with new output."""
        progressed: list[Turn] = []
        while len(self._flights) > remaining:
            flight, result = self.collect()
            if self.is_void(flight):
                continue
            if result is not None:
                progressed += self.settle(flight, result)
            else:
                self.retry(flight)
        return progressed

    def land_guesses(self) -> list[Turn]:
        """Collects the steps in flight if one of them computes guesses, or asks the model's head for some. A step that
        was planned before they are settled would leave out their rows, and the others would run ahead in steps of their
        own; or it would not have what the head guesses."""
        return self.land() if any(flight.decides_the_next for flight in self._flights) else []

    def collect(self) -> tuple[Flight, StepResult | None]:
        """Waits for the oldest step. Its result is `None` if it failed."""
        flight, result = self._flights.popleft(), None
        try:
            result = self._executor.collect()
            self._measure(flight, result.predicted.seconds if result.predicted is not None else 0.0)
        except StepFailed as error:
            if not self.is_void(flight):
                self._counts.note("step failed")
                turns = [turn.name for turn in self._live(flight)]
                log.warning("a step failed", extra={"step": flight.plan.step, "turns": turns, "error": str(error)})
        self._memory.step_settled()
        if self.is_void(flight):
            self._ask_masks()
        return flight, result

    def _measure(self, flight: Flight, guessing: float) -> None:
        """Records the time of a step: to compare guesses with single tokens and, if it is mostly prefill, to compare
        computing tokens with restoring them. `guessing`: the seconds of it that the model's head took to guess."""
        ended = self._clock.now()
        self._planner.times.note(len(flight.rows), len(flight.plan.tokens), ended - self._began - guessing)
        if len(flight.plan.tokens) >= PREFILL_TOKENS * len(flight.rows):
            self._idle_memory.tiers.rates.note("compute", len(flight.plan.tokens), ended - self._began)
        self.computed += len(flight.plan.tokens)
        self.seconds += ended - self._began
        if self.trace is not None:
            self.trace.step(flight, self._turns(flight), self._began, ended)
        self._began = ended

    def is_void(self, flight: Flight) -> bool:
        """Whether the step's result is dropped because an earlier step failed."""
        return flight.plan.step <= self._void

    def settle(self, flight: Flight, result: StepResult) -> list[Turn]:
        """Settles the results of a step, and ends the turns that are done. Returns the turns with new output."""
        settled = self._settler.settle(flight, result)
        self.sampled += settled.sampled
        if self._suspects:
            self._suspects.step_succeeded()
        for turn, reason in settled.ended:
            self._lifecycle.commit(turn, reason)
        for turn in settled.prefilled:
            if turn.drafting:
                self._lifecycle.rest(turn)
            else:
                self._lifecycle.commit(turn, EndReason.APPENDED)
        for turn in settled.stuck:
            failure = turn.constraint.failure if turn.constraint is not None else ""
            log.warning("a grammar cannot be followed", extra={"turn": turn.name, "error": failure})
            self._lifecycle.abort(turn, EndReason.GRAMMAR)
        self._ask_masks()
        self._ask_slow_masks(settled.progressed)
        return settled.progressed

    def _ask_masks(self) -> None:
        """Requests the masks of the oldest step in flight; called when it becomes the oldest, since all tokens before
        it are then settled. The executor waits for the masks only before it samples."""
        if not self._flights or not self._flights[0].masked:
            return
        flight, requests = self._flights[0], []
        live = self._memory.rows.run[flight.rows] == flight.runs
        for index, masks in zip(flight.masked, flight.plan.masks, strict=True):
            turn: Turn | None = self._batch.turns[flight.rows[index]] if live[index] else None
            if turn is None or turn.constraint is None or self.is_void(flight):
                give_up(masks.allowed)
            else:
                requests.append(
                    MaskRequest(turn.constraint, flight.guesses.get(index, NO_GUESSES).tokens, masks.allowed)
                )
        self._masks.ask(requests)

    def _ask_slow_masks(self, progressed: list[Turn]) -> None:
        """Requests masks that take long to compute before they are needed; see `Planner`."""
        slow = [turn.constraint for turn in progressed if turn.constraint is not None and turn.constraint.slow]
        if slow:
            self._masks.ask([MaskRequest(constraint, (), Future()) for constraint in slow])

    def retry(self, failed: Flight) -> None:
        """Retries the turns of a failed step and of the steps submitted since, whose results are dropped. They go on
        from their settled tokens, and the turns of the failed step become suspects."""
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
            self._batch.return_updates(flight.updates)
        for flight in self._flights:
            for masks in flight.plan.masks:
                give_up(masks.allowed)

    def _turns(self, flight: Flight) -> list[Turn | None]:
        """Returns the turn of each row of a flight, `None` if it has left it."""
        same = self._memory.rows.run[flight.rows] == flight.runs
        turns = self._batch.turns[flight.rows].tolist()
        return [turn if live else None for turn, live in zip(turns, same.tolist(), strict=True)]

    def _live(self, flight: Flight) -> list[Turn]:
        """Returns the turns of a flight that are still in their rows."""
        return [turn for turn in self._turns(flight) if turn is not None]
