"""More planted faults: of limbo, waiting and yielding, drafts, and counts. See `faults`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tenuto.base.options import TurnParams
from tenuto.base.turns import TurnState
from tenuto.base.views import SessionState
from tenuto.engine.auditor import Auditor
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.session_operations import SessionOperations
from tenuto.engine.timers import Timers
from tenuto.memory.checkpoints.cache import CheckpointCache
from tenuto.memory.kinds.paged import PagedTable, pages_for
from tenuto.memory.pool import Pool
from tenuto.memory.shape import Shape
from tenuto.sched.admission import Admission
from tenuto.sched.planner import Planner
from tenuto.sched.pressure import Pressure, Rung
from tenuto.sched.queue import WaitingQueue
from tenuto.sched.settle import Settler
from tenuto.sched.suspects import Suspects
from tenuto.session.pins import Pins
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.sim.faults import replaced, together


def limbo_is_freed_before_the_step_is_collected() -> Any:
    """Units that a step in flight may still touch can be handed out."""

    def make(original: Any) -> Any:
        return lambda self, units, *, unused=False: original(self, units, unused=True)

    return replaced(Pool, "_give_back", make)


def a_preempted_turn_loses_its_age() -> Any:
    """It queues behind every turn that arrived since."""

    def make(original: Any) -> Any:
        def leave(self: Lifecycle, turn: Turn, *more: Any) -> None:
            original(self, turn, *more)
            if turn.state is TurnState.PREEMPTED:
                self._queue.remove(turn)
                turn.arrival = self._clock.now() + 1e-6
                self._queue.push(turn)

        return leave

    return together(replaced(Lifecycle, "preempt", make), replaced(Lifecycle, "pause", make))


def preemption_does_not_require_a_higher_priority() -> Any:
    """A turn that has waited longer takes the row of another turn of the same priority."""

    def make(original: Any) -> Any:
        def may_yield(self: Admission, running: Turn, turn: Turn) -> bool:
            aging = self._queue.aging_seconds
            same = running.session.policy.tenant == turn.session.policy.tenant
            return bool(original(self, running, turn)) or (same and turn.rank(aging) < running.rank(aging))

        return may_yield

    return replaced(Admission, "_may_yield", make)


def the_purge_of_timers_drops_live_ones() -> Any:
    """When there are too many timers, the purge removes live ones too."""
    return replaced(Timers, "_is_live", lambda original: lambda self, *entry: False)


def keep_delivered_keeps_everything() -> Any:
    """Tokens whose text was held back are committed."""
    return replaced(Turn, "delivered", lambda original: property(lambda self: len(self.output)))


def late_input_scores_go_to_the_next_turn_in_the_row() -> Any:
    """Log-probabilities of a turn's input that arrive after it has left go to the turn now in its row."""

    def make(original: Any) -> Any:
        def take(self: Settler, flight: Any, scores: Any, live: Any) -> None:
            original(self, flight, scores, live | np.array([t is not None for t in self._batch.turns[flight.rows]]))

        return take

    return replaced(Settler, "_take_scores", make)


def late_vectors_go_to_the_next_turn_in_the_row() -> Any:
    """Vectors of a turn's input that arrive after it has left go to the turn now in its row."""

    def make(original: Any) -> Any:
        def take(self: Settler, flight: Any, vectors: Any, live: Any) -> None:
            original(self, flight, vectors, live | np.array([t is not None for t in self._batch.turns[flight.rows]]))

        return take

    return replaced(Settler, "_take_vectors", make)


def a_turn_gets_the_vector_of_another_row() -> Any:
    """The sums of a step go to its turns in reverse order."""
    return replaced(
        Settler,
        "_take_vectors",
        lambda original: lambda self, flight, vectors, live: original(self, flight, vectors[::-1], live),
    )


def a_turn_gets_the_vector_of_an_earlier_position() -> Any:
    """The last token's vector is taken one token too early where the step has computed one."""

    def make(original: Any) -> Any:
        def pool(self: Planner, proposal: Any) -> Any:
            vectors, pooled = original(self, proposal)
            if vectors is not None:
                begins = (proposal.counts.cumsum() - proposal.counts)[[part.index for part in pooled]]
                vectors = replace(vectors, firsts=np.maximum(vectors.firsts - 1, begins).astype(np.int32))
            return vectors, pooled

        return pool

    return replaced(Planner, "_pool_input", make)


def averaged_input_may_begin_with_shared_memory() -> Any:
    """A turn whose input is averaged leaves out the tokens whose state it finds in the prefix index."""
    return replaced(TurnParams, "needs_input", lambda original: property(lambda self: self.scores_input))


