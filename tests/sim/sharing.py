"""The story of tenants that share rows and prefill tokens, and the bounds it checks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tenuto.session.turn import Turn

if TYPE_CHECKING:
    from tests.sim.naive import NaiveTurn
    from tests.sim.scenarios import Scenario

TENANTS = ("greedy", "bea", "cid", "dot", "eve", "fay")
WEIGHTS = (1.0, 1.0, 2.0, 3.0)
STARTS_AT_ONCE = 3
"""Steps within which a tenant without rows gets one; one should be enough."""


def sharing(world: Scenario) -> None:
    """One tenant has many more turns than there are rows, and others come and go: each gets its share of rows and of
    prefill, and no row stays free while a turn waits."""
    rng, config = world.rng, world.config
    others = TENANTS[1 : 1 + rng.randint(1, 5)]
    ledger = Ledger(world, ("greedy", *others))
    for _ in range(rng.randint(config.running, 2 * config.running)):
        ledger.ask("greedy", rng.choice((2, 30, 90)), rng.choice((5, 20)))
    for _ in range(rng.randint(40, 150)):
        if ledger.waiting("greedy") < 3:
            ledger.ask("greedy", rng.choice((2, 30, 90)), rng.choice((5, 20)))
        if rng.random() < 0.3:
            ledger.ask(rng.choice(others), rng.choice((2, 30, 90)), rng.randint(1, 12))
        ledger.step()
    while world.turns:
        ledger.step()


class Ledger:
    """Records which tenants wait, start and are computed. Memory is ample: a waiting turn lacks nothing but a row."""

    def __init__(self, world: Scenario, tenants: tuple[str, ...]) -> None:
        self._world = world
        weights = dict(world.config.weights)
        self._weights = {tenant: weights.get(tenant, 1.0) for tenant in tenants}
        self._passed: dict[str, int] = dict.fromkeys(tenants, 0)  # others' starts while it waits without a row
        self._since: dict[str, int] = {}  # the step since which a tenant has waited without a row

    def ask(self, tenant: str, tokens: int, most: int) -> None:
        world = self._world
        idle = [sid for sid, naive in world.naive.items() if naive.policy.tenant == tenant and naive.turn is None]
        room = len(world.naive) < world.config.sessions
        if room and len(world.waiting()) < world.config.queued:
            for sid in idle:
                world.close(sid, finish=False)
            world.say(world.opened(tenant=tenant), world.text(tokens), most, priority=world.rng.choice((0, 0, 1)))

    def waiting(self, tenant: str) -> int:
        return sum(turn.session.policy.tenant == tenant for turn in self._world.waiting())

    def step(self) -> None:
        world = self._world
        before = set(world.waiting())
        world.rows, world.given = world.config.running, []
        world.step()
        self._check_memory()
        self._check_rows(before)
        self._check_starts(before)
        self._check_tokens()

    def _check_memory(self) -> None:
        """Checks that a turn that yields its row keeps its memory, unless it relied on a step that is still in
        flight."""
        lost = [e.turn for e in self._world.log.events if (e.kind, e.why) == ("preempt", "preempted")]
        if lost and not self._world.config.overlap:
            self._world.found("shares", f"{lost} lost memory although memory is ample")

    def _check_rows(self, before: set[Turn]) -> None:
        """Checks that no row stays free while a turn waits that already waited before the step: only rows are short."""
        if before.intersection(self._world.waiting()) and self._world.rows < self._world.config.running:
            self._world.found("shares", f"{self._world.rows} of {self._world.config.running} rows are used; turns wait")

    def _check_starts(self, before: set[Turn]) -> None:
        """Checks each tenant's starts. If there are enough rows, a tenant without one takes one from a tenant above its
        share. Otherwise starts go round: while a tenant has no row, each other starts as often as the ratio of their
        weights, plus once for every row it may have been owed. A turn that takes its own tenant's row does not
        count."""
        world = self._world
        running = {_tenant(turn) for turn in world.engine.batch.running()}
        waiting = {_tenant(turn) for turn in before.intersection(world.waiting())}
        started, paused = (
            Counter(_tenant(e.turn) for e in world.log.events if e.kind == kind and e.turn is not None)
            for kind in ("start", "pause")
        )
        gained = (started - paused).total()
        for tenant, weight in self._weights.items():
            lacks = tenant in waiting and tenant not in running and not started[tenant]
            self._passed[tenant] = self._passed[tenant] + gained if lacks else 0
            bound = sum(-(-other // weight) for other in self._weights.values()) + world.config.running
            if self._passed[tenant] > bound:
                message = f"{tenant} of {self._weights} waits while other tenants start {self._passed[tenant]} times"
                world.found("shares", f"{message}; allowed: {bound:g}")
            if not lacks or not self._rows_for_all(weight):
                self._since[tenant] = world.steps
            if world.steps - self._since[tenant] > STARTS_AT_ONCE:
                world.found("shares", f"{tenant} of {self._weights} waits and gets no row of {world.config.running}")

    def _rows_for_all(self, weight: float) -> bool:
        """Returns whether some tenant must exceed its share if a tenant of this weight has nothing."""
        others = [self._weights[t] for t in {_tenant(turn) for turn in self._open()}]
        return self._world.config.running >= sum(1 + other / weight for other in others)

    def _open(self) -> list[Turn]:
        return [*self._world.waiting(), *self._world.engine.batch.running()]

    def _check_tokens(self) -> None:
        """Checks that tenants whose prefills could use more tokens get equal parts by weight, up to one token of
        rounding each."""
        world = self._world
        extra: dict[str, int] = {}
        short: set[str] = set()
        for turn, count in world.given:
            tenant = turn.session.policy.tenant
            extra[tenant] = extra.get(tenant, 0) + count - 1
            if turn.number in world.turns and turn.computed < turn.prompt - 2 and turn.most:
                short.add(tenant)
                self._check_priority(turn)
        if short and sum(count for _, count in world.given) < world.config.budget:
            world.found("shares", f"{world.given} leave unused tokens of {world.config.budget} that {short} could use")
        for one in short:
            for other in short:
                mine, its = extra[one] / self._weights[one], extra[other] / self._weights[other]
                rounding = (len(extra) + 1) / min(self._weights[one], self._weights[other])
                if mine + rounding < its:
                    world.found("shares", f"{extra} prefill tokens besides the first, with weights {self._weights}")

    def _check_priority(self, short: NaiveTurn) -> None:
        """Checks that while a prefill could use more tokens, no turn of its tenant with lower priority gets more than
        one."""
        for turn, count in self._world.given:
            same = turn.session.policy.tenant == short.session.policy.tenant
            if same and count > 1 and turn.priority < short.priority:
                self._world.found("shares", f"turn {turn.number} gets {count} tokens; {short.number} outranks it")


def _tenant(turn: Turn) -> str:
    return turn.session.policy.tenant
