"""The engine: sessions in, tokens out. `Engine.step` is the architecture; the rest is what callers may ask for."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from tenuto.base.clock import Clock
from tenuto.base.config import EngineConfig
from tenuto.base.errors import (
    ConfigError,
    IllegalTransition,
    InvalidRequest,
    Overloaded,
    SessionBusy,
    TenutoError,
)
from tenuto.base.options import Policy, TurnParams
from tenuto.base.plan import Executor, MemoryPart, Weights
from tenuto.base.turns import EndReason, Keep, TurnState, check_keep
from tenuto.base.views import AuditReport, SessionState
from tenuto.base.wire.state_file import CopiedState, StateFile
from tenuto.engine.auditor import Auditor
from tenuto.engine.counts import Counts
from tenuto.engine.flights import Flights
from tenuto.engine.gate import TextFactory, TurnGate
from tenuto.engine.guard import guarded
from tenuto.engine.idle_memory import IdleMemory, NoParking
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.news import News
from tenuto.engine.occupation import Occupation
from tenuto.engine.parking import parking_of
from tenuto.engine.session_states import SessionStates
from tenuto.engine.snapshots import NoSnapshots, Snapshots
from tenuto.memory.memory import Memory, session_units
from tenuto.memory.shape import Shape
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.moves import Carrier, CopyThreads
from tenuto.memory.tiers.unit_files import Disk
from tenuto.sched.admission import Admission
from tenuto.sched.batch import Batch
from tenuto.sched.planner import Planner, Proposer
from tenuto.sched.queue import WaitingQueue
from tenuto.sched.settle import Settler
from tenuto.sched.shares import Shares
from tenuto.sched.suspects import Suspects
from tenuto.session.changes import Change
from tenuto.session.prefixes import PrefixIndex
from tenuto.session.records import SavedSession
from tenuto.session.registry import Registry
from tenuto.session.results import Once
from tenuto.session.session import Session
from tenuto.session.turn import Turn, as_tokens
from tenuto.text.chat import Conversation
from tenuto.text.constraint import Constraint
from tenuto.text.masks import Masks, MasksAtOnce


@dataclass(slots=True)
class StepReport:
    """What a step has brought: turns with new output, and turns that ended and changes of sessions since the step
    before. `worked` is False if there was nothing to compute, nor anything left for the next step."""

    worked: bool = False
    progressed: list[Turn] = field(default_factory=list)
    ended: list[Turn] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


class Engine:
    """Owns sessions, memory and the schedule; single-threaded. `units[g]` is the size of each pool of the model. An
    operation finds a session by its id among those of a `tenant`; without tenants, that is left out."""

    def __init__(  # noqa: PLR0913 - every collaborator is named
        self,
        executor: Executor,
        units: tuple[int, ...],
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        clock: Clock,
        random: Random,
        text: TextFactory | None = None,
        proposer: Proposer | None = None,
        masks: Masks | None = None,
        disk: Disk | None = None,
        carrier: Carrier | None = None,
        identity: str = "",
    ) -> None:
        """`disk` replaces the files that `config.disk_tier` asks for, `carrier` the threads that copy what is parked to
        the device. `identity`: of what is in units of memory; what another engine has left on disk is used if it is
        the same. Raises `ConfigError`."""
        if config.lookahead and proposer is None:
            raise ConfigError(f"lookahead is {config.lookahead}; allowed: 0, as nothing here guesses tokens")
        self.config = config
        self.vocab_size = vocab_size
        self._clock = clock
        self.memory = Memory(executor.spec, units, Shape.of(config, executor.spec.page_size))
        executor.prepare(units, config.max_running, config.overlap)
        self.sessions = Registry(self.memory, clock, random, config.context_length, config.max_sessions)
        self._queue = WaitingQueue(config.aging_seconds)
        self._gate = TurnGate(self._queue, config.max_queued, vocab_size, text)
        shares = Shares(dict(config.tenant_weights))
        self.batch = Batch(self.memory, shares, eos_ids, config.aging_seconds)
        self.prefixes = PrefixIndex(self.memory.page_size)
        parking = parking_of(config, self.memory, executor, disk, carrier or CopyThreads(), clock.now, identity)
        self.idle_memory: IdleMemory = parking if parking is not None else NoParking()
        self.snapshots = Snapshots(parking, clock) if parking is not None else NoSnapshots()
        self.counts, self.news = Counts(), News()
        self.lifecycle = Lifecycle(
            self.memory,
            self.sessions,
            self.prefixes if config.prefix_cache else None,
            self.idle_memory,
            self._queue,
            self.batch,
            clock,
            config.draft_timeout,
            self.counts,
            self.news,
        )
        self.pressure = self.lifecycle.pressure
        self.timers, self.sharing = self.lifecycle.timers, self.lifecycle.sharing
        self.states = SessionStates(
            self.memory, executor, self.idle_memory, self.pressure, self.batch, self.lifecycle.note_memory
        )
        self._admission = Admission(
            self.memory,
            self.batch,
            self._queue,
            self.pressure,
            self.lifecycle.start,
            self.lifecycle.sharing.share,
            self.idle_memory,
        )
        self.suspects = Suspects()
        self._planner = Planner(self.memory, self.batch, self.suspects, config, proposer)
        self._settler = Settler(self.memory, self.batch)
        self._flights = Flights(
            executor,
            self.memory,
            self.lifecycle,
            self.batch,
            self.idle_memory,
            self.counts,
            self._planner,
            self._settler,
            self.suspects,
            masks or MasksAtOnce(),
        )
        self._occupation = Occupation(
            executor, self.memory, self.sessions, self.batch, self.lifecycle, self.idle_memory, self._flights, self.drop
        )
        self._numbers = count(1)
        self.auditor = Auditor(
            self.memory, self.sessions, (self._admission,), self.batch, config.audit_every, strict=config.strict
        )
        self.paused = False  # nothing is planned; written by `pause` and `resume`
        self.steps = 0  # ever planned or looked for
        self.broken: Exception | None = None  # why the engine has stopped; written by `guarded`
        self.transitions = self.counts.transitions
        self.totals = self.counts.totals

    # -- the loop

    @guarded
    def step(self) -> StepReport:
        """Admit waiting turns and plan a step, unless paused or without memory; let the executor compute it, settle
        what it has computed, audit."""
        self.pressure.begin_step()
        self.lifecycle.expire()
        self.lifecycle.join()
        planned = None
        if not (self.paused or self.released):
            self._admission.admit()
            planned = self._flights.plan()
        if planned is not None:
            self._flights.submit(planned)
        report = StepReport(worked=len(self._flights) > 0 or self.pressure.unfinished or self.sessions.more_expired)
        report.progressed = self._flights.land(self.config.overlap if planned is not None else 0)  # overlap: 0 or 1
        report.ended, report.changes = self.news.take_ended(), self.news.take_changes()
        self.memory.cache.trim()
        self.steps += 1
        self.memory.check_totals()
        self.auditor.step(self._flights)
        return report

    @property
    def queued(self) -> int:
        """Submitted turns that wait for a row."""
        return self._queue.submitted

    def now(self) -> float:
        """Seconds, on the clock that deadlines are measured by."""
        return self._clock.now()

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do but watch the clock."""
        return not self._has_turns and not self.idle_memory.copying

    @property
    def only_begins(self) -> bool:
        """Whether a step would begin turns, and no turn is under way that would wait if it came later."""
        return not len(self.batch) and not len(self._flights) and self.queued > 0

    @property
    def _has_turns(self) -> bool:
        """Whether turns run or wait, or steps are in flight."""
        return bool(len(self.batch) or len(self._queue) or len(self._flights))

    # -- sessions

    @guarded
    def open(self, session_id: str | None = None, policy: Policy | None = None, system: str | None = None) -> Session:
        """Open a session; `system` opens its conversation. Raises `AlreadyExists`, `Overloaded` or `InvalidRequest`."""
        session = self.sessions.open(session_id, policy or Policy(), system)
        self.counts.note("open")
        self.lifecycle.note("open", session)
        return session

    @guarded
    def fork(
        self,
        session_id: str,
        *,
        turn: int | None = None,
        position: int | None = None,
        child: str | None = None,
        tenant: str = "",
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> Session:
        """A new session that starts with this one's first `turn` turns, or `position` tokens, or all. While a turn is
        open the fork sees the last commit. It has this one's metadata unless it is given other, and is not pinned."""
        parent = self.sessions.get(session_id, tenant)
        parent.require_open()
        at = self._position(parent, turn, position)
        notes = parent.policy.metadata if metadata is None else metadata
        forked = self.open(child, replace(parent.policy, ephemeral=False, pinned=False, metadata=notes), parent.system)
        self.counts.replayed["fork"] += parent.memory.replayed(max(0, at - 1))
        parent.fork(forked, at)
        self.sessions.note_length(forked)
        self.lifecycle.note_memory(forked)
        self.counts.note("fork", TurnState.RUNNING if parent.has_running_turn else None)
        self.lifecycle.note("fork", forked, kept=at, parent=parent)
        return forked

    @guarded
    def rewind(
        self, session_id: str, *, turn: int | None = None, position: int | None = None, tenant: str = ""
    ) -> Session:
        """Cut the history back to its first `turn` turns or `position` tokens. Raises `SessionBusy` while a turn is
        open."""
        session = self.sessions.get(session_id, tenant)
        session.require_idle("rewind")
        if turn is None and position is None:
            raise InvalidRequest("rewind needs the number of turns or of tokens to keep")
        at = self._position(session, turn, position)
        self.counts.replayed["rewind"] += session.memory.replayed(max(0, at - 1))
        session.rewind(at)
        self.sessions.note_length(session)
        self.lifecycle.note_memory(session)
        self.counts.note("rewind")
        self.lifecycle.note("rewind", session, kept=len(session.history))
        return session

    @guarded
    def adopt(
        self,
        session_id: str,
        tokens: Iterable[int],
        output: Iterable[int],
        conversation: Conversation | None = None,
        *,
        cut: bool = False,
        tenant: str = "",
    ) -> Session:
        """Commit a turn that was computed elsewhere: its tokens join the history, and are computed here when that is
        wanted. `conversation`, `cut`: as of `TurnRecord`. Raises `SessionBusy`, `ContextExceeded` or
        `InvalidRequest`."""
        given, answer = self._read(tokens), self._read(output)
        session = self.sessions.get(session_id, tenant)
        session.require_idle("add a turn to")
        self._gate.allowed(session, len(session.history) + len(given) + len(answer), 0)
        session.adopt(given, answer, self._clock.now(), conversation, cut)
        self.sessions.note_length(session)
        self.sessions.watch(session)
        self.counts.note("adopt")
        self.lifecycle.note("adopt", session, kept=len(session.history) - len(given) - len(answer))
        return session

    @guarded
    def restore(self, saved: SavedSession) -> Session:
        """Open a session as it was saved, here or in another engine; what it needs of its history is computed when that
        is wanted. If it is known when it was used, its TTL goes on. If there is no room for a pinned session, it is
        opened without that. Raises what `open` raises, and `ContextExceeded` if
        it is longer than sessions may be here."""
        self._read(saved.tokens)
        try:
            session = self.open(saved.session, saved.policy, saved.system)
        except Overloaded:
            if not saved.policy.pinned:
                raise
            session = self.open(saved.session, replace(saved.policy, pinned=False), saved.system)
        try:
            self._gate.allowed(session, len(saved.tokens), 0)
        except TenutoError:
            self.lifecycle.close(session)
            raise
        session.restore(saved)
        self.sessions.note_length(session)
        if saved.used is not None:
            self.sessions.age(session, self._clock.wall() - saved.used)
        self.counts.note("restore")
        self.lifecycle.note("restore", session)
        return session

    @guarded
    def state(self, session_id: str, tenant: str = "") -> CopiedState | LentUnits:
        """The state of a session; see `SessionStates.of`. Raises `SessionBusy` while a turn is open."""
        return self.states.of(self.sessions.get(session_id, tenant))

    @guarded
    def put_state(self, session_id: str, file: StateFile, tenant: str = "") -> None:
        """Give a session that was just restored the state in a file, which `states` has checked. While memory is
        released it keeps its tokens alone."""
        if not self.released:
            self.states.put(self.sessions.get(session_id, tenant), file)

    def _read(self, tokens: Iterable[int]) -> array[int]:
        """The caller's tokens. Reading runs the caller's code, so it comes before anything is looked at."""
        return as_tokens(tokens, self.vocab_size, self.sessions.context_length)

    @staticmethod
    def _position(session: Session, turn: int | None, position: int | None) -> int:
        if turn is not None and position is not None:
            raise InvalidRequest("give a number of turns or a token position, not both")
        if turn is not None:
            return session.turn_boundary(turn)
        return session.check_position(position if position is not None else len(session.history))

    @guarded
    def close(self, session_id: str, *, finish: bool = False, tenant: str = "") -> None:
        """Close a session. With `finish` a submitted turn may end first; otherwise, and always for a draft, it is
        aborted."""
        session = self.sessions.get(session_id, tenant)
        turn = session.turn
        if turn is not None and finish and not turn.drafting:
            session.state = SessionState.CLOSING
            self.counts.note("closing")
            return
        if turn is not None:
            session.state = SessionState.CLOSING
            self.lifecycle.abort(turn, EndReason.ABORT)  # closes it
            return
        self.lifecycle.close(session)

    @guarded
    def drop(self, session_id: str | None = None, *, tenant: str = "") -> int:
        """Drop a session, or every session, without a running turn to its tokens, to be recomputed when wanted. Returns
        how many held something."""
        if session_id is None:
            sessions = [session for session in self.sessions if not session.has_running_turn]
            sessions += self.sessions.prefixes
        else:
            sessions = [self.sessions.get(session_id, tenant)]
            if sessions[0].has_running_turn:
                raise SessionBusy(f"cannot drop session {session_id}: its turn is running")
        dropped = 0
        for session in sessions:
            self.idle_memory.forget(session)
            held = session.memory.computed > 0 or session.memory.turn is not None
            while session.memory.computed or session.memory.turn is not None:
                self.lifecycle.drop(session, "flushed")
            dropped += held
        return dropped

    def units_of(self, session: Session) -> int:
        """Units of all groups that the session's history takes, wherever they are now."""
        computed = max(0, len(session.history) - 1)
        spec = self.memory.spec
        return sum(session_units(group, spec.page_size, computed) for group in spec.groups) if computed else 0

    def leave_device(self, sessions: Iterable[Session]) -> None:
        """Have these leave the device, unless they are in use by now."""
        for session in sessions:
            if session.turn is None and session.memory.computed:
                self.lifecycle.drop(session)

    # -- turns

    @guarded
    def submit(
        self,
        session_id: str,
        tokens: Iterable[int] = (),
        params: TurnParams | None = None,
        conversation: Conversation | None = None,
        constraint: Constraint | None = None,
        *,
        tenant: str = "",
        once: Once | None = None,
    ) -> Turn:
        """Open a turn: append `tokens`, which make the conversation `conversation`, and generate, or with
        `max_new_tokens` 0 commit them once they are computed. `constraint`: the grammar of `params`, compiled for this
        turn. `once`: its idempotency key. An open draft becomes this turn, and what it has computed of `tokens` is
        kept. Raises `SessionBusy`, `ContextExceeded`, `InvalidRequest` or `Overloaded`, having changed nothing."""
        checked, params = self._read(tokens), params or TurnParams()
        self._occupation.require_memory()
        session = self.sessions.get(session_id, tenant)
        session.require_open()
        draft = session.turn if session.turn is not None and session.turn.drafting else None
        if draft is None:
            session.require_idle("start a turn on")
        elif params.scores_input:
            raise InvalidRequest("input_logprobs of a turn that was a draft: tokens computed earlier have none")
        allowed = self._gate.allowed(session, len(session.history) + len(checked), params.max_new_tokens)
        text = self._gate.admit(params, constraint)
        turn = draft or Turn(next(self._numbers), session, len(session.history), params, self._clock.now())
        if draft is not None:
            self.lifecycle.redraft(draft, checked)
            draft.submit(params, self._clock.now())
        else:
            turn.input = checked
        turn.conversation = conversation
        turn.max_new_tokens, turn.text, turn.constraint = allowed, text, constraint
        self._keep_output(turn, once)
        self.lifecycle.enqueue(turn, "submit draft" if draft is not None else "submit")
        return turn

    @guarded
    def regenerate(
        self,
        session_id: str,
        params: TurnParams | None = None,
        constraint: Constraint | None = None,
        *,
        tenant: str = "",
        once: Once | None = None,
    ) -> Turn:
        """Open a turn that generates the last turn's output again. The old output stays until this turn commits.
        `constraint`: as of `submit`."""
        self._occupation.require_memory()
        session = self.sessions.get(session_id, tenant)
        session.require_idle("regenerate in")
        params = params or TurnParams()
        record = session.regenerated_turn()
        if params.scores_input:
            raise InvalidRequest("regenerate has input_logprobs; it has no input")
        if params.max_new_tokens == 0:
            raise InvalidRequest("regenerate has max_new_tokens 0; allowed: at least 1")
        allowed = self._gate.allowed(session, record.input_end, params.max_new_tokens)
        text = self._gate.admit(params, constraint)
        turn = Turn(next(self._numbers), session, record.input_end, params, self._clock.now())
        turn.replaces, turn.conversation = True, record.conversation
        turn.max_new_tokens, turn.text, turn.constraint = allowed, text, constraint
        self._keep_output(turn, once)
        self.lifecycle.enqueue(turn, "regenerate")
        return turn

    @staticmethod
    def _keep_output(turn: Turn, once: Once | None) -> None:
        """What becomes of a turn with an idempotency key is kept."""
        turn.once = once
        if once is not None and turn.text is not None:
            turn.text.keep_text()

    @guarded
    def draft(self, session_id: str, tokens: Iterable[int], *, tenant: str = "") -> Turn:
        """Give the whole draft so far; call again with every change. Only what differs is computed, all but its last
        token. The draft is no history until `submit`; it times out `draft_timeout` after its last change."""
        checked = self._read(tokens)
        self._occupation.require_memory()
        session = self.sessions.get(session_id, tenant)
        session.require_open()
        turn = session.turn
        if turn is not None and not turn.drafting:
            session.require_idle("draft in")
        self._gate.allowed(session, len(session.history) + len(checked), 0)
        if turn is None:
            turn = Turn(next(self._numbers), session, len(session.history), TurnParams(), self._clock.now())
            turn.state = TurnState.DRAFTING
            session.turn = turn
            turn.input = checked
            self.sessions.note_turn(session)
            self.counts.note("draft")
        else:
            self.lifecycle.redraft(turn, checked)
            self.counts.note("redraft")
        self.lifecycle.queue_draft(turn)
        return turn

    @guarded
    def abort(self, session_id: str, keep: Keep = None, *, tenant: str = "") -> Turn:
        """End the open turn now. `keep` `None` rolls it back; otherwise its input and what `keep` says of its output
        are committed (a barge-in), unless it never ran. Raises `IllegalTransition` if no turn is open."""
        session = self.sessions.get(session_id, tenant)
        turn = session.turn
        if turn is None:
            raise IllegalTransition(f"session {session_id} has no open turn to abort")
        if check_keep(keep) is None or not turn.started:
            self.lifecycle.abort(turn, EndReason.ABORT)
        else:
            kept = {"delivered": turn.delivered, "all": None}[keep] if isinstance(keep, str) else keep
            self.lifecycle.commit(turn, EndReason.ABORT, kept)
        return turn

    # -- pauses

    @guarded
    def pause(self, *, release: bool = False) -> None:
        """Plan nothing more until `resume`. With `release` running turns give up what they have acquired, and queue."""
        self.paused = True
        if release:
            for turn in list(self.batch.running()):
                self.lifecycle.preempt(turn)

    @guarded
    def resume(self) -> None:
        """Go on."""
        self.paused = False

    # -- giving memory back

    @property
    def released(self) -> frozenset[MemoryPart]:
        """What the system has back; without it nothing is planned."""
        return self._occupation.released

    @guarded
    def release_memory(self, parts: Collection[MemoryPart]) -> None:
        """Give memory back to the system until `restore_memory`. Every session drops to its tokens, or is parked, and
        turns are refused; those of a paused engine wait. Raises `IllegalTransition` unless the engine is paused or
        idle."""
        if self._has_turns and not self.paused:
            raise IllegalTransition(
                "turns run or wait; memory can be released while generation is paused, or none does"
            )
        self._occupation.release(parts)

    @guarded
    def restore_memory(
        self, parts: Collection[MemoryPart], weights: Weights | None = None, identity: str | None = None
    ) -> None:
        """Allocate again what was released of `parts`, and compute with `weights`, which were read for that, if they
        were. Turns go on once nothing is released. `identity`: as of the engine, if the weights have turned out to be
        others than those that were released; then nothing that is parked is used again. Raises `ConfigError`, having
        changed nothing, if there is no memory."""
        self._occupation.restore(parts, weights, identity)

    @guarded
    def update_weights(self, weights: Weights, identity: str = "", *, abort: bool = False) -> None:
        """Compute with `weights` from now on; `identity`: as of the engine. Nothing that was computed before is used
        again: every session drops to its tokens, and what is parked is forgotten. Submitted turns go on from their
        tokens, or with `abort` end. Raises `IllegalTransition` if the weights are released, and `ConfigError`, having
        replaced nothing, if there is no memory."""
        self._occupation.update(weights, identity, abort=abort)

    # -- from one process to the next

    @guarded
    def recover(self) -> None:
        """Park the sessions that were just restored with what an engine before this one has left of their memory in
        the disk tier. What is left there besides is removed."""
        self.snapshots.recover(self.sessions)

    @guarded
    def save(self) -> None:
        """Abort open turns, and leave the memory of lasting sessions in the disk tier, as far as `snapshot_seconds`
        allow, for `recover` to find. Only `end` may follow."""
        for session in list(self.sessions):
            if session.turn is not None:
                self.lifecycle.abort(session.turn, EndReason.ABORT)
        lasting = [session for session in self.sessions if session.policy.lasting]
        self.snapshots.save(lasting, self.config.snapshot_seconds)

    def end(self, *, keep: bool = False) -> None:
        """Release the disk tier, and unless told to `keep` them remove its files. Nothing is asked of the engine
        afterwards."""
        self.idle_memory.close(keep=keep)

    # -- audit

    def audit(self) -> AuditReport:
        """Recount every unit from its holders, now. Raises `InvariantError` if anything is not as it should be."""
        self.idle_memory.audit()
        return self.auditor.recount(self._flights)

    @guarded
    def ask_audit(self, told: Callable[[AuditReport], None]) -> None:
        """Have every unit recounted as `audit` does, a little at every step, beginning with the next, and `told` called
        with the report. What is found wrong stops the engine."""
        self.auditor.ask(told)

    @property
    def counted_work(self) -> tuple[int, int, int]:
        """Units touched, rows considered and turns settled, ever: what a step's cost is made of."""
        return self.memory.touched, self._planner.rows_considered, self._settler.turns_settled
