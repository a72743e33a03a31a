"""The auditor recounts memory in a single call, or a little at every step, so that audits never delay turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Executor, Ints
from tenuto.base.views import AuditReport
from tenuto.engine.core import Core
from tenuto.memory.audit import AuditCycle, recount
from tenuto.memory.pool import Holder, Pool
from tenuto.sched.proposal import Flight

log = logging.getLogger("tenuto.audit")

VISITS_A_STEP = 256
"""The number of holders and leases visited per step, which takes about a millisecond."""

Told = Callable[[AuditReport], None]


class Auditor:
    """Checks the totals of pools beside the memory at every step. Begins an audit cycle every `config.audit_every`
    steps (0: never) and on request, and advances it at every step. With `config.strict`, it recounts everything after
    every step instead, and logs every recount. `others` are the holders besides sessions."""

    def __init__(self, core: Core, others: tuple[Holder, ...]) -> None:
        self._strict = core.config.strict
        self._memory = core.memory
        self._sessions = core.registry
        self._others = others
        self._proposer = core.proposer
        self._batch = core.batch
        self._every = core.config.audit_every
        self._since = 0  # steps since the last cycle began
        self._cycle: AuditCycle | None = None
        self._clock = core.clock
        self.last: AuditReport | None = None  # of the last recount that was complete
        self.last_at = 0.0  # when it was
        self._told: list[Told] = []  # callbacks for the report of the cycle in progress
        self._asked: list[Told] = []  # callbacks for the report of the next cycle
        self.work = 0  # total of `AuditCycle.work`
        self.cycles = 0  # number of cycles ended

    def require_zeros(self, executor: Executor, pool: Pool, group: int, units: Ints) -> None:
        """Reads units of a pool, the executor's `group`, which were overwritten. Raises `InvariantError` if one holds
        anything, and `CopyFailed`."""
        data = executor.read_units(group, units)
        if data.any():
            wrong = units[data.any(axis=1)].tolist()
            raise InvariantError(f"{pool.name}: units {wrong} were overwritten and hold something")

    def recount(self, flights: Iterable[Flight]) -> AuditReport:
        """Recounts everything now; `flights` are the steps in flight. Raises `InvariantError`."""
        self._check_rows()
        return self._keep(recount(self._memory, self._holders(), self._touched(flights), self._beside))

    def _keep(self, report: AuditReport) -> AuditReport:
        self.last, self.last_at = report, self._clock.now()
        return report

    @property
    def awaited(self) -> bool:
        """Whether a requested report is outstanding."""
        return bool(self._told or self._asked)

    def ask(self, told: Told) -> None:
        """Requests a cycle that begins after this call; `told`, which must not raise, is called with its report."""
        self._asked.append(told)

    def step(self, flights: Iterable[Flight]) -> None:
        """Advances the cycle after a step; `flights` are in flight. Raises `InvariantError` if the counts are wrong, or
        were wrong when the cycle began."""
        for pool in self._beside:
            pool.check_totals()
        if self._strict:
            self._step_strictly(flights)
            return
        self._since += 1
        due = self._every > 0 and self._since >= self._every
        if (self._asked and not self._told) or (due and self._cycle is None):
            self._cycle = self._begin(flights)  # replaces a cycle whose report was not requested
            self._told, self._asked, self._since = self._asked, [], 0
        if self._cycle is None:
            return
        before = self._cycle.work
        report = self._cycle.advance(VISITS_A_STEP)
        self.work += self._cycle.work - before
        if report is not None:
            self._cycle = None
            self.cycles += 1
            self._keep(report)
            waited, self._told = self._told, []
            for told in waited:
                told(report)

    def _step_strictly(self, flights: Iterable[Flight]) -> None:
        report = self.recount(flights)
        self.cycles += 1
        waited, self._asked = self._asked, []
        for told in waited:
            told(report)
        log.info("audit", extra={"step": self.cycles, "summary": str(report)})

    def _begin(self, flights: Iterable[Flight]) -> AuditCycle:
        self._check_rows()
        memories = self._sessions.memories()
        return AuditCycle(self._memory, memories, self._besides(), self._touched(flights), self._beside)

    @property
    def _beside(self) -> tuple[Pool, ...]:
        """The pools of memory that only serves guesses."""
        return self._proposer.pools if self._proposer is not None else ()

    def _holders(self) -> Iterator[Holder]:
        yield from self._sessions.holders()
        yield from self._besides()

    def _besides(self) -> Iterator[Holder]:
        """Yields the holders besides sessions, as they are when it is read."""
        yield from self._others
        if self._proposer is not None:
            yield from self._proposer.holders()

    def _check_rows(self) -> None:
        if self._memory.rows.used != len(self._batch):
            raise InvariantError(f"{self._memory.rows.used} rows are taken by {len(self._batch)} running turns")
        for turn in self._batch.running():
            if turn.state.ended or turn.session.turn is not turn:
                raise InvariantError(f"{turn!r} has a row and is not its session's open turn")

    def _touched(self, flights: Iterable[Flight]) -> list[tuple[int, list[int]]]:
        """Returns the units that steps in flight touch, each list with its group."""
        touched: list[tuple[int, list[int]]] = []
        for plan in (flight.plan for flight in flights):
            for group, table, copy in zip(self._memory.paged, plan.tables, plan.copies, strict=True):
                touched.append((group, [*table.pages.tolist(), *copy.sources.tolist(), *copy.targets.tolist()]))
            for group, moves in zip(self._memory.states, plan.states, strict=True):
                touched.append((group, [*moves.reads.tolist(), *moves.writes.tolist()]))
        return touched
