"""How turns move: from queue to row, to yielding, to their end, and what that means for their sessions."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from dataclasses import dataclass, fields
from enum import Enum
from itertools import count
from typing import Literal

from tenuto.base.clock import Clock
from tenuto.base.errors import InvariantError
from tenuto.base.turns import EndReason, TurnState, Usage
from tenuto.base.views import SessionKey, SessionState, Transition
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Lease
from tenuto.sched.batch import Batch, continues_from, is_computed, start_target
from tenuto.sched.pressure import Pressure
from tenuto.sched.queue import WaitingQueue
from tenuto.session.registry import Registry
from tenuto.session.session import Session, Turn

MAX_IDLE_TIMERS = 1024
"""Timers of ended turns that may wait for their time, besides a few a session."""
USAGE = tuple(field.name for field in fields(Usage))


class Timer(Enum):
    """What a turn's timer limits."""

    DRAFT = 0  # time since the draft changed
    QUEUE = 1  # time until it first runs
    TOTAL = 2  # time until it ends


ChangeKind = Literal["open", "fork", "restore", "adopt", "commit", "rewind", "close"]


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to a session and must last. `version` and `length` (in tokens): the session's
    afterwards. `turn`: the one that committed.

    A fork or a restored session is opened first; turns taken over from elsewhere are adopted."""

    kind: ChangeKind
    session: Session
    version: int
    length: int
    turn: Turn | None = None


class Lifecycle:
    """Makes every transition of turns and sessions, and keeps queue, batch, pressure and timers in step with it."""

    def __init__(
        self, memory: Memory, sessions: Registry, queue: WaitingQueue, batch: Batch, clock: Clock, draft_timeout: float
    ) -> None:
        self._sessions = sessions
        self._queue = queue
        self._clock = clock
        self._draft_timeout = draft_timeout
        self.batch = batch
        self.pressure = Pressure(memory, batch, self.preempt, self.drop)
        self.transitions: Counter[Transition] = Counter()
        self.totals: Counter[str] = Counter()  # tokens of all ended turns, by field of `Usage`
        self.recomputed: Counter[str] = Counter()  # tokens that were computed and have to be again, by why
        self._timers: list[tuple[float, int, Timer, SessionKey, int]] = []  # a heap; ended turns can go
        self._entries = count()
        self._ended: list[Turn] = []
        self._changes: list[Change] = []

    def take_ended(self) -> list[Turn]:
        """Turns that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def take_changes(self) -> list[Change]:
        """What has happened to sessions since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def note(self, kind: ChangeKind, session: Session, turn: Turn | None = None) -> None:
        """A change has just happened."""
        self._changes.append(Change(kind, session, session.version, len(session.history), turn))

    def count(self, operation: str, state: str | None = None) -> None:
        """An operation or a transition happens; `state`: see `Transition`."""
        self.transitions[Transition(operation, state)] += 1

    def enqueue(self, turn: Turn, event: str) -> None:
        """A submitted turn waits for its row; `event` is how it came."""
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
        if len(self._timers) > MAX_IDLE_TIMERS + 8 * len(self._sessions):  # at most three a session still count
            self._timers = [entry for entry in self._timers if self._counts(*entry)]
            heapq.heapify(self._timers)

    def _counts(self, when: float, _: int, timer: Timer, key: SessionKey, number: int) -> bool:
        """Whether a timer may still end a turn: an ended turn's, and all but a draft's last, do not."""
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
        """A waiting turn gets its row."""
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
        """The turn starts: which tokens of the history it has to compute again, and why."""
        memory, wanted = turn.session.memory, min(start_target(turn), max(0, turn.base_length - 1))
        if (missing := wanted - continues_from(turn)) > 0:
            self.recomputed["no checkpoint" if memory.computed >= wanted else memory.lost] += missing

    def _leave_row(self, turn: Turn) -> None:
        """Call before anything that detaches the turn's memory: the batch forgets it."""
        memory = turn.session.memory.turn
        if memory is not None and memory.row >= 0:
            self.batch.remove(turn, memory.row)

    def preempt(self, turn: Turn, why: str = "preempted") -> None:
        """A running turn, or a draft or waiting turn that has memory, loses what it acquired."""
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
        """A step failed that was computing the turn: it goes on from what is settled, in a row of its own if it has
        one."""
        memory = turn.session.memory.turn
        running = memory is not None and memory.row >= 0
        if not self._keep_settled(turn, "step failed", "step failed"):
            return
        if running:
            self.batch.add(turn, ())
        elif turn.drafting:
            self._queue.push(turn)

    def _keep_settled(self, turn: Turn, why: str, why_preempted: str) -> bool:
        """The turn leaves its row, if it has one, and keeps its memory as far as that is settled. False if it relied on
        a checkpoint that a step in flight, or the one that failed, was to fill: then it is preempted."""
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
        """A running turn, or a draft in a row, leaves its row to another and keeps its memory, a turn as far as that is
        settled."""
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
        """The last rung of pressure: a draft keeps only its text, a paused turn its tokens, and then a session without
        a running turn likewise."""
        turn = session.turn
        if turn is not None and session.memory.turn is not None:
            self._leave_row(turn)
            turn.lose_memory()
        else:
            session.memory.drop()
            session.memory.lost = why
        self.count("drop", turn.state if turn is not None else "idle")
        if turn is not None and turn.drafting:
            self._queue.push(turn)  # computed again when there is room
        self.pressure.note(session)

    def rest(self, turn: Turn) -> None:
        """A draft is computed as far as it goes: it gives its row to others and keeps its memory."""
        self._leave_row(turn)
        memory = turn.session.memory.turn
        if memory is None:
            raise InvariantError(f"{turn.name} rests without memory")
        memory.detach()
        self.pressure.note(turn.session)

    def redraft(self, turn: Turn, new: array[int]) -> None:
        """The draft now reads `new`: keep what was computed of the common beginning."""
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
        """The draft has changed: let it be computed, and start its timeout anew."""
        turn.changed = self._clock.now()
        self._set_timer(turn, turn.changed + self._draft_timeout, Timer.DRAFT)
        if continues_from(turn) < turn.last_position:
            self._queue.push(turn)
        self.pressure.note(turn.session)

    def commit(self, turn: Turn, reason: EndReason, keep: int | None = None) -> None:
        """The turn ends, and its input and first `keep` (`None`: all) output tokens are history."""
        if turn.text is not None and reason is not EndReason.ABORT:
            turn.text.finish()
        self._leave_row(turn)
        barge_in = reason is EndReason.ABORT
        self.count("barge-in" if barge_in else "commit", turn.state if barge_in else None)
        turn.commit(reason, self._clock.now(), keep)
        self.note("commit", turn.session, turn)
        self._turn_ended(turn)

    def abort(self, turn: Turn, reason: EndReason) -> None:
        """The turn ends, and its session is what it was."""
        self._leave_row(turn)
        self.count(reason.value, turn.state)
        turn.abort(reason, self._clock.now())
        self._turn_ended(turn)

    def _turn_ended(self, turn: Turn) -> None:
        session = turn.session
        self._queue.remove(turn)
        self._ended.append(turn)
        self._sessions.note_length(session)
        if turn.result is not None:
            usage = turn.result.usage
            for name in USAGE:
                self.totals[name] += getattr(usage, name)
        if session.state is SessionState.CLOSING or session.policy.ephemeral:
            self.close(session)
        else:
            self._sessions.watch(session)
            self.pressure.note(session)

    def close(self, session: Session) -> None:
        """Release and forget a session without an open turn."""
        self._sessions.close(session)
        self.pressure.note(session)
        self.count("close")
        self.note("close", session)

    def expire(self) -> None:
        """End turns past a deadline, drafts nobody changed, and sessions nobody used."""
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
        if timer is Timer.DRAFT:  # every change of the draft sets another
            return drafting and turn.changed + self._draft_timeout <= now
        return timer is Timer.TOTAL or not turn.started
