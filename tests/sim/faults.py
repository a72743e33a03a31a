"""The known failures of this field, planted one at a time, to show that the simulator catches each.

Each is a context manager that gives the core one fault reported of engines of this kind. It replaces methods of classes
from outside, and restores them at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from tenuto.base.turns import EndReason, Keep, TurnState
from tenuto.engine.gate import TurnGate
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.turn_operations import TurnOperations
from tenuto.memory.kinds import full, paged
from tenuto.memory.kinds.full import FullTable
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Lease, Pool
from tenuto.memory.rows import Rows
from tenuto.memory.turn_memory import TurnMemory
from tenuto.sched.admission import Admission
from tenuto.session.registry import Registry
from tenuto.session.turn import Turn


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `owner.name` with `make(original)` inside the context."""
    original = vars(owner)[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def together(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    """Enters all of the contexts."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def a_turn_that_did_not_fit_frees_its_sessions_state() -> Any:
    """A turn rejected by admission releases its session's state slot, which is freed twice later."""

    def make(original: Any) -> Any:
        def admit_pass(self: Admission) -> Any:
            blocked = original(self)
            kept = blocked.session.memory.checkpoints.needed if blocked is not None else None
            for lease in kept.leases() if kept is not None else ():
                lease.pool._give_back(lease.units)
            return blocked

        return admit_pass

    return replaced(Admission, "_pass", make)


def borrowed_memory_is_counted_twice() -> Any:
    """Units that a turn started from are listed by the turn and by their source, so a healthy server reports a leak."""

    def make(original: Any) -> Any:
        def leases(self: TurnMemory) -> Iterator[Lease]:
            yield from original(self)
            yield from self.session.leases()

        return leases

    return replaced(TurnMemory, "leases", make)


def reserved_slots_are_not_returned() -> Any:
    """Slots that an admission pass reserved and did not use stay taken."""

    def make(original: Any) -> Any:
        @contextmanager
        def reserve(self: Pool, count: int, holder: Any) -> Iterator[Lease]:
            lease = self.acquire(min(count, self.free), holder)
            assert lease is not None
            yield lease

        return reserve

    return replaced(Pool, "reserve", make)


def an_aborted_turn_wipes_its_session() -> Any:
    """Abort drops the session's computed memory."""

    def make(original: Any) -> Any:
        def abort(self: Turn, reason: EndReason, now: float) -> Any:
            result = original(self, reason, now)
            self.session.memory.drop()
            return result

        return abort

    return replaced(Turn, "abort", make)


def an_aborted_turn_overwrites_its_session() -> Any:
    """Abort leaves the turn's input in the history."""

    def make(original: Any) -> Any:
        def abort(self: Turn, reason: EndReason, now: float) -> Any:
            self.session.history.extend(self.input)
            return original(self, reason, now)

        return abort

    return replaced(Turn, "abort", make)


def a_rejected_turn_clears_the_live_ones_mark() -> Any:
    """A second turn on a busy session is refused, but the session forgets the first one."""

    def make(original: Any) -> Any:
        def submit(self: TurnOperations, session_id: str, *rest: Any, tenant: str = "", **more: Any) -> Any:
            session = self._registry.find(session_id, tenant)
            if session is not None and session.turn is not None and session.turn.state is not TurnState.DRAFTING:
                session.turn = None
            return original(self, session_id, *rest, tenant=tenant, **more)

        return submit

    return replaced(TurnOperations, "submit", make)


def a_preempted_turn_is_committed_as_history() -> Any:
    """Retraction saves the turn's output as if the turn had ended."""

    def make(original: Any) -> Any:
        def preempt(self: Turn) -> None:
            self.session.commit(self, self.output)
            self.go("preempt")

        return preempt

    return replaced(Turn, "preempt", make)


def a_turn_aborted_in_the_queue_is_committed() -> Any:
    """A barge-in on a turn that never ran commits its input."""

    def make(original: Any) -> Any:
        def abort(self: TurnOperations, session_id: str, keep: Keep = None, *, tenant: str = "") -> Any:
            session = self._registry.find(session_id, tenant)
            turn = session.turn if session is not None else None
            if turn is not None and keep is not None and turn.state is TurnState.QUEUED:
                turn.state, turn.started = TurnState.PREEMPTED, True
            return original(self, session_id, keep, tenant=tenant)

        return abort

    return replaced(TurnOperations, "abort", make)


def an_over_allocated_tail_loses_its_last_lease() -> Any:
    """Pages past the committed end are forgotten instead of released."""

    def make(original: Any) -> Any:
        def commit(self: FullTable, position: int, kept: Any) -> None:
            keep = paged.pages_for(position, self.page_size) - self.first
            if len(self.opened):
                del self.opened.units[max(0, keep) :]
            original(self, position, kept)

        return commit

    return replaced(FullTable, "commit", make)


def a_partly_used_page_is_freed_under_committed_tokens() -> Any:
    """Cutting a sequence rounds down to whole pages."""
    return replaced(full, "pages_for", lambda original: lambda tokens, size: tokens // size)


def an_idle_timeout_closes_a_session_whose_turn_runs() -> Any:
    """Expiry looks at the clock and ignores the open turn."""

    def make(original: Any) -> Any:
        def expired(self: Registry) -> list[Any]:
            now = self._clock.now()
            late = [s for s in self if s.policy.ttl is not None and s.last_turn_end + s.policy.ttl <= now]
            for session in late:
                session.turn = None
            return late

        return expired

    return replaced(Registry, "expired", make)


def a_turn_without_tokens_takes_a_row() -> Any:
    """A turn with nothing to compute is scheduled like any other and waits for a result that never comes."""

    def make(original: Any) -> Any:
        def start(self: Lifecycle, turn: Turn, slots: Any) -> None:
            if turn.generates or turn.state is TurnState.DRAFTING or not turn.length:
                original(self, turn, slots)
                return
            turn.go("start")
            turn.started = True
            self._batch.add(turn, slots)
            self.pressure.note(turn.session)

        return start

    return replaced(Lifecycle, "start", make)


def a_turn_may_be_longer_than_the_context() -> Any:
    """The requested length is accepted without a check."""

    def make(original: Any) -> Any:
        def allowed(self: TurnGate, session: Any, prompt: int, wanted: int | None) -> int:
            return wanted if wanted is not None else original(self, session, prompt, wanted)

        return allowed

    return replaced(TurnGate, "allowed", make)


def a_disconnect_leaves_a_zombie_turn() -> Any:
    """Abort reports success, and the turn stays in its row."""

    def make(original: Any) -> Any:
        def abort(self: Lifecycle, turn: Turn, reason: EndReason) -> None:
            if turn.state is TurnState.RUNNING and reason is EndReason.ABORT:
                turn.session.turn = None
                return
            original(self, turn, reason)

        return abort

    return replaced(Lifecycle, "abort", make)


def a_source_is_evicted_between_match_and_use() -> Any:
    """A turn reads its session's checkpoint without pinning it, so the cache may evict it."""

    def begin(original: Any) -> Any:
        def init(self: TurnMemory, *args: Any) -> None:
            original(self, *args)
            self.loose = self.source  # type: ignore[attr-defined]
            if self.source is not None:
                self.memory.cache.unpin(self.source)

        return init

    def end(original: Any) -> Any:
        def ending(self: TurnMemory, *args: Any) -> Any:
            loose, self.loose = self.loose, None  # type: ignore[attr-defined]
            if loose is not None:
                self.memory.cache.require(loose)
            return original(self, *args)

        return ending

    return together(
        replaced(TurnMemory, "__init__", begin),
        *(replaced(TurnMemory, n, end) for n in ("commit", "abort", "truncate")),
    )


def a_page_has_two_owners_while_totals_balance() -> Any:
    """Occasionally the pool hands out a page that another turn holds, and keeps the free page it should have handed
    out."""

    def make(original: Any) -> Any:
        def take(self: Pool, count: int) -> list[int] | None:
            units = original(self, count)
            if units and self.touched % 50 == 0:
                held = [unit for unit in range(self.capacity) if self.counts[unit] == 1 and unit not in units]
                if held:
                    units[0] = held[0]
            return units

        return take

    return replaced(Pool, "_take", make)


def a_wrong_guess_is_kept() -> Any:
    """Memory is not cut back when lookahead tokens are rejected."""
    return replaced(Memory, "reject", lambda original: lambda self, row, position: None)


def a_stale_result_is_accepted() -> Any:
    """A result that arrives after its turn has left the row goes to the turn now in that row."""

    def make(original: Any) -> Any:
        def give_back(self: Any, row: int) -> None:
            original(self, row)
            self.run[row] -= 1

        return give_back

    return replaced(Rows, "give_back", make)


def a_fork_writes_its_parents_page() -> Any:
    """The child takes the parent's tail."""
    return replaced(FullTable, "writable", lambda original: lambda self, position: True)


FAULTS = (
    a_turn_that_did_not_fit_frees_its_sessions_state,
    borrowed_memory_is_counted_twice,
    reserved_slots_are_not_returned,
    an_aborted_turn_wipes_its_session,
    an_aborted_turn_overwrites_its_session,
    a_rejected_turn_clears_the_live_ones_mark,
    a_preempted_turn_is_committed_as_history,
    a_turn_aborted_in_the_queue_is_committed,
    an_over_allocated_tail_loses_its_last_lease,
    a_partly_used_page_is_freed_under_committed_tokens,
    an_idle_timeout_closes_a_session_whose_turn_runs,
    a_turn_without_tokens_takes_a_row,
    a_turn_may_be_longer_than_the_context,
    a_disconnect_leaves_a_zombie_turn,
    a_source_is_evicted_between_match_and_use,
    a_page_has_two_owners_while_totals_balance,
    a_wrong_guess_is_kept,
    a_stale_result_is_accepted,
    a_fork_writes_its_parents_page,
)
