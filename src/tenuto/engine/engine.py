"""The engine runs turns on sessions. `Engine.step` shows the architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from tenuto.base.clock import Clock
from tenuto.base.config import EngineConfig
from tenuto.base.errors import ConfigError, IllegalTransition, Overloaded
from tenuto.base.map_views import MapPart, TraceView
from tenuto.base.plan import Executor
from tenuto.base.views import AuditReport
from tenuto.engine.adapter_operations import AdapterOperations
from tenuto.engine.arrivals import Arrivals
from tenuto.engine.auditor import Auditor
from tenuto.engine.core import Core
from tenuto.engine.departures import Departures
from tenuto.engine.erasure import Erasure
from tenuto.engine.flights import Flights
from tenuto.engine.gate import TextFactory, TurnGate
from tenuto.engine.guard import guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.occupation import Occupation
from tenuto.engine.parking import Parking
from tenuto.engine.restores import Restores
from tenuto.engine.session_operations import SessionOperations
from tenuto.engine.session_states import SessionStates
from tenuto.engine.snapshots import Snapshots
from tenuto.engine.trace import Trace
from tenuto.engine.turn_operations import TurnOperations
from tenuto.engine.watch import Watch
from tenuto.memory.lineage import WeightsVersion
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Pool
from tenuto.memory.shape import Shape
from tenuto.memory.tiers.disk import Disk
from tenuto.memory.tiers.moves import Carrier, CopyThreads
from tenuto.sched.admission import Admission
from tenuto.sched.batch import Batch
from tenuto.sched.guesses import Proposer
from tenuto.sched.planner import Planner
from tenuto.sched.predictor_proposer import PredictorProposer
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
        predictor: PredictorProposer | None = None,
        masks: Masks | None = None,
        disk: Disk | None = None,
        carrier: Carrier | None = None,
        identity: str = "",
        generates: bool = True,
    ) -> None:
        """`disk` replaces the files of `config.disk_tier`, and `carrier` the threads that copy parked units to the
        device. `identity` stands for the meaning of units' contents; memory that another engine has left on disk is
        used if its identity is the same. `generates`: the model's logits mean something. `predictor`: the part of
        `proposer`, or all of it, that asks the model's head. Raises `ConfigError`."""
        if predictor is not None and not executor.predicts:
            raise ConfigError("there is a proposer for a head of the model; allowed: none, because it has no head")
        if config.lookahead and proposer is None:
            raise ConfigError(f"lookahead is {config.lookahead}; allowed: 0, because this engine has no proposer")
        self.config = config
        self.vocab_size = vocab_size
        self.memory = memory = Memory(executor.spec, units, Shape.of(config, executor.spec.page_size))
        memory.weights = WeightsVersion(identity)
        executor.prepare(units, config.max_running, config.overlap, config.lookahead)
        parking = Parking(config, memory, executor, disk, carrier or CopyThreads(), clock.now, identity)
        self.core = core = Core(
            config=config,
            executor=executor,
            clock=clock,
            memory=memory,
            idle_memory=parking,
            restores=Restores(parking),
            registry=Registry(memory, clock, random, config.context_length, config.max_sessions),
            prefixes=PrefixIndex(memory.page_size if config.prefix_cache else NEVER_FULL),
            queue=WaitingQueue(config.aging_seconds),
            batch=Batch(memory, Shares(dict(config.tenant_weights)), eos_ids, config.aging_seconds),
            proposer=proposer,
        )
        self.registry, self.batch, self.prefixes = core.registry, core.batch, core.prefixes
        self.idle_memory, self.restores = core.idle_memory, core.restores
        self.counts, self.outcomes, self.fuse = core.counts, core.outcomes, core.fuse
        self.snapshots = Snapshots(core.idle_memory, clock, config)
        self._lifecycle = lifecycle = Lifecycle(core)
        self.pressure, self.timers, self.sharing = lifecycle.pressure, lifecycle.timers, lifecycle.sharing
        self._admission = Admission(
            memory, core.batch, core.queue, self.pressure, lifecycle.start, self.sharing.share, core.restores
        )
        self.suspects = Suspects()
        self._planner = planner = Planner(memory, core.batch, self.suspects, config, proposer, predictor)
        self._settler = settler = Settler(memory, core.batch, planner.predictor)
        self.guessed, self.accepted = settler.guessed, settler.accepted
        self._flights = Flights(core, lifecycle, self._planner, settler, self.suspects, masks or MasksAtOnce())
        self.occupation = Occupation(core, lifecycle, self._flights)
        gate = TurnGate(core, vocab_size, text, generates=generates)
        self.sessions = SessionOperations(core, lifecycle, gate, self.snapshots)
        self.turns = TurnOperations(core, lifecycle, self.occupation, gate)
        self.states = SessionStates(core, lifecycle, self.occupation)
        self.departures = Departures(core, lifecycle, self._flights)
        self.arrivals = Arrivals(core, lifecycle, self.occupation)
        self.adapters = AdapterOperations(core, self.arrivals)
        self.expectations = lifecycle.expectations
        self.auditor = Auditor(core, (self._admission, self.expectations, self.arrivals))
        self.erasure = Erasure(core, lifecycle, self.occupation, self._flights, self.auditor)
        self._watch = Watch(core, self.pressure, self.auditor, self._flights)
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
        progressed, planned = self._flights.land_guesses(), None
        self._lifecycle.join()
        if not (self.occupation.paused or self.occupation.released):
            self._admission.admit()
            self.expectations.step(self._admission)
            planned = self._flights.plan()
        if planned is not None:
            self._flights.submit(planned)
        report = StepReport(worked=len(self._flights) > 0 or self.pressure.unfinished or self.registry.more_expired)
        ahead = self.config.overlap if planned is not None else 0  # one stays in flight, so that the device never waits
        report.progressed = progressed + self._flights.land(ahead)
        report.ended, report.changes = self.outcomes.take_ended(), self.outcomes.take_changes()
        self.memory.cache.trim()
        self.snapshots.step()
        self.steps += 1
        self.memory.check_totals()
        self.auditor.step(self._flights)
        return report

    @property
    def queued(self) -> int:
        """The number of submitted turns that wait for a row."""
        return self.core.queue.submitted

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of the memory, and those that only serve guesses."""
        proposer = self.core.proposer
        return (*self.memory.pools, *(proposer.pools if proposer is not None else ()))

    def now(self) -> float:
        """Returns the time, in seconds, of the clock for deadlines."""
        return self.core.clock.now()

    @property
    def idle(self) -> bool:
        """Whether a step would only check for expired timers."""
        return not self.occupation.has_turns and not self.idle_memory.copying

    @property
    def only_begins(self) -> bool:
        """Whether a step would only begin turns, so that no running turn waits if the step comes later."""
        return not len(self.batch) and not len(self._flights) and self.queued > 0

    def end(self, *, keep: bool = False) -> None:
        """Releases the proposer and the disk tier, and removes the tier's files unless `keep` is set. The engine is not
        used afterwards."""
        if self.core.proposer is not None:
            self.core.proposer.close()
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

    # -- for those who watch

    def look(self, *, fresh: bool = False, again: Iterable[int] = (), end: bool = False) -> MapPart:
        """Returns what has changed on the map since the last look; with `end`, nobody looks any more. See
        `Watch.look`."""
        part = self._watch.look(steps=self.steps, pools=self.pools, fresh=fresh, again=again)
        if end:
            self._watch.end()
        return part

    def begin_trace(self) -> None:
        """Begins to record steps. Raises `Overloaded` while a trace is being made."""
        if self._flights.trace is not None:
            raise Overloaded("a trace is being made; try again when it has ended")
        self._flights.trace = Trace(self.now(), self.core.clock.wall())

    def end_trace(self) -> TraceView:
        """Ends the trace and returns it. Raises `IllegalTransition` if none was begun."""
        trace, self._flights.trace = self._flights.trace, None
        if trace is None:
            raise IllegalTransition("no trace is being made")
        waiting = [s.turn for s in self.registry if s.turn is not None and not s.turn.drafting]
        return trace.end(self.now(), waiting)

    @property
    def counted_work(self) -> tuple[int, int, int]:
        """Total numbers of units touched, rows considered and turns settled, which determine the cost of steps."""
        return self.memory.touched, self._planner.rows_considered, self._settler.turns_settled
