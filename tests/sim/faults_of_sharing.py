"""More planted faults: of two steps in flight, repeated steps, shared checkpoints, and tenants. See `faults`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tenuto.engine.lifecycle import Lifecycle
from tenuto.memory.checkpoints.cache import CheckpointCache
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.kinds.paged import NO_PAGE, PagedTable
from tenuto.memory.pool import Pool
from tenuto.sched import planner
from tenuto.sched.admission import Admission
from tenuto.sched.batch import Batch
from tenuto.sched.settle import Settler
from tenuto.sched.shares import Shares
from tenuto.session.turn import Turn
from tests.sim.faults import replaced


def a_tail_moves_along_with_its_session() -> Any:
    """A session that has held a tail claims the tail of the page that is now its last."""

    def make(original: Any) -> Any:
        def end_at(self: PagedTable, position: int, page: int, *, brought: bool = False) -> None:
            had = self.tail
            original(self, position, page, brought=brought)
            if had != NO_PAGE and position % self.page_size:
                self.tail = page

        return end_at

    return replaced(PagedTable, "end_at", make)


def limbo_of_the_second_step_is_merged_with_the_firsts() -> Any:
    """Units released since the second step began become free when the first ends."""

    def make(original: Any) -> Any:
        def step_settled(self: Pool) -> None:
            original(self)
            for released in self._limbo:
                self._free.extend(released)
                released.clear()

        return step_settled

    return replaced(Pool, "step_settled", make)


def tokens_computed_for_a_turn_that_left_its_row_are_forgotten() -> Any:
    """The step settles without crediting the turn."""
    return replaced(Settler, "_settle_left", lambda original: lambda self, turn, settled: None)


def a_retry_keeps_the_failed_steps_checkpoint() -> Any:
    """After a failed step a turn assumes it can resume at the position that step should have reached."""

    def make(original: Any) -> Any:
        def retry(self: Lifecycle, turn: Turn) -> None:
            memory = turn.session.memory.turn
            kept = memory.checkpoints if memory is not None else None
            if kept is not None:
                kept.cut = lambda position: None  # type: ignore[method-assign]
                memory._take_back_slots = lambda checkpoint: None  # type: ignore[method-assign,union-attr]
            try:
                original(self, turn)
            finally:
                if kept is not None:
                    del kept.cut, memory._take_back_slots  # type: ignore[union-attr]

        return retry

    return replaced(Lifecycle, "retry", make)


def a_shared_checkpoint_is_released_by_the_first_of_two() -> Any:
    """Other holders still find it, though its units belong to another holder."""

    def make(original: Any) -> Any:
        def release(self: CheckpointCache, checkpoint: Checkpoint) -> None:
            if checkpoint.references > 1 and checkpoint in self:
                self._remove(checkpoint)
                checkpoint.count_now()
                for lease in checkpoint.leases():
                    lease.pool._give_back(lease.units)
                checkpoint.references -= 1
                return
            original(self, checkpoint)

        return release

    return replaced(CheckpointCache, "release", make)


def cached_checkpoints_are_never_evicted_for_room() -> Any:
    """Sessions lose their memory to checkpoints that only save work."""
    return replaced(CheckpointCache, "evict_for", lambda original: lambda self, groups: False)


def future_needs_of_running_turns_are_not_counted() -> Any:
    """Admission hands out the pages that running turns need for tokens they already know."""

    def make(original: Any) -> Any:
        def pledged(self: Admission, turn: Turn, *, later: bool = False) -> Any:
            return np.zeros(len(self._memory.pools), np.int64)

        return pledged

    return replaced(Admission, "_pledged", make)


def a_paused_turn_loses_its_memory() -> Any:
    """It loses its memory together with its row."""
    return replaced(Lifecycle, "pause", lambda original: Lifecycle.preempt)


def a_tenants_weight_is_ignored() -> Any:
    """All tenants have the same weight."""
    return replaced(Shares, "weight", lambda original: lambda self, turn: 1.0)


def the_last_start_of_a_tenant_is_not_noted() -> Any:
    """Among tenants with equally many rows, the one with the oldest turn always comes next."""
    return replaced(Shares, "last_start", lambda original: lambda self, turn: 0)


def the_next_turn_is_chosen_without_regard_to_tenants() -> Any:
    """A tenant whose many turns came first gets all rows."""

    def make(original: Any) -> Any:
        def next_turn(self: Admission, aside: Collection[Turn]) -> Turn | None:
            heads = [turn for turn in self._queue.heads() if turn not in aside]
            return min(heads, key=lambda turn: turn.rank(self._queue.aging_seconds)) if heads else None

        return next_turn

    return replaced(Admission, "_next", make)


def no_turn_yields_to_another_tenant() -> Any:
    """A tenant that has all rows keeps them."""

    def make(original: Any) -> Any:
        def load_before(self: Batch, turn: Turn) -> float:
            return -1.0

        return load_before

    return replaced(Batch, "load_before", make)


def tokens_go_to_the_first_tenant() -> Any:
    """The tenant that requests most is served first."""

    def make(original: Any) -> Any:
        def divide(budget: int, wishes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
            given: dict[str, int] = {}
            for tenant in sorted(wishes, key=lambda tenant: -wishes[tenant]):
                given[tenant] = min(wishes[tenant], budget)
                budget -= given[tenant]
            return given

        return divide

    return replaced(planner, "divide", make)


FAULTS_OF_SHARING = (
    a_tail_moves_along_with_its_session,
    limbo_of_the_second_step_is_merged_with_the_firsts,
    tokens_computed_for_a_turn_that_left_its_row_are_forgotten,
    a_retry_keeps_the_failed_steps_checkpoint,
    a_shared_checkpoint_is_released_by_the_first_of_two,
    cached_checkpoints_are_never_evicted_for_room,
    future_needs_of_running_turns_are_not_counted,
    a_paused_turn_loses_its_memory,
    a_tenants_weight_is_ignored,
    the_last_start_of_a_tenant_is_not_noted,
    the_next_turn_is_chosen_without_regard_to_tenants,
    no_turn_yields_to_another_tenant,
    tokens_go_to_the_first_tenant,
)