def the_checkpoint_budget_is_the_whole_pool() -> Any:
    """Checkpoints that only save work may fill every pool."""

    def make(original: Any) -> Any:
        def init(self: CheckpointCache, pools: Any, budget: Any) -> None:
            original(self, pools, [pool.capacity for pool in pools])

        return init

    return replaced(CheckpointCache, "__init__", make)


def spaced_checkpoints_are_not_aligned_to_pages() -> Any:
    """They are placed at exact multiples of the interval."""

    def make(original: Any) -> Any:
        def of(config: Any, page_size: int) -> Shape:
            return replace(original.__func__(config, page_size), checkpoint_interval=config.checkpoint_interval)

        return staticmethod(of)

    return replaced(Shape, "of", make)


def admission_does_not_count_the_copy_of_the_tail() -> Any:
    """The worst case leaves out the page that a shared, partly filled page is copied to."""
    return replaced(
        PagedTable, "entries_at", lambda original: lambda self, start, *, at_end: pages_for(start, self.page_size)
    )


def a_refused_turn_is_not_reconsidered_while_others_run() -> Any:
    """It waits until nothing runs, even if room has been freed."""

    def make(original: Any) -> Any:
        def make_room(self: Admission, turn: Turn) -> bool:
            if len(self._batch) and self._refused is not None and self._refused[0] == turn.number:
                return False
            return bool(original(self, turn))

        return make_room

    return replaced(Admission, "_make_room", make)


def a_suspect_shares_steps() -> Any:
    """A turn whose steps fail keeps failing the steps of others."""
    return replaced(Suspects, "rows", lambda original: lambda self, held: [])


def bisection_never_splits() -> Any:
    """All turns of a failed step stay suspects together."""

    def make(original: Any) -> Any:
        def step_failed(self: Suspects, turns: Any, *, alone: bool) -> None:
            original(self, turns, alone=alone)
            self._groups = [[turn for group in self._groups for turn in group]] if self._groups else []

        return step_failed

    return replaced(Suspects, "step_failed", make)


def suspects_are_never_cleared() -> Any:
    """A turn that has passed the position where it failed still shares no step."""
    return replaced(Suspects, "step_succeeded", lambda original: Suspects._tidy)


def preempted_work_is_not_counted() -> Any:
    """`usage.computed` leaves out the work that a preemption threw away."""

    def make(original: Any) -> Any:
        def preempt(self: Lifecycle, turn: Turn, *more: Any) -> None:
            before = turn.computed_tokens
            original(self, turn, *more)
            turn.computed_tokens = before

        return preempt

    return replaced(Lifecycle, "preempt", make)


def a_fork_inherits_ephemeral() -> Any:
    """A one-shot session's child closes after its first turn."""

    def make(original: Any) -> Any:
        def fork(self: SessionOperations, session_id: str, **options: Any) -> Session:
            child: Session = original(self, session_id, **options)
            child.policy = self._registry.get(session_id, options["tenant"]).policy
            return child

        return fork

    return replaced(SessionOperations, "fork", make)


def the_rebuilt_queue_is_empty() -> Any:
    """Purging the heaps of turns that left removes waiting turns too."""

    def make(original: Any) -> Any:
        def rebuild(self: WaitingQueue) -> None:
            self._heaps, self._listed = {}, 0

        return rebuild

    return replaced(WaitingQueue, "_rebuild", make)


def _without(owner: Any, name: str, forgotten: Callable[[Any], tuple[Any, str]]) -> Any:
    """Runs `owner.name` while a method of another object does nothing."""

    def make(original: Any) -> Any:
        def operation(self: Any, *args: Any, **options: Any) -> Any:
            target, method = forgotten(self)
            setattr(target, method, lambda *_: None)
            try:
                return original(self, *args, **options)
            finally:
                delattr(target, method)

        return operation

    return replaced(owner, name, make)


def a_rewind_does_not_note_the_length() -> Any:
    """The tokens counted in the tenant's sessions are too many."""
    return _without(SessionOperations, "rewind", lambda operations: (operations._registry, "note_length"))


def a_forked_session_is_never_evictable() -> Any:
    """Pressure does not see the fork until its first turn."""
    return _without(SessionOperations, "fork", lambda operations: (operations._lifecycle.pressure, "note"))


def a_resting_draft_is_never_evictable() -> Any:
    """Pressure does not learn that the draft has left its row."""
    return _without(Lifecycle, "rest", lambda lifecycle: (lifecycle.pressure, "note"))


def a_dropped_draft_is_not_computed_again() -> Any:
    """It does not return to the queue."""

    def make(original: Any) -> Any:
        def drop(self: Lifecycle, session: Session, *more: Any) -> None:
            original(self, session, *more)
            if session.turn is not None and session.turn.state is TurnState.DRAFTING:
                self._queue.remove(session.turn)

        return drop

    return replaced(Lifecycle, "drop", make)


