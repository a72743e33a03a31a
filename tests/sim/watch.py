"""Watches for turns that wait too long, memory that is taken in vain, and needless recomputation.

A correct engine keeps every bound here with room to spare; the reason for each stands beside it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tenuto.base.groups import Kind
from tenuto.base.turns import TurnState
from tenuto.base.views import SessionState
from tenuto.engine.engine import StepReport
from tenuto.sched.admission import RECONSIDERED_AFTER
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.sim import internals
from tests.sim.room import Room
from tests.sim.transitions import Event
from tests.sim.travels import ParkedInOrder

if TYPE_CHECKING:
    from tests.sim.naive import NaiveTurn
    from tests.sim.world import World

STUCK = 400
"""Steps without a computed token while a submitted turn is open."""
PATIENCE = 6000
"""Steps that a submitted turn may take."""
STARTS_WITHIN = 6 + RECONSIDERED_AFTER
"""Steps within which the first turn in the queue starts once its worst case fits; one, if it were always considered."""
AFTER_FAILURE = 60
"""The same after a failed step, when it may first have to be found out which of its turns makes steps fail."""
OVERTAKEN = 1
"""Later turns of no higher priority that may start before a waiting one; ideally 0."""


class Watch:
    """Looks at the effects of each step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._room = Room(world)
        self._idle: dict[str, tuple[Session, int]] = {}
        # with their turns, and the tokens they have in memory
        self._pinned: dict[Session, tuple[Turn | None, int]] = {}
        self._trimmed = self._evicted = 0  # checkpoints evicted before the step: to keep the budget, and in all
        self._coming: set[Session] = set()  # whose state came back early before the step
        self._first = 0, world.steps  # the first in the queue, and the last step at which it did not fit
        self._progress = world.steps
        self._executed = 0
        self._judged = False
        self._planned: set[int] = set()  # numbers of the turns in this step's plan
        self._slow: set[int] = set()  # numbers of turns whose masks were slow when the plan was made
        self._suspected = False  # whether this step began with suspects, so that it may leave out turns
        self._failures = 0  # failed steps before this one
        self._suspicion: tuple[int, set[Turn], str] | None = None  # turns that yielded, apparently in vain
        self._needy: dict[int, float] = {}  # numbers of the turns it may have been for, and when their drafts changed
        self._parked = ParkedInOrder(world)
        world.log.would_fit = self._room.fits_with_its_session
        world.log.better_victim = self._better_victim

    def healthy(self, turn: NaiveTurn) -> bool:
        """Returns whether the turn's steps can fail only because of other turns."""
        return turn.poisoned_from is None and self._world.config.fail_rate == 0

    def yielded(self, session: Session) -> bool:
        """Returns whether memory has been taken from the session."""
        return any(event.session is session and event.kind in ("drop", "park") for event in self._world.log.events)

    # -- around a step

    def before(self) -> None:
        world = self._world
        self._idle = {s.id: (s, s.memory.computed) for s in world.engine.registry if s.turn is None}
        there = [s for s in world.engine.registry if s.policy.pinned and not s.memory.arriving]
        self._pinned = {s: (s.turn, s.memory.computed) for s in there}
        self._trimmed, self._evicted = internals.trimmed(world.engine), world.engine.memory.cache.evicted
        self._coming = internals.coming_back(world.engine)
        self._judged = False
        self._planned = set()
        self._slow = set()
        world.masks.were_slow.clear()
        self._suspected = internals.has_suspects(world.engine)
        self._failures = world.failures
        world.log.events.clear()

    def submitted(self, members: Collection[int]) -> None:
        """Notes that a plan with these turns was given to the executor: this step takes no more memory."""
        self._planned.update(members)
        self._slow.update(internals.slow_turns(self._world.engine, self._world.masks.were_slow))
        self._judge()

    def after(self, report: StepReport) -> None:
        world = self._world
        if not self._judged and not report.ended:
            self._judge()
        for sid, (session, computed) in self._idle.items():
            lost = session.turn is None and sid in world.naive and session.memory.computed < computed
            parked = world.config.tiers and session.rests  # it has been idle for long
            if lost and not parked and not self.yielded(session):
                world.found("kept memory", f"idle session {sid} lost memory without pressure")
        self._parked.look()
        self._check_pinned()
        self._check_cache()
        self._check_order()
        self._check_waiting()
        self._check_starts()
        if world.engine.idle:
            self.drafts_are_computed()
        if report.progressed or report.ended or world.executor.steps != self._executed or not world.waiting():
            self._progress, self._executed = world.steps, world.executor.steps
        if world.steps - self._progress >= STUCK:
            world.found("stuck", f"nothing was computed for {STUCK} steps")
        for turn in world.turns.values():
            if not turn.drafting and world.steps - turn.since >= PATIENCE:
                world.found("stuck", f"turn {turn.number} of {turn.sid} starves since step {turn.since}")

    def _check_pinned(self) -> None:
        """Checks that pinned sessions without a running turn have kept their memory."""
        for session, (turn, computed) in self._pinned.items():
            same = session.turn is turn and (turn is None or not turn.running)
            if same and session.state is not SessionState.CLOSED and session.memory.computed < computed:
                self._world.found("pinned", f"pinned session {session.id} lost memory")

    # -- yielding

    def _judge(self) -> None:  # noqa: C901, PLR0912 - one rule after the other
        """Checks that no memory is taken in vain: at least one of the victims was needed, and no drop was superfluous.

        The last victim is needed if the others have yielded. So if each of them alone could have kept what it gave, the
        room was made for nothing. While a step is in flight, released units are freed a step or two later, and the turn
        that needs them starts only then."""
        world, self._judged = self._world, True
        events = world.log.events
        victims = [e for e in events if self._is_victim(e)]
        starts = [i for i, e in enumerate(events) if e.kind == "start"]
        if self._suspicion is not None:
            step, names, message = self._suspicion
            withdrawn = any(n not in world.turns or world.turns[n].changed != at for n, at in self._needy.items())
            if any(events[i].turn not in names for i in starts) or self._failures != world.failures or withdrawn:
                self._suspicion = None
            elif world.steps - step <= 2 * world.config.overlap:
                self._suspicion = None if victims else self._suspicion  # others took the room, and yield too
            else:
                self._suspicion = None
                world.found("in vain", message)
        self._check_for_drafts(victims)
        dropped = [e for e in victims if e.kind == "drop" and e.state is not TurnState.DRAFTING]
        if dropped and not any(any(e.freed) for e in events) and world.engine.memory.cache.evicted == self._evicted:
            world.found("gives nothing", f"{[e.session for e in dropped]} were dropped, and nothing was freed")
        if self._suspected:
            self._check_suspects(victims)
        # the bounds of sliding groups are too loose
        sliding = any(group.kind is Kind.SLIDING for group in world.config.groups)
        if not victims or self._failures != world.failures or sliding:
            return
        if world.engine.memory.cache.evicted != self._evicted:
            return  # a session may have yielded so that a checkpoint could be evicted
        if self._coming != internals.coming_back(world.engine):
            return  # others yielded to state that comes back early, or before it was given up
        if internals.copying(world.engine):
            return  # yielded units may be freed only when copies end
        if world.config.overlap and len(world.engine.batch) == world.config.running:  # for a row: it could not pause
            victims = [e for e in victims if e.kind == "drop" and e.state is not TurnState.DRAFTING]
        growing = (
            2 * len(world.engine.batch) if world.config.overlap else 0
        )  # pages taken before the yielded units are freed
        last = max((i for i, e in enumerate(events) if e in victims), default=-1)
        if any(e.kind == "share" for e in events[last + 1 :]):
            return  # what yielded can be shared now, so the turn needs less than was asked for
        # sessions gave up their own memory when they took others', or since their turns fit only without it
        swapped = [e.freed for e in events if e.kind == "share" or (e.kind, e.why) == ("drop", "restart")]
        room = [n - len(starts) - growing for n in self._room.left()]  # the copy of a tail is counted at its worst case
        room = [n - sum(units) for n, *units in zip(room, *swapped, strict=True)]
        if any(any(e.freed) for e in victims) and all(
            all(n <= have for n, have in zip(e.freed, room, strict=True) if n) for e in victims
        ):
            given = [(e.kind, e.session.id[:6], e.freed) for e in victims]
            message = f"{given} yielded in step {world.steps}, and {room} units of each group were left over"
            if not world.config.overlap:
                world.found("in vain", message)
            elif self._suspicion is None and not self._just_fits(victims):
                needy = {turn.number for turn in (*world.waiting(), *world.engine.batch.running())}
                needy |= {number for number, turn in world.turns.items() if turn.drafting}
                self._needy = {number: world.turns[number].changed for number in needy & world.turns.keys()}
                names = {e.turn for e in victims if e.turn is not None and e.kind == "preempt"}
                self._suspicion = (world.steps, names, message)
        if world.looking:
            self._check_rungs(victims)

    def _just_fits(self, victims: list[Event]) -> bool:
        """Returns whether a waiting turn needs what the victims gave, and fits unless a running turn takes a page
        first."""
        there = [pool.free + pool.limbo for pool in self._world.engine.memory.pools]
        given = [sum(units) for units in zip(*(e.freed for e in victims), strict=True)]
        for turn in self._world.waiting():
            need = self._room.worst(turn.length + 1)
            fits = all(n <= have for n, have in zip(need, there, strict=True))
            if fits and any(n > have - more for n, have, more in zip(need, there, given, strict=True)):
                return True
        return False

    def _check_rungs(self, victims: list[Event]) -> None:
        """Checks that no session yields while one that comes before it could have yielded instead."""
        world = self._world
        shared = any(e.shared for e in victims)  # what the others shared with them, a few may free alone now
        for event in victims:
            if any(event.closed) and all(a >= b for a, b in zip(event.closed, event.freed, strict=True)):
                world.found("rungs", f"{event.session!r} yielded {event.freed}; closed sessions had {event.closed}")
            alone = event.kind == "drop" and any(event.freed) and not shared
            if alone and (other := self._cheaper_victim(event)) is not None:
                world.found("rungs", f"{event.session!r}, {event.state}, yielded {event.freed}; {other!r} could have")
            if event.better is not None and not any(event.freed):
                world.found("gives nothing", f"{event.session!r} was dropped and gave nothing; {event.better!r} could")
                return

    def _check_suspects(self, victims: list[Event]) -> None:
        """Checks that while suspects are tested, no turn yields if the longest turn had room beside what the running
        turns still need. In each group one more unit may be the source that its session brings back."""
        world = self._world
        losers = [e for e in victims if e.kind == "preempt"]
        rows = len(world.engine.batch) == world.config.running or any(e.kind == "start" for e in world.log.events)
        if not losers or rows or internals.copying(world.engine):
            return
        room = [have - sum(e.freed[group] for e in victims if e.freed) for group, have in enumerate(self._room.left())]
        if all(have > needed for have, needed in zip(room, self._room.worst(world.longest), strict=True)):
            names = [e.session.id[:6] for e in losers]
            world.found("in vain", f"{names} lost memory to suspects, and {room} units of each group were free")

    def _check_for_drafts(self, victims: list[Event]) -> None:
        """Checks that only closed sessions yield to drafts."""
        running = self._world.engine.batch.running()
        losers = [e.session for e in victims if e.kind == "drop" and e.state is not TurnState.DRAFTING]
        losers = [session for session in losers if session.state is not SessionState.CLOSED]
        if losers and not self._world.waiting() and all(turn.drafting for turn in running):
            self._world.found("drafts", f"{losers} yielded, although only drafts {running} need memory")

    def _check_starts(self) -> None:
        """Checks that a turn that starts is computed in the same step: admission has counted the pages for all its
        known tokens."""
        world = self._world
        if self._suspected or self._failures != world.failures:
            return
        starts = [event for event in world.log.events if event.kind == "start"]
        for place, event in enumerate(starts):
            turn = event.turn
            if event.state is TurnState.DRAFTING or turn is None or not turn.running:
                continue
            if any(e.turn is not None and self._outranks(e.turn, turn) for e in starts[place + 1 :]):
                continue
            waits = internals.waits_in_its_row(world.engine, turn)  # for another turn's computation, or for copies
            waits = waits or turn.number in self._slow
            if turn.number in world.turns and turn.number not in self._planned and not waits:
                world.found("starts", f"{turn!r} has started, and the step computes nothing for it")

    @staticmethod
    def _outranks(later: Turn, turn: Turn) -> bool:
        """Returns whether a turn that started later may take memory from one that has started."""
        return later.priority > turn.priority or _tenant(later) != _tenant(turn)

    @staticmethod
    def _is_victim(event: Event) -> bool:
        return (event.kind, event.why) in (("preempt", "preempted"), ("drop", "pressure"))

    @staticmethod
    def _rung(state: TurnState | None) -> int:
        """Ranks victims: closed sessions yield first, then drafts, idle sessions, waiting turns, and running turns
        last."""
        if state is None:
            return 1
        return {TurnState.DRAFTING: 0, TurnState.RUNNING: 3}.get(state, 2)

    def _cheaper_victim(self, event: Event) -> Session | None:
        """Finds a session that kept all its memory, should yield before the victim, and would have freed as much in
        every group."""
        engine, events = self._world.engine, self._world.log.events
        if event.session.state is SessionState.CLOSED:
            return None  # closed sessions yield first
        victim = self._rung(event.state), (event.turn or event.session.policy).priority
        waiting = self._world.waiting()
        for session in engine.registry:
            turn = session.turn
            if any(e.session is session for e in events) or (turn is not None and turn in waiting):
                continue
            if session.policy.pinned and session.memory.turn is None:
                continue
            rung = self._rung(turn.state if turn is not None else None)
            if rung == 0 and session.memory.turn is None:
                rung = 2  # with only a draft's text left, its session's memory yields like a waiting turn's
            rank = rung, (turn or session.policy).priority
            gives = internals.exclusive(session) if session.memory.turn is None else session.memory.turn.own_units()
            planned = turn is not None and turn.number in self._planned
            new = self._room.acquired_at_most if planned else 0  # since the drop
            if rank < victim and all(a - new >= b for a, b in zip(gives, event.freed, strict=True)):
                return session
        return None

    def _better_victim(self, victim: Session) -> Session | None:
        """Finds an idle session that kept its memory, ranks no higher, and would free something in every group. Closed
        sessions yield first, no matter what they share."""
        if victim.state is SessionState.CLOSED:
            return None
        for session in self._world.engine.registry:
            memory = session.memory
            idle = session is not victim and session.turn is None and memory.computed and not session.policy.pinned
            if idle and session.policy.priority <= victim.policy.priority and all(internals.exclusive(session)):
                return session
        return None

    def _check_cache(self) -> None:
        """Checks that checkpoints that only save work hold no more than their share, and are not evicted below it.
        `tests/memory/checkpoints/test_thinning.py` checks their order."""
        world = self._world
        evicted = internals.trimmed(world.engine) - self._trimmed
        if not evicted and not world.looking:
            return
        cached = internals.cached_units(world.engine)
        budget = [int(world.config.checkpoint_share * n) for n in world.config.units]
        if any(n > most for n, most in zip(cached, budget, strict=True)):
            world.found("budget", f"checkpoints that only save work hold {cached} units of {budget}")
        if not evicted:
            return
        each = [
            0
            if g.kind is Kind.FULL
            else 1
            if g.kind is Kind.STATE
            else -(-(g.window - 1) // world.config.page_size) + 1
            for g in world.config.groups
        ]
        room = [pool.free for pool in world.engine.memory.pools]
        kept = all(n + evicted * m <= most for n, m, most in zip(cached, each, budget, strict=True))
        spare = all(4 * n >= most for n, most in zip(room, world.config.units, strict=True))
        if kept and spare:
            world.found("cache", f"{evicted} checkpoints were evicted; {cached} of {budget} are held, {room} free")

    # -- waiting

    def _check_order(self) -> None:
        """Checks that no turn yields to one that does not outrank it, and that none is overtaken for long."""
        world, preempted = self._world, []
        for place, event in enumerate(world.log.events):
            turn = event.turn
            if (event.kind, event.why) in (("preempt", "preempted"), ("pause", "paused")):
                preempted.append(turn)
            elif event.kind == "drop" and event.state in (TurnState.QUEUED, TurnState.PREEMPTED) and event.fitted:
                # the turn it was dropped for
                started = next((e.turn for e in world.log.events[place:] if e.kind == "start"), None)
                if started is turn and event.why == "pressure":
                    world.found("dropped", f"{turn!r} fits, and its own session was dropped for it")
            elif event.kind == "start" and turn is not None and turn.state is not TurnState.DRAFTING:
                for other in preempted:
                    if other is None or other is turn or _tenant(other) != _tenant(turn):
                        continue
                    if other.priority >= turn.priority:
                        world.found("order", f"{other!r} was preempted for {turn!r}, of no higher priority")
                preempted.clear()
                self._overtake(turn)

    def _overtake(self, started: Turn) -> None:
        world = self._world
        if started.number in world.turns:
            ahead = world.turns[started.number]
            ahead.overtaken = 0
            for turn in world.waiting():
                other = world.turns[turn.number]
                earlier = (other.arrival, other.number) < (ahead.arrival, ahead.number)
                if turn.failures or _tenant(turn) != _tenant(started) or not earlier or other.priority < ahead.priority:
                    continue
                other.overtaken += 1
                if other.overtaken > OVERTAKEN and world.steps - world.failed_at > AFTER_FAILURE:
                    world.found("order", f"{turn!r} waits since {other.arrival}; {other.overtaken} later ones started")

    def _check_waiting(self) -> None:
        """Checks that the first turn in the queue soon starts when a row is free and its worst case fits beside the
        running ones."""
        world = self._world
        waiting = world.waiting()
        if not waiting:
            self._first = (0, world.steps)
            return
        if len({_tenant(turn) for turn in (*waiting, *world.engine.batch.running())}) > 1:
            # the next turn depends on how many rows each tenant has: see the story of shares
            self._first = (0, world.steps)
            return
        naive = min((world.turns[t.number] for t in waiting), key=lambda t: t.rank(world.config.aging))
        number, since = self._first
        turn = world.session_of(naive.sid).turn
        waits_for_others = turn is not None and turn.preempted and len(world.engine.batch)  # which may grow before it
        if naive.number != number or turn is None or waits_for_others or not self._room.fits(turn):
            self._first = (naive.number, world.steps)
            return
        patience = STARTS_WITHIN if world.steps - world.failed_at > AFTER_FAILURE else AFTER_FAILURE
        if world.steps - since >= patience:
            world.found("waits", f"{turn!r} fits and has not started for {patience} steps")

    def drafts_are_computed(self) -> None:
        """Checks that, once nothing else is left to do, each tenant's first draft has been computed if there is room
        for it."""
        world = self._world
        if world.waiting() or len(world.engine.batch) or world.steps - world.failed_at < AFTER_FAILURE:
            return
        room, first = self._room.left(), dict[str, tuple[Turn, int]]()
        for session in world.engine.registry:
            turn = session.turn
            if turn is None or turn.state is not TurnState.DRAFTING:
                continue
            memory, tenant, aging = session.memory.turn, _tenant(turn), world.config.aging
            computed = memory.computed if memory is not None else session.memory.computed
            waits = computed < turn.prompt_length - 1
            if waits and (tenant not in first or turn.rank(aging) < first[tenant][0].rank(aging)):
                first[tenant] = turn, computed
        for turn, computed in first.values():
            worst = self._room.worst(turn.prompt_length + 1)
            if all(2 * n + 2 <= have for n, have in zip(worst, room, strict=True)):
                world.found("drafts", f"{turn!r} has {computed} of {turn.prompt_length} tokens computed; {room} free")


def _tenant(turn: Turn) -> str:
    return turn.session.policy.tenant
