"""The transitions of turns, from the queue to their end, and what they mean for sessions."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from dataclasses import fields
from enum import Enum
from itertools import count

from tenuto.base.clock import Clock
from tenuto.base.errors import InvariantError
from tenuto.base.turns import EndReason, TurnState, Usage
from tenuto.base.views import SessionKey, SessionState, Transition
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Lease
from tenuto.sched.batch import Batch, continues_from, is_computed, start_target
from tenuto.sched.pressure import Pressure
from tenuto.sched.queue import WaitingQueue
from tenuto.session.changes import Change, ChangeKind
from tenuto.session.prefixes import PrefixIndex
from tenuto.session.registry import Registry
from tenuto.session.session import Session, Turn

MAX_IDLE_TIMERS = 1024
"""How many timers of ended turns may remain in the heap, besides a few per session."""
USAGE = tuple(field.name for field in fields(Usage))


class Timer(Enum):
    """What a turn's timer limits."""

    DRAFT = 0  # time since the draft last changed
    QUEUE = 1  # time until it first runs
    TOTAL = 2  # time until it ends


class Lifecycle:
    """Makes every transition of turns and sessions, and keeps queue, batch, pressure and timers in step with it."""

    def __init__(
        self,
        memory: Memory,
        sessions: Registry,
        prefixes: PrefixIndex | None,
        queue: WaitingQueue,
        batch: Batch,
        clock: Clock,
        draft_timeout: float,
    ) -> None:
        self._sessions = sessions
        self._prefixes = prefixes
        self._queue = queue
        self._clock = clock
        self._draft_timeout = draft_timeout
        self.batch = batch
        self.pressure = Pressure(memory, batch, self.preempt, self.drop)
        self.transitions: Counter[Transition] = Counter()
        self.totals: Counter[str] = Counter()  # tokens of all ended turns, by field of `Usage`
        self.recomputed: Counter[str] = Counter()  # tokens that must be computed again, by reason
        self._timers: list[
            tuple[float, int, Timer, SessionKey, int]
        ] = []  # a heap, cleared of ended turns when it grows
        self._entries = count()
        self._ended: list[Turn] = []
        self._changes: list[Change] = []

    def take_ended(self) -> list[Turn]:
        """Turns that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def take_changes(self) -> list[Change]:
        """Changes of sessions since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def note(
        self,
        kind: ChangeKind,
        session: Session,
        *,
        kept: int = 0,
        turn: Turn | None = None,
        parent: Session | None = None,
    ) -> None:
        """Record a change that has just happened; see `Change`."""
        self._changes.append(Change.of(kind, session, kept, turn, parent))

    def count(self, operation: str, state: str | None = None) -> None:
        """Count an operation or a transition; for `state` see `Transition`."""
        self.transitions[Transition(operation, state)] += 1

    def enqueue(self, turn: Turn, event: str) -> None:
        """Queue a submitted turn. `event` names the operation that submitted it."""
        self.count(event)
        turn.session.turn = turn
        if turn.params.queue_timeout is not None:
            self._set_timer(turn, turn.arrival + turn.params.queue_timeout, Timer.QUEUE)
        if turn.params.timeout is not None:
            self._set_timer(turn, turn.arrival + turn.params.timeout, Timer.TOTAL)
        self._queue.push(turn)
        self.pressure.note(turn.session)

    def _set_timer(self, turn: Turn, when: float, timer: Timer) -> None:
        heapq.heappush(self._timers, (when, next(self._entries), timer, turn.session.key, turn.number))
        if len(self._timers) > MAX_IDLE_TIMERS + 8 * len(self._sessions):  # at most three per session are live
            self._timers = [entry for entry in self._timers if self._is_live(*entry)]
            heapq.heapify(self._timers)

    def _is_live(self, when: float, _: int, timer: Timer, key: SessionKey, number: int) -> bool:
        """Whether a timer can still end its turn. It cannot if the turn has ended, or the draft has changed since."""
        turn = self._open_turn(key)
        return (
            turn is not None
            and turn.number == number
            and (timer is not Timer.DRAFT or when >= turn.changed + self._draft_timeout)
        )

    def _open_turn(self, key: SessionKey) -> Turn | None:
        tenant, session_id = key
        session = self._sessions.find(session_id, tenant)
        return session.turn if session is not None else None

    def start(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Give a waiting turn its row."""
        if not turn.drafting:
            self.count("start" if turn.state is TurnState.QUEUED else "resume")
            turn.go("start")
            turn.started = True
            if turn.cached < 0:
                turn.cached = min(continues_from(turn), turn.prompt_length)
                turn.computed_before = turn.computed_tokens
                self._note_recomputed(turn)
        if is_computed(turn):  # it needs no units, so its `slots` are empty
            if not turn.drafting:
                self.commit(turn, EndReason.APPENDED)
            return
        self.batch.add(turn, slots)
        self.pressure.note(turn.session)

    def _note_recomputed(self, turn: Turn) -> None:
        """Count the tokens of the history that a starting turn has to compute again, by reason."""
        memory, wanted = turn.session.memory, min(start_target(turn), max(0, turn.base_length - 1))
        if (missing := wanted - continues_from(turn)) > 0:
            self.recomputed["no checkpoint" if memory.computed >= wanted else memory.lost] += missing

    def _leave_row(self, turn: Turn) -> None:
        """Take the turn out of the batch. To be called before its memory is detached."""
        memory = turn.session.memory.turn
        if memory is not None and memory.row >= 0:
            self.batch.remove(turn, memory.row)

    def preempt(self, turn: Turn, why: str = "preempted") -> None:
        """Release what a turn has acquired: of a running turn, or of a draft or waiting turn that has memory."""
        memory = turn.session.memory.turn
        if memory is not None:
            self.recomputed[why] += memory.computed - memory.start
        if turn.state is not TurnState.RUNNING:
            self.drop(turn.session)
            return
        self._leave_row(turn)
        turn.preempt()
        self.count("preempt")
        self._queue.push(turn)
        self.pressure.note(turn.session)

    def retry(self, turn: Turn) -> None:
        """Continue a turn whose step has failed from what is settled. If it had a row, it gets one again."""
        memory = turn.session.memory.turn
        running = memory is not None and memory.row >= 0
        if not self._keep_settled(turn, "step failed", "step failed"):
            return
        if running:
            self.batch.add(turn, ())
        elif turn.drafting:
            self._queue.push(turn)

    def _keep_settled(self, turn: Turn, why: str, why_preempted: str) -> bool:
        """Take the turn out of its row, if it has one, and cut its memory back to what is settled. Returns False if the
        turn relied on a checkpoint that the failed step, or one in flight, was to fill; then it is preempted."""
        memory = turn.session.memory.turn
        if memory is None:
            raise InvariantError(f"{turn.name} has no memory to be cut")
        position = memory.cut_to(memory.computed)
        if position < memory.first_position:
            self.preempt(turn, why_preempted)
            return False
        self.recomputed[why] += memory.computed - position
        self._leave_row(turn)
        memory.truncate(position)
        return True

    def pause(self, turn: Turn) -> None:
        """Free the row of a running turn or a draft for another turn. A draft keeps its memory, a running turn keeps
        what is settled of it."""
        if turn.drafting:
            self.rest(turn)
            self._queue.push(turn)
            return
        if self._keep_settled(turn, "paused", "preempted"):
            turn.pause()
            self.count("pause")
            self._queue.push(turn)
            self.pressure.note(turn.session)

    def drop(self, session: Session, why: str = "pressure") -> None:
        """Release memory, as the last resort of pressure: that of the open turn if it has any, else the session's. The
        tokens are kept and computed again later. The turn must not be running."""
        turn = session.turn
        if turn is not None and session.memory.turn is not None:
            self._leave_row(turn)
            turn.lose_memory()
        else:
            session.memory.drop()
            session.memory.lost = why
        if self._sessions.forget_prefix(session):
            self.count("drop", "prefix")
        else:
            self.count("drop", turn.state if turn is not None else "idle")
        if turn is not None and turn.drafting:
            self._queue.push(turn)  # computed again when there is room
        self.note_memory(session)

    def note_memory(self, session: Session) -> None:
        """A session without a running turn has more or less memory than before, or another history."""
        if self._prefixes is not None:
            if session.state is SessionState.CLOSED and not session.memory.computed:
                self._prefixes.forget(session)
            else:
                if session.turn is None:
                    self._prefixes.changed(session, len(session.history))
                self._prefixes.enter(session)
        self.pressure.note(session)

    @staticmethod
    def _may_share(turn: Turn) -> bool:
        """Not what changes, whose input is scored, or would give up a checkpoint: after an abort the session stands
        where it stood."""
        memory = turn.session.memory
        keeps = memory.computed > 0 and memory.memory.needs_checkpoints
        return not (turn.drafting or turn.params.input_logprobs is not None or memory.turn is not None or keeps)

    def share(self, turn: Turn) -> None:
        """A waiting turn without memory of its own begins with what another session of its tenant has in memory, if
        that is more of its tokens than its own session has."""
        session, prefixes = turn.session, self._prefixes
        if prefixes is None or turn.sought == prefixes.version or not self._may_share(turn):
            return
        turn.sought = prefixes.version
        have = continues_from(turn)
        found = prefixes.find(session, turn.tokens(0, turn.prompt_length), have)
        if found is None:
            return
        owner, length = found
        position = owner.memory.resumable(min(length, turn.resume_position))
        if position < have + session.memory.memory.page_size:
            return
        session.memory.drop()
        owner.memory.fork(session.memory, position)
        session.origin = owner
        self._sessions.use_prefix(owner)
        self.pressure.note(owner)
        self.pressure.note(session)

    def rest(self, turn: Turn) -> None:
        """Free the row of a draft that is fully computed. The draft keeps its memory."""
        self._leave_row(turn)
        memory = turn.session.memory.turn
        if memory is None:
            raise InvariantError(f"{turn.name} rests without memory")
        memory.detach()
        self.pressure.note(turn.session)

    def redraft(self, turn: Turn, new: array[int]) -> None:
        """Replace the draft's input with `new`, keeping what was computed of their common prefix."""
        old = turn.input
        common = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        self._queue.remove(turn)
        memory = turn.session.memory.turn
        if memory is not None:
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
        """Queue a draft that has changed, and restart its timeout."""
        turn.changed = self._clock.now()
        self._set_timer(turn, turn.changed + self._draft_timeout, Timer.DRAFT)
        if continues_from(turn) < turn.last_position:
            self._queue.push(turn)
        self.pressure.note(turn.session)

    def commit(self, turn: Turn, reason: EndReason, keep: int | None = None) -> None:
        """End the turn and append its input and first `keep` (`None`: all) output tokens to the history."""
        if turn.text is not None and reason is not EndReason.ABORT:
            turn.text.finish()
        self._leave_row(turn)
        barge_in = reason is EndReason.ABORT
        self.count("barge-in" if barge_in else "commit", turn.state if barge_in else None)
        turn.commit(reason, self._clock.now(), keep)
        self.note("commit", turn.session, kept=turn.base_length, turn=turn)
        self._turn_ended(turn)

    def abort(self, turn: Turn, reason: EndReason) -> None:
        """End the turn and leave its session as it was before."""
        self._leave_row(turn)
        self.count(reason.value, turn.state)
        turn.abort(reason, self._clock.now())
        self._turn_ended(turn)

    def _turn_ended(self, turn: Turn) -> None:
        session = turn.session
        self._queue.remove(turn)
        self._ended.append(turn)
        self._sessions.note_length(session)
        if self._prefixes is not None:
            committed = turn.result is not None and turn.result.committed
            self._prefixes.changed(session, turn.prompt_length if committed else len(session.history))
        if turn.result is not None:
            usage = turn.result.usage
            for name in USAGE:
                self.totals[name] += getattr(usage, name)
        if session.state is SessionState.CLOSING or session.policy.ephemeral:
            self.close(session)
        else:
            self._sessions.watch(session)
            self.note_memory(session)

    def close(self, session: Session) -> None:
        """Close and forget a session without an open turn. What it has in memory stays, for others to begin with."""
        self._sessions.close(session, keep=self._prefixes is not None and session.memory.computed > 0)
        self.note_memory(session)
        origin, session.origin = session.origin, None
        if origin in self._sessions.prefixes and self._prefixes is not None and self._prefixes.covers(session, origin):
            self.drop(origin)
        self.count("close")
        self.note("close", session, kept=len(session.history))

    def expire(self) -> None:
        """End turns past their deadlines and drafts left unchanged for too long, and close expired sessions."""
        now = self._clock.now()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer, key, number = heapq.heappop(self._timers)
            turn = self._open_turn(key)
            if turn is not None and turn.number == number and self._is_due(turn, timer, now):
                self.abort(turn, EndReason.DEADLINE)
        for session in self._sessions.expired():
            self.count("expire")
            self.close(session)

    def _is_due(self, turn: Turn, timer: Timer, now: float) -> bool:
        drafting = turn.drafting
        if timer is Timer.DRAFT:  # every change of the draft sets a new one
            return drafting and turn.changed + self._draft_timeout <= now
        return timer is Timer.TOTAL or not turn.started
