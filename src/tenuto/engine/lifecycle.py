"""The transitions of turns, from the queue to their end, and their effects on sessions."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from tenuto.base.errors import InvariantError
from tenuto.base.turns import EndReason, TurnState
from tenuto.base.views import SessionState
from tenuto.engine.core import Core
from tenuto.engine.expectations import Expectations
from tenuto.engine.sharing import Found, Sharing
from tenuto.engine.timers import Timers
from tenuto.memory.pool import Lease
from tenuto.sched.batch import continues_from, is_computed
from tenuto.sched.pressure import Pressure
from tenuto.session.changes import Change, ChangeKind
from tenuto.session.session import Session
from tenuto.session.turn import Turn

PARKS = ("pressure", "made way")
"""The reasons for which a session loses memory that is parked first."""


class Lifecycle:
    """Makes every transition of turns and sessions, and keeps queue, batch, pressure and timers in step with it."""

    def __init__(self, core: Core) -> None:
        self._sessions = core.registry
        self._idle_memory = core.idle_memory
        self._restores = core.restores
        self._queue = core.queue
        self._clock = core.clock
        self._batch = core.batch
        self._counts = core.counts
        self._outcomes = core.outcomes
        self._proposer = core.proposer
        self.timers = Timers(core.registry, core.config.draft_timeout)
        self.pressure = Pressure(core.memory, core.batch, core.clock, self)
        self.expectations = Expectations(core, self.pressure, self.note_memory)
        self.sharing = Sharing(core, self.pressure)
        self.withdraw_arrival: Callable[[], bool] = lambda: False  # see `Arrivals.withdraw`, which sets it

    def withdraw(self) -> bool:
        """See `Yielding`."""
        return self.expectations.withdraw() or self.withdraw_arrival()

    def note(
        self,
        kind: ChangeKind,
        session: Session,
        *,
        kept: int = 0,
        turn: Turn | None = None,
        parent: Session | None = None,
        same: int | None = None,
    ) -> Change:
        """Records and returns a change that has just been made; see `Change`."""
        if parent is not None:
            self._idle_memory.fork(parent, session)
        elif kind in ("close", "erase"):
            self._idle_memory.forget(session)
        else:
            self._idle_memory.changed(session, kept)
        change = Change.of(kind, session, kept, turn, parent, self._clock.wall(), same)
        self._outcomes.changes.append(change)
        return change

    def record(self, turn: Turn, request: bytes) -> None:
        """Records the request of a submitted turn, by which another replica can begin it again, until it ends."""
        turn.recorded = True
        self._note_turn("begin", turn.session, request)

    def _note_turn(self, kind: ChangeKind, session: Session, request: bytes = b"") -> None:
        """Records a change that leaves the history as it is."""
        kept, same = len(session.history), len(session.records)
        change = Change.of(kind, session, kept, used=self._clock.wall(), same=same, request=request)
        self._outcomes.changes.append(change)

    def enqueue(self, turn: Turn, event: str) -> None:
        """Queues a submitted turn. `event` names the operation that submitted it."""
        self._counts.note(event)
        self.expectations.met(turn.session)
        turn.session.turn = turn
        self._sessions.note_turn(turn.session)
        self.timers.submitted(turn)
        self._queue.push(turn)
        self.pressure.note(turn.session)

    def start(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Gives a waiting turn its row, or ends it if it has nothing to compute."""
        if not turn.drafting:
            self._counts.note("start" if turn.state is TurnState.QUEUED else "resume")
            turn.go("start")
            turn.started = True
        self._restores.restore(turn, slots)
        awaits = self._restores.awaits(turn)
        if is_computed(turn) and not awaits:  # such a turn needs no units
            for lease in slots:
                lease.release(unused=True)
            if not turn.drafting:
                self._first_run(turn)
                self.commit(turn, EndReason.APPENDED)
            return
        self._batch.add(turn, slots)
        if awaits:
            self._restores.begun(turn)
            self._batch.held.add(self._batch.row_of(turn))
        else:
            self._goes_on(turn)
        self.pressure.note(turn.session)

    def _goes_on(self, turn: Turn) -> None:
        """Lets a turn run whose session's memory is complete, unless it waits for another turn to compute a common
        prefix."""
        self.sharing.started(turn)
        if not (turn.drafting or self.sharing.waits(turn)):
            self._first_run(turn)

    def _first_run(self, turn: Turn) -> None:
        """Records, once, how many tokens a submitted turn that begins to compute has found in memory, and when."""
        if turn.cached < 0:
            turn.begun = self._clock.now()
            turn.cached = min(continues_from(turn), turn.prompt_length)
            turn.computed_before = turn.computed_tokens
            self._note_recomputed(turn)
            self.sharing.counted(turn)

    def _note_recomputed(self, turn: Turn) -> None:
        """Counts the tokens of the history that a starting turn has to compute again, by reason."""
        memory, wanted = turn.session.memory, min(turn.resume_position, max(0, turn.base_length - 1))
        if (missing := wanted - continues_from(turn)) > 0:
            self._recompute(turn, "no checkpoint" if memory.computed >= wanted else memory.lost, missing)

    def _recompute(self, turn: Turn, why: str, tokens: int) -> None:
        """Counts tokens that the turn has to compute again."""
        self._counts.recomputed[why] += tokens
        turn.recomputed[why] += tokens

    def _leave_row(self, turn: Turn) -> None:
        """Takes the turn out of the batch; called before its memory is detached. If it waits for memory to arrive,
        gives that memory up: the session stays parked."""
        memory = turn.session.memory.turn
        if memory is not None and memory.row >= 0:
            self.sharing.left(turn)
            self._batch.remove(turn, memory.row)
            if self._restores.awaits(turn):
                memory.abort()
                self._restores.give_up(turn)
                self.note_memory(turn.session)

    def preempt(self, turn: Turn, why: str = "preempted") -> None:
        """Releases the units that a turn has acquired; it is running, or a draft or waiting turn with memory."""
        memory = turn.session.memory.turn
        if memory is not None:
            self._recompute(turn, why, memory.computed - memory.start)
        if turn.state is not TurnState.RUNNING:
            self.drop(turn.session)
            return
        self._leave_row(turn)
        turn.preempt()
        self._counts.note("preempt")
        self._queue.push(turn)
        self.pressure.note(turn.session)

    def retry(self, turn: Turn) -> None:
        """Continues a turn of a failed step from its settled tokens. If it had a row, it gets one again."""
        memory = turn.session.memory.turn
        running = memory is not None and memory.row >= 0
        if not self._keep_settled(turn, "step failed", "step failed"):
            return
        if running:
            self._batch.add(turn, ())
            self.sharing.started(turn)
        elif turn.drafting:
            self._queue.push(turn)

    def _keep_settled(self, turn: Turn, why: str, why_preempted: str) -> bool:
        """Takes the turn out of its row, if it has one, and cuts its memory back to the settled tokens. Returns False,
        having preempted the turn, if it relied on a checkpoint that a failed step, or a step in flight, was to fill."""
        memory = turn.session.memory.turn
        if memory is None:
            raise InvariantError(f"{turn.name} has no memory to cut")
        position = memory.cut_to(memory.computed)
        if position < memory.first_position:
            self.preempt(turn, why_preempted)
            return False
        self._recompute(turn, why, memory.computed - position)
        self._leave_row(turn)
        memory.truncate(position)
        return True

    def pause(self, turn: Turn) -> None:
        """Frees the row of a running turn or a draft for another turn. A draft keeps its memory, and a running turn
        keeps its settled tokens. A turn whose memory is still arriving gives it up."""
        if self._restores.awaits(turn):
            self._queue_again(turn, "paused")
            return
        if turn.drafting:
            self.rest(turn)
            self._queue.push(turn)
            return
        if self._keep_settled(turn, "paused", "preempted"):
            turn.pause()
            self._counts.note("pause")
            self._queue.push(turn)
            self.pressure.note(turn.session)

    def hold(self, turn: Turn) -> None:
        """Takes a submitted turn out of its row and the queue until `go_on`, with the memory of its settled tokens. No
        step is in flight."""
        if turn.running:
            self.pause(turn)
        elif turn.session.memory.turn is not None:
            self._keep_settled(turn, "paused", "preempted")
        self._queue.remove(turn)

    def go_on(self, turn: Turn) -> None:
        """Queues a submitted turn that was held, here or in another engine."""
        self._sessions.note_turn(turn.session)
        self.timers.submitted(turn)
        self._queue.push(turn)
        self.pressure.note(turn.session)

    def drop(self, session: Session, why: str = "pressure") -> None:
        """Releases the memory of the open turn if it has any, otherwise the session's: the last resort of pressure. The
        tokens are kept and computed again later. The turn must not be running."""
        turn = session.turn
        if turn is not None and session.memory.turn is not None:
            self._leave_row(turn)
            turn.lose_memory()
        else:
            if session.state is not SessionState.CLOSED:
                if why in PARKS:
                    self._idle_memory.park(session)
                else:
                    self._idle_memory.forget(session)
            session.memory.drop()
            session.memory.lost = why
            if turn is not None and why == "restart":
                self.sharing.no_room(turn)
        if self._sessions.forget_prefix(session):
            self._counts.note("drop", "prefix")
        else:
            self._counts.note("drop", turn.state if turn is not None else "idle")
        if turn is not None and turn.drafting:
            self._queue.push(turn)  # computed again when there is room
        self.note_memory(session)

    def flush(self, session: Session, why: str = "flushed") -> bool:
        """Drops a session without a running turn to its tokens, on the device and in tiers; `why` is counted when they
        are computed again. Returns whether it held anything on the device."""
        self._idle_memory.forget(session)
        self.expectations.forget(session)
        held = session.memory.computed > 0 or session.memory.turn is not None
        while session.memory.computed or session.memory.turn is not None:
            self.drop(session, why)
        return held

    def note_memory(self, session: Session) -> None:
        """Updates indexes and counters after the memory or history of a session without a running turn has changed."""
        self._index(session)
        self._sessions.note_units(session)
        self.pressure.note(session)

    def replaced(self, session: Session, source: Session, kept: int, same: int) -> None:
        """Records that the history of `session` after its first `kept` tokens and `same` records was replaced by that
        of `source`, and shares the parked memory of `source` if it goes farther."""
        self.sharing.index.changed(session, kept)
        self.note("replace", session, kept=kept, same=same)
        if self._idle_memory.position(source) > self._idle_memory.position(session):
            self._idle_memory.fork(source, session)
        self.note_memory(session)
        self.pressure.note(source)

    def _index(self, session: Session) -> None:
        """Lets other turns find the session's present memory, and drops kept sessions that it covers."""
        for covered in self.sharing.note_memory(session):
            self.drop(covered, "covered")

    def join(self) -> None:
        """Continues turns that waited in their rows, once their memory has arrived or other turns have computed the
        common prefix."""
        for turn, arrived in self._restores.arrivals():
            if arrived:
                self._arrived(turn)
            else:
                self._queue_again(turn, "restore failed")
        for turn, found in self.sharing.ready():
            if found is not None:
                self._begin_again(turn, found)
            if turn.running and not self.sharing.waits(turn):
                self._first_run(turn)

    def _queue_again(self, turn: Turn, why: str) -> None:
        """Takes a turn that waits for memory to arrive out of its row, without that memory."""
        if not turn.drafting:
            self.preempt(turn, why)
            return
        self._leave_row(turn)
        self._queue.push(turn)
        self.pressure.note(turn.session)

    def _arrived(self, turn: Turn) -> None:
        """Continues a turn in its row after its session's memory has arrived, if it has anything to compute."""
        self._batch.held.discard(self._batch.row_of(turn))
        self._goes_on(turn)
        if is_computed(turn):
            if turn.drafting:
                self.rest(turn)
            else:
                self.commit(turn, EndReason.APPENDED)

    def _begin_again(self, turn: Turn, found: Found) -> None:
        """Restarts a turn in a row, which has not computed anything, with the memory that was found."""
        memory = turn.session.memory.turn
        if memory is None:
            raise InvariantError(f"{turn.name} has no memory to withdraw")
        self._batch.remove(turn, memory.row)
        units = memory.withdraw()
        self.sharing.begin_with(turn, found)
        if not is_computed(turn):
            self._batch.add(turn, units)
            self.sharing.started(turn)
            return
        for lease in units:
            lease.release(unused=True)
        self.sharing.left(turn)
        self._first_run(turn)
        self.commit(turn, EndReason.APPENDED)

    def rest(self, turn: Turn) -> None:
        """Frees the row of a draft that is fully computed. The draft keeps its memory."""
        self._leave_row(turn)
        memory = turn.session.memory.turn
        if memory is None:
            raise InvariantError(f"{turn.name} rests without memory")
        memory.detach()
        self.pressure.note(turn.session)

    def redraft(self, turn: Turn, new: array[int]) -> None:
        """Replaces the draft's input by `new`, and keeps the computed part of their common prefix."""
        old = turn.input
        common = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        self._queue.remove(turn)
        memory = turn.session.memory.turn
        if self._restores.awaits(turn):
            self._leave_row(turn)
        elif memory is not None:
            kept = min(turn.base_length + common, max(0, turn.base_length + len(new) - 1))
            position = memory.cut_to(kept, in_flight=True)
            turn.failed_end = min(turn.failed_end, position + 1)
            self._leave_row(turn)
            if position > memory.start:
                memory.truncate(position)
            else:
                memory.abort()
        turn.input = new

    def queue_draft(self, turn: Turn) -> None:
        """Queues a draft that has changed, and restarts its timeout."""
        turn.changed = self._clock.now()
        self.timers.drafted(turn)
        if continues_from(turn) < turn.last_position:
            self._queue.push(turn)
        self.pressure.note(turn.session)

    def commit(self, turn: Turn, reason: EndReason, keep: int | None = None) -> None:
        """Ends the turn, and appends its input and first `keep` (`None`: all) output tokens to the history."""
        if turn.text is not None and reason is not EndReason.ABORT:
            turn.text.finish()
        self._leave_row(turn)
        barge_in = reason is EndReason.ABORT
        self._counts.note("barge-in" if barge_in else "commit", turn.state if barge_in else None)
        turn.commit(reason, self._clock.now(), keep)
        if self._proposer is not None:
            self._proposer.committed(turn)
        self.note("commit", turn.session, kept=turn.base_length, turn=turn)
        self._turn_ended(turn)

    def abort(self, turn: Turn, reason: EndReason) -> None:
        """Ends the turn, and leaves its session as it was before."""
        self._leave_row(turn)
        self._counts.note(reason.value, turn.state)
        turn.abort(reason, self._clock.now())
        if turn.recorded:
            self._note_turn("drop", turn.session)
        self._turn_ended(turn)

    def _turn_ended(self, turn: Turn) -> None:
        session = turn.session
        self._queue.remove(turn)
        self._outcomes.ended.append(turn)
        self._sessions.note_length(session)
        committed = turn.result is not None and turn.result.committed
        self.sharing.index.changed(session, turn.prompt_length if committed else len(session.history))
        if turn.result is not None:
            self._counts.add(turn.result.usage)
        if session.state is SessionState.CLOSING or session.policy.ephemeral:
            self.close(session)
        else:
            self._sessions.watch(session)
            self.note_memory(session)
            if committed and turn.params.expect_within is not None:
                self.expectations.expect(session, turn.params.expect_within)

    def close(self, session: Session) -> None:
        """Closes and removes a session without an open turn. Its memory stays for other turns to share, unless another
        session covers it."""
        self._index(session)
        self._close(session, "close", keep=self.sharing.index.keep(session))

    def erase(self, session: Session) -> Change:
        """Closes and removes a session without an open turn. It keeps no memory."""
        return self._close(session, "erase", keep=False)

    def came(self, session: Session) -> None:
        """Called with every new session, before it has memory."""
        self._idle_memory.came(session)

    def leave(self, session: Session, *, keep_saved: bool) -> None:
        """Removes a session without an open turn that another engine continues. It keeps no memory, but its saved state
        stays for that one with `keep_saved`."""
        self._idle_memory.forget(session, keep_saved=keep_saved)
        self._remove(session, "leave", keep=False)
        self._sessions.note_left(session)

    def _remove(self, session: Session, event: str, *, keep: bool) -> None:
        self._sessions.close(session, keep=keep)
        self.note_memory(session)
        self._counts.note(event)

    def _close(self, session: Session, kind: ChangeKind, *, keep: bool) -> Change:
        self._remove(session, kind, keep=keep)
        return self.note(kind, session, kept=len(session.history))

    def expire(self) -> None:
        """Ends turns past their deadlines and drafts left unchanged for too long, and closes expired sessions."""
        for turn in self.timers.due(self._clock.now()):
            self.abort(turn, EndReason.DEADLINE)
        for session in self._sessions.expired():
            self._counts.note("expire")
            self.close(session)
        for session in self._sessions.take_resting():
            if session.turn is None and session.state is SessionState.OPEN:
                self._park(session)

    def _park(self, session: Session) -> None:
        """Moves an idle session that will expire off the device, if it can be parked."""
        if not session.policy.pinned and session.memory.computed and self._idle_memory.park(session):
            session.memory.drop()
            session.memory.lost = "expiring"
            self._counts.note("park")
            self.note_memory(session)
