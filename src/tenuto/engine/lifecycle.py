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
from tenuto.engine.parking import Parking
from tenuto.engine.sharing import Found, Sharing
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Lease
from tenuto.sched.batch import Batch, continues_from, is_computed, start_target
from tenuto.sched.pressure import Pressure
from tenuto.sched.queue import WaitingQueue
from tenuto.session.changes import Change, ChangeKind
from tenuto.session.prefixes import PrefixIndex
from tenuto.session.registry import Registry
from tenuto.session.session import Session
from tenuto.session.turn import Turn

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
        parking: Parking | None,
        queue: WaitingQueue,
        batch: Batch,
        clock: Clock,
        draft_timeout: float,
    ) -> None:
        self._sessions = sessions
        self._prefixes = prefixes
        self.parking = parking
        self._queue = queue
        self._clock = clock
        self._draft_timeout = draft_timeout
        self.batch = batch
        self.pressure = Pressure(memory, batch, self.preempt, self.drop)
        self.sharing: Sharing | None = None
        if prefixes is not None:
            self.sharing = Sharing(memory, prefixes, sessions, batch, self.pressure, queue.aging_seconds)
        self.transitions: Counter[Transition] = Counter()
        self.totals: Counter[str] = Counter()  # tokens of all ended turns, by field of `Usage`
        self.recomputed: Counter[str] = Counter()  # tokens that must be computed again, by reason
        self.replayed: Counter[str] = (
            Counter()
        )  # tokens in memory that going back gave up for want of a checkpoint, by operation
        self._timers: list[
            tuple[float, int, Timer, SessionKey, int]
        ] = []  # a heap, cleared of ended turns when it grows
        self._entries = count()
        self._ended: list[Turn] = []
        self._changes: list[Change] = []

    def now(self) -> float:
        """Seconds, by the engine's clock."""
        return self._clock.now()

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
        if self.parking is not None:
            if parent is not None:
                self.parking.fork(parent, session)
            elif kind == "close":
                self.parking.forget(session)
            else:
                self.parking.changed(session, kept)
        self._changes.append(Change.of(kind, session, kept, turn, parent, self._clock.wall()))

    def count(self, operation: str, state: str | None = None) -> None:
        """Count an operation or a transition; for `state` see `Transition`."""
        self.transitions[Transition(operation, state)] += 1

    def enqueue(self, turn: Turn, event: str) -> None:
        """Queue a submitted turn. `event` names the operation that submitted it."""
        self.count(event)
        turn.session.turn = turn
        self._sessions.note_turn(turn.session)
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
        if self.parking is not None:
            self.parking.restore(turn, slots)
        if is_computed(turn) and not self._awaits(turn):  # it needs no units
            for lease in slots:
                lease.release(unused=True)
            if not turn.drafting:
                self._first_run(turn)
                self.commit(turn, EndReason.APPENDED)
            return
        self.batch.add(turn, slots)
        if self.parking is not None and self.parking.awaits(turn):
            self.parking.begun(turn)
            self.batch.held.add(self.batch.row_of(turn))
        else:
            self._goes_on(turn)
        self.pressure.note(turn.session)

    def _goes_on(self, turn: Turn) -> None:
        """A turn in a row has all that its session had: it runs now, or when others have computed what it shares."""
        if self.sharing is not None:
            self.sharing.started(turn)
        if not (turn.drafting or self._waits(turn)):
            self._first_run(turn)

    def _waits(self, turn: Turn) -> bool:
        return self.sharing is not None and self.sharing.waits(turn)

    def _awaits(self, turn: Turn) -> bool:
        """Whether the turn waits for its session's memory to arrive."""
        return self.parking is not None and self.parking.awaits(turn)

    @property
    def copying(self) -> bool:
        """Whether copies to the device are under way, which will set units free or have turns go on."""
        return self.parking is not None and len(self.parking.tiers.moves) > 0

    def _first_run(self, turn: Turn) -> None:
        """A submitted turn begins to compute: note what it found in memory, once."""
        if turn.cached < 0:
            turn.cached = min(continues_from(turn), turn.prompt_length)
            turn.computed_before = turn.computed_tokens
            self._note_recomputed(turn)
            if self.sharing is not None:
                self.sharing.counted(turn)

    def _note_recomputed(self, turn: Turn) -> None:
        """Count the tokens of the history that a starting turn has to compute again, by reason."""
        memory, wanted = turn.session.memory, min(start_target(turn), max(0, turn.base_length - 1))
        if (missing := wanted - continues_from(turn)) > 0:
            self.recomputed["no checkpoint" if memory.computed >= wanted else memory.lost] += missing

    def _leave_row(self, turn: Turn) -> None:
        """Take the turn out of the batch. To be called before its memory is detached. If it waits for memory to arrive,
        nothing of that is kept: the session stays parked."""
        memory = turn.session.memory.turn
        if memory is not None and memory.row >= 0:
            if self.sharing is not None:
                self.sharing.left(turn)
            self.batch.remove(turn, memory.row)
            if self.parking is not None and self.parking.awaits(turn):
                memory.abort()
                self.parking.give_up(turn)
                self.note_memory(turn.session)

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
            if self.sharing is not None:
                self.sharing.started(turn)
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
        what is settled of it. One whose memory is still arriving gives that up."""
        if self._awaits(turn):
            self._queue_again(turn, "paused")
            return
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
            if self.parking is not None and session.state is not SessionState.CLOSED:
                if why == "pressure":
                    self.parking.park(session)
                else:
                    self.parking.forget(session)
            session.memory.drop()
            session.memory.lost = why
            if turn is not None and why == "restart" and self.sharing is not None:
                self.sharing.no_room(turn)
        if self._sessions.forget_prefix(session):
            self.count("drop", "prefix")
        else:
            self.count("drop", turn.state if turn is not None else "idle")
        if turn is not None and turn.drafting:
            self._queue.push(turn)  # computed again when there is room
        self.note_memory(session)

    def note_memory(self, session: Session) -> None:
        """A session without a running turn has more or less memory than before, or another history."""
        self._index(session)
        self._sessions.note_units(session)
        self.pressure.note(session)

    def _index(self, session: Session) -> None:
        """Others find what the session has in memory now. Kept sessions that it covers are of no use any more."""
        if self._prefixes is None:
            return
        if session.state is SessionState.CLOSED and not session.memory.computed:
            self._prefixes.forget(session)
            return
        if session.turn is None:
            self._prefixes.changed(session, len(session.history))
        for covered in self._prefixes.enter(session):
            self.drop(covered, "covered")

    def share(self, turn: Turn) -> None:
        """A waiting turn begins with what others have in memory of its tokens."""
        if self.sharing is not None:
            self.sharing.share(turn)

    def join(self) -> None:
        """Have turns that waited in their rows go on: with what has been copied, and with what others compute."""
        for turn, arrived in self.parking.arrivals() if self.parking is not None else ():
            if arrived:
                self._arrived(turn)
            else:
                self._queue_again(turn, "restore failed")
        for turn, found in self.sharing.ready() if self.sharing is not None else ():
            if found is not None:
                self._begin_again(turn, found)
            if turn.running and not self._waits(turn):
                self._first_run(turn)

    def _queue_again(self, turn: Turn, why: str) -> None:
        """A turn that waits for memory to arrive leaves its row without."""
        if not turn.drafting:
            self.preempt(turn, why)
            return
        self._leave_row(turn)
        self._queue.push(turn)
        self.pressure.note(turn.session)

    def _arrived(self, turn: Turn) -> None:
        """The session's memory is there: the turn goes on in its row, if it has anything to compute."""
        self.batch.held.discard(self.batch.row_of(turn))
        self._goes_on(turn)
        if is_computed(turn):
            if turn.drafting:
                self.rest(turn)
            else:
                self.commit(turn, EndReason.APPENDED)

    def _begin_again(self, turn: Turn, found: Found) -> None:
        """A turn in a row, which has not begun, begins with what was found."""
        memory, sharing = turn.session.memory.turn, self.sharing
        if memory is None or sharing is None:
            raise InvariantError(f"{turn.name} has no memory to begin again with")
        self.batch.remove(turn, memory.row)
        units = memory.withdraw()
        sharing.begin_with(turn, found)
        if not is_computed(turn):
            self.batch.add(turn, units)
            sharing.started(turn)
            return
        for lease in units:
            lease.release(unused=True)
        sharing.left(turn)
        self._first_run(turn)
        self.commit(turn, EndReason.APPENDED)

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
        if self._awaits(turn):
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
        """Close and forget a session without an open turn. Its memory stays for others to begin with, unless another
        session has that too."""
        self._index(session)
        self._sessions.close(session, keep=self._prefixes is not None and self._prefixes.keep(session))
        self.note_memory(session)
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
        for session in self._sessions.take_resting():
            if session.turn is None and session.state is SessionState.OPEN:
                self._park(session)

    def _park(self, session: Session) -> None:
        """An idle session that will expire leaves the device, if there is somewhere to bring it back from."""
        if self.parking is None or session.policy.pinned:
            return
        if session.memory.computed and self.parking.park(session):
            session.memory.drop()
            session.memory.lost = "expiring"
            self.count("park")
            self.note_memory(session)

    def _is_due(self, turn: Turn, timer: Timer, now: float) -> bool:
        drafting = turn.drafting
        if timer is Timer.DRAFT:  # every change of the draft sets a new one
            return drafting and turn.changed + self._draft_timeout <= now
        return timer is Timer.TOTAL or not turn.started