def _taking_in(meanwhile: Callable[[Session], int]) -> Any:
    def make(original: Any) -> Any:
        def commit(self: Session, turn: Turn, output: Any) -> None:
            if self.memory.turn is not None:
                original(self, turn, output)
                return
            cut = self.memory.truncate
            self.memory.truncate = lambda target: cut(meanwhile(self))  # type: ignore[method-assign]
            try:
                original(self, turn, output)
            finally:
                del self.memory.truncate

        return commit

    return replaced(Session, "commit", make)


def barge_in_of_a_preempted_turn_drops_the_session() -> Any:
    """Its history has to be computed again."""
    return _taking_in(lambda session: 0)


def regenerate_after_a_preemption_keeps_memory_past_its_base() -> Any:
    """The old output's memory stays below the new output."""
    return _taking_in(lambda session: max(0, len(session.history) - 1))


def admission_ignores_what_drafts_hold() -> Any:
    """A draft's admission treats units that others hold as free, and their holders yield to it."""

    def make(original: Any) -> Any:
        def fits_beside(self: Admission, turn: Turn, need: Any, kept: Any) -> bool:
            kept = [other for other in kept if not other.drafting]
            return bool((need + self._pledged(turn) <= self._pressure.room_beside([turn, *kept])).all())

        return fits_beside

    def anyone(original: Any) -> Any:
        return lambda self, *given, **draft: original(self, *given)

    return together(replaced(Admission, "_fits_beside", make), replaced(Pressure, "relieve", anyone))


def the_audit_of_a_step_in_flight_looks_at_nothing() -> Any:
    """The audit accepts free units that a step in flight touches."""
    return replaced(Auditor, "_touched", lambda original: lambda self, flights: [])


def a_pinned_session_yields_like_any_other() -> Any:
    """A pinned session is listed among the evictable ones."""

    def make(original: Any) -> Any:
        def place(session: Session) -> Any:
            idle = session.policy.pinned and not session.has_running_turn and session.memory.turn is None
            if idle and session.memory.computed and session.state is not SessionState.CLOSED:
                return (Rung.IDLE if session.turn is None else Rung.WAITING), session.policy.priority
            return original.__func__(session)

        return staticmethod(place)

    return replaced(Pressure, "_place", make)


def pinned_memory_counts_as_free() -> Any:
    """Turns are admitted as if pinned memory could yield."""

    def make(original: Any) -> Any:
        def held_by(self: Pressure, turns: Any) -> Any:
            pinned, self._pinned = self._pinned, {}
            try:
                return original(self, turns)
            finally:
                self._pinned = pinned

        return held_by

    return replaced(Pressure, "_held_by", make)


def sessions_are_pinned_without_checking_for_room() -> Any:
    """No turn may fit beside them."""
    return replaced(Pins, "require", lambda original: lambda self, limit: None)


FAULTS_OF_SCHEDULE = (
    a_pinned_session_yields_like_any_other,
    pinned_memory_counts_as_free,
    sessions_are_pinned_without_checking_for_room,
    limbo_is_freed_before_the_step_is_collected,
    a_preempted_turn_loses_its_age,
    preemption_does_not_require_a_higher_priority,
    the_purge_of_timers_drops_live_ones,
    keep_delivered_keeps_everything,
    late_input_scores_go_to_the_next_turn_in_the_row,
    late_vectors_go_to_the_next_turn_in_the_row,
    a_turn_gets_the_vector_of_another_row,
    a_turn_gets_the_vector_of_an_earlier_position,
    averaged_input_may_begin_with_shared_memory,
    the_checkpoint_budget_is_the_whole_pool,
    spaced_checkpoints_are_not_aligned_to_pages,
    admission_does_not_count_the_copy_of_the_tail,
    a_refused_turn_is_not_reconsidered_while_others_run,
    a_suspect_shares_steps,
    bisection_never_splits,
    suspects_are_never_cleared,
    preempted_work_is_not_counted,
    a_fork_inherits_ephemeral,
    the_rebuilt_queue_is_empty,
    a_rewind_does_not_note_the_length,
    a_forked_session_is_never_evictable,
    a_resting_draft_is_never_evictable,
    a_dropped_draft_is_not_computed_again,
    barge_in_of_a_preempted_turn_drops_the_session,
    regenerate_after_a_preemption_keeps_memory_past_its_base,
    admission_ignores_what_drafts_hold,
    the_audit_of_a_step_in_flight_looks_at_nothing,
)
