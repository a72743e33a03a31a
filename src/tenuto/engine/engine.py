"""The engine runs turns on sessions. `Engine.step` shows the architecture; callers use `sessions` and `turns`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random

from tenuto.base.clock import Clock
from tenuto.base.config import EngineConfig
from tenuto.base.errors import (
    ConfigError,
    IllegalTransition,
)
from tenuto.base.plan import Executor, MemoryPart, Weights
from tenuto.base.views import AuditReport
from tenuto.engine.auditor import Auditor
from tenuto.engine.counts import Counts
from tenuto.engine.flights import Flights
from tenuto.engine.gate import TextFactory, TurnGate
from tenuto.engine.guard import Fuse, guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.news import News
from tenuto.engine.occupation import Occupation
from tenuto.engine.parking import parking_of
from tenuto.engine.session_operations import SessionOperations
from tenuto.engine.session_states import SessionStates
from tenuto.engine.snapshots import Snapshots
from tenuto.engine.turn_operations import TurnOperations
from tenuto.memory.memory import Memory
from tenuto.memory.shape import Shape
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
from tenuto.session.prefixes import NEVER_FULL, PrefixIndex
from tenuto.session.registry import Registry
from tenuto.session.turn import Turn
from tenuto.text.masks import Masks, MasksAtOnce


@dataclass(slots=True)
class StepReport:
    """The outcome of a step: turns with new output, and the turns that ended and changes of sessions since the previous
    step. `worked` is False if there was nothing to compute and nothing is left for the next step."""

    worked: bool = False
    progressed: list[Turn] = field(default_factory=list)
    ended: list[Turn] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


class Engine:
    """Owns sessions, memory and the schedule; single-threaded. `units[g]` is the size of the pool of group g."""

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
        """`disk` replaces the files of `config.disk_tier`, and `carrier` the threads that copy parked units to the
        device. `identity` stands for the meaning of units' contents; memory that another engine has left on disk is
        used if its identity is the same. Raises `ConfigError`."""
        if config.lookahead and proposer is None:
            raise ConfigError(f"lookahead is {config.lookahead}; allowed: 0, because this engine has no proposer")
        self.config = config
        self.vocab_size = vocab_size
        self._clock, self.fuse = clock, Fuse()
        self.memory = Memory(executor.spec, units, Shape.of(config, executor.spec.page_size))
        executor.prepare(units, config.max_running, config.overlap)
        self.registry = Registry(self.memory, clock, random, config.context_length, config.max_sessions)
        self._queue = WaitingQueue(config.aging_seconds)
        shares = Shares(dict(config.tenant_weights))
        self.batch = Batch(self.memory, shares, eos_ids, config.aging_seconds)
        self.prefixes = PrefixIndex(self.memory.page_size if config.prefix_cache else NEVER_FULL)
        self.idle_memory = parking_of(
            config, self.memory, executor, disk, carrier or CopyThreads(), clock.now, identity
        )
        self.snapshots = Snapshots(self.idle_memory, clock)
        self.counts, self.news = Counts(), News()
        self._lifecycle = Lifecycle(
            self.memory,
            self.registry,
            self.prefixes,
            self.idle_memory,
            self._queue,
            self.batch,
            clock,
            config.draft_timeout,
            self.counts,
            self.news,
        )
        self.pressure = self._lifecycle.pressure
        self.timers, self.sharing = self._lifecycle.timers, self._lifecycle.sharing
        states = SessionStates(
            self.memory, executor, self.idle_memory, self.pressure, self.batch, self._lifecycle.note_memory, self.counts
        )
        self._admission = Admission(
            self.memory,
            self.batch,
            self._queue,
            self.pressure,
            self._lifecycle.start,
            self._lifecycle.sharing.share,
            self.idle_memory,
        )
        self.suspects = Suspects()
        self._planner = Planner(self.memory, self.batch, self.suspects, config, proposer)
        self._settler = Settler(self.memory, self.batch)
        self._flights = Flights(
            executor,
            self.memory,
            self._lifecycle,
            self.batch,
            self.idle_memory,
            self.counts,
            self._planner,
            self._settler,
            self.suspects,
            masks or MasksAtOnce(),
        )
        self._occupation = Occupation(
            executor, self.memory, self.registry, self.batch, self._lifecycle, self.idle_memory, self._flights
        )
        gate = TurnGate(self._queue, config.max_queued, vocab_size, config.context_length, text)
        self.sessions = SessionOperations(
            self.fuse,
            self.registry,
            self._lifecycle,
            self._occupation,
            gate,
            states,
            self.snapshots,
            self.counts,
            clock,
            config.snapshot_seconds,
        )
        self.turns = TurnOperations(
            self.fuse, self.registry, self._lifecycle, self._occupation, gate, self.counts, clock
        )
        self.auditor = Auditor(
            self.memory, self.registry, (self._admission,), self.batch, config.audit_every, strict=config.strict
        )
        self.paused = False  # if True, nothing is planned; written by `pause` and `resume`
        self.steps = 0  # number of calls of `step`
        self.transitions = self.counts.transitions
        self.totals = self.counts.totals

    # -- the loop

    @guarded
    def step(self) -> StepReport:
        """Admits waiting turns and plans a step, unless paused or without memory; submits it, settles finished steps,
        and audits."""
        self.pressure.begin_step()
        self._lifecycle.expire()
        self._lifecycle.join()
        planned = None
        if not (self.paused or self.released):
            self._admission.admit()
            planned = self._flights.plan()
        if planned is not None:
            self._flights.submit(planned)
        report = StepReport(worked=len(self._flights) > 0 or self.pressure.unfinished or self.registry.more_expired)
        ahead = self.config.overlap if planned is not None else 0  # one stays in flight, so that the device never waits
        report.progressed = self._flights.land(ahead)
        report.ended, report.changes = self.news.take_ended(), self.news.take_changes()
        self.memory.cache.trim()
        self.steps += 1
        self.memory.check_totals()
        self.auditor.step(self._flights)
        return report

    @property
    def queued(self) -> int:
        """The number of submitted turns that wait for a row."""
        return self._queue.submitted

    def now(self) -> float:
        """Returns the time, in seconds, of the clock for deadlines."""
        return self._clock.now()

    @property
    def idle(self) -> bool:
        """Whether a step would only check for expired timers."""
        return not self._has_turns and not self.idle_memory.copying

    @property
    def only_begins(self) -> bool:
        """Whether a step would only begin turns, so that no running turn waits if the step comes later."""
        return not len(self.batch) and not len(self._flights) and self.queued > 0

    @property
    def _has_turns(self) -> bool:
        """Whether turns run or wait, or steps are in flight."""
        return bool(len(self.batch) or len(self._queue) or len(self._flights))

    # -- pauses

    @guarded
    def pause(self, *, release: bool = False) -> None:
        """Plans no steps until `resume`. With `release`, running turns give up the units they acquired, and queue."""
        self.paused = True
        if release:
            for turn in list(self.batch.running()):
                self._lifecycle.preempt(turn)

    @guarded
    def resume(self) -> None:
        """Ends a pause."""
        self.paused = False

    # -- giving memory back

    @property
    def released(self) -> frozenset[MemoryPart]:
        """The parts of memory that are given back to the system; while there are any, nothing is planned."""
        return self._occupation.released

    @guarded
    def release_memory(self, parts: Collection[MemoryPart]) -> None:
        """Gives memory back to the system until `restore_memory`. Every session drops to its tokens, or is parked. New
        turns are rejected; turns of a paused engine wait. Raises `IllegalTransition` unless the engine is paused or
        idle."""
        if self._has_turns and not self.paused:
            raise IllegalTransition(
                "turns run or wait; memory can be released while generation is paused or once no turn runs or waits"
            )
        self._occupation.release(parts)

    @guarded
    def restore_memory(
        self, parts: Collection[MemoryPart], weights: Weights | None = None, identity: str | None = None
    ) -> None:
        """Allocates those of `parts` that are released; `weights` are given exactly if weights are among these. Turns
        go on once no part is released. `identity`: the engine's new identity, if the weights differ from the released
        ones; parked memory is then never used again. Raises `ConfigError`, having changed nothing, if there is not
        enough memory."""
        self._occupation.restore(parts, weights, identity)

    @guarded
    def update_weights(self, weights: Weights, identity: str = "", *, abort: bool = False) -> None:
        """Computes with `weights` from now on; `identity` is the engine's new identity. Results of the old weights are
        never used again: every session drops to its tokens, and parked memory is discarded. Submitted turns go on from
        their tokens, or with `abort` end. Raises `IllegalTransition` if the weights are released, and `ConfigError`,
        having replaced nothing, if there is not enough memory."""
        self._occupation.update(weights, identity, abort=abort)

    def end(self, *, keep: bool = False) -> None:
        """Releases the disk tier, and removes its files unless `keep` is set. The engine is not used afterwards."""
        self.idle_memory.tiers.close(keep=keep)

    # -- audit

    def audit(self) -> AuditReport:
        """Recounts every unit from its holders, now. Raises `InvariantError` if the counts are wrong."""
        self.idle_memory.audit()
        return self.auditor.recount(self._flights)

    @guarded
    def ask_audit(self, told: Callable[[AuditReport], None]) -> None:
        """Requests a recount as by `audit`, spread over the next steps, and calls `told` with its report. An error it
        finds stops the engine."""
        self.auditor.ask(told)

    @property
    def counted_work(self) -> tuple[int, int, int]:
        """Total numbers of units touched, rows considered and turns settled, which determine the cost of steps."""
        return self.memory.touched, self._planner.rows_considered, self._settler.turns_settled
