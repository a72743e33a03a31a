"""Yielding under memory pressure: cached checkpoints first, then closed sessions, drafts, idle sessions, waiting turns,
and running turns last."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tenuto.base.clock import Clock
from tenuto.base.errors import InvariantError
from tenuto.base.use_order import UseOrder
from tenuto.base.views import SessionState
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Lease
from tenuto.memory.rows import Longs
from tenuto.sched.batch import Batch
from tenuto.sched.proposal import Lacking
from tenuto.session.session import Session
from tenuto.session.turn import Turn

Masks = tuple[npt.NDArray[np.bool_], ...]
"""For each group, one flag per unit: bool [units]."""


MAX_YIELDS = 128
"""Maximum number of sessions, turns and cached checkpoints that yield in one step; so many take some ten milliseconds.
A turn that needs more room waits for the next step."""


class Yielding(Protocol):
    """Makes turns and sessions yield. See `Lifecycle`."""

    def preempt(self, turn: Turn, why: str = ...) -> None: ...

    def pause(self, turn: Turn) -> None: ...

    def drop(self, session: Session, why: str = ...) -> None: ...

    def withdraw(self) -> bool:
        """Gives up state that comes back before its session's turn; returns whether there was any."""


class Rung(IntEnum):
    """Classes of sessions without a running turn, in the order in which they yield: closed sessions, whose memory
    serves as prefixes, then sessions with a draft, without a turn, and with a waiting turn."""

    PREFIX = 0
    DRAFT = 1
    IDLE = 2
    WAITING = 3


@dataclass(frozen=True, slots=True)
class _Closed:
    """The memory of a closed session: its units, as pairs of group and numbers, and the checkpoint it needs."""

    units: list[tuple[int, npt.NDArray[np.int32]]]
    needed: Checkpoint | None


class Pressure:
    """Tracks all sessions that hold memory without a running turn, and takes memory from them when it is short.

    Within a rung the lowest priority yields first, and at equal priority the session whose state changed longest ago,
    or an idle one that is expected to rest longer than that; see `UseOrder`. Before any of them, but after cached
    checkpoints and closed sessions, state yields that comes back before its session's turn.
    Sessions that would not free a unit of a group that lacks units are skipped. If units are shared so that no session
    alone frees any, all holders of one unit yield. Pinned sessions lose only the memory of their open turns, never
    committed memory.

    Invariant: `_closed` has the memory of every closed session, which does not change until it is dropped;
    `_closed_counts[group]` counts how many of them hold each unit, and `_needed` how many need each checkpoint.
    """

    def __init__(self, memory: Memory, batch: Batch, clock: Clock, yielding: Yielding) -> None:
        self._memory = memory
        self._batch = batch
        self.preempt = yielding.preempt
        self.pause = yielding.pause
        self.drop = yielding.drop
        self._withdraw = yielding.withdraw
        self._clock = clock
        self._rungs: dict[tuple[Rung, int], UseOrder[Session]] = {}
        self._places: dict[Session, tuple[Rung, int]] = {}
        self._pinned: dict[Session, None] = {}  # pinned sessions with committed memory
        self.yielded: Counter[str] = Counter()  # yields by kind: a rung, `checkpoint` or `running`
        self._closed: dict[Session, _Closed] = {}
        self._closed_counts = [np.zeros(pool.capacity, np.int32) for pool in memory.pools]
        self._needed: Counter[Checkpoint] = Counter()
        self.noted: dict[Session, None] | None = None  # since `Watch` last looked; `None` while nobody watches
        self._may_yield = MAX_YIELDS  # yields left in this step
        self.unfinished = False  # a turn has less room than it needs in this step and gets more in the next

    def begin_step(self) -> None:
        """Resets the number of yields left in this step."""
        self._may_yield, self.unfinished = MAX_YIELDS, False

    def note(self, session: Session) -> None:
        """Updates the rung of a session whose state has changed."""
        if self.noted is not None:
            self.noted[session] = None
        place = self._place(session)
        old = self._places.pop(session, None)
        if old is not None:
            self._rungs[old].discard(session)
            if not self._rungs[old]:
                del self._rungs[old]
        if place is not None:
            self._places[session] = place
            expected = session.expected if place[0] is Rung.IDLE else None
            self._rungs.setdefault(place, UseOrder(self._clock.now)).add(session, expected)
        if session.policy.pinned:
            self._pinned.pop(session, None)
            if session.state is not SessionState.CLOSED and session.memory.computed:
                self._pinned[session] = None
        if session not in self._closed and place == (Rung.PREFIX, 0):
            self._count_closed(session)
        elif session in self._closed and place is None:
            self._forget_closed(session)

    def _count_closed(self, session: Session) -> None:
        leases = ((group, lease) for group, table in enumerate(session.memory.tables) for lease in table.leases())
        closed = _Closed([(group, units_of(lease)) for group, lease in leases], session.memory.checkpoints.needed)
        for group, units in closed.units:
            self._closed_counts[group][units] += 1
        if closed.needed is not None:
            self._needed[closed.needed] += 1
        self._closed[session] = closed

    def _forget_closed(self, session: Session) -> None:
        closed = self._closed.pop(session)
        for group, units in closed.units:
            self._closed_counts[group][units] -= 1
        if closed.needed is not None:
            self._needed[closed.needed] -= 1
            if not self._needed[closed.needed]:
                del self._needed[closed.needed]

    @staticmethod
    def _place(session: Session) -> tuple[Rung, int] | None:
        """Returns the rung and priority of a session, or None if it holds no memory or cannot yield."""
        turn, memory = session.turn, session.memory
        if session.has_running_turn or (memory.computed == 0 and memory.turn is None):
            return None
        if session.state is SessionState.CLOSED:
            return Rung.PREFIX, 0
        if session.policy.pinned and memory.turn is None:
            return None
        if turn is None:
            return Rung.IDLE, session.policy.priority
        drafted = turn.drafting and memory.turn is not None
        return (Rung.DRAFT if drafted else Rung.WAITING), turn.priority

    # -- what could be freed

    def room_beside(self, kept: Iterable[Turn]) -> Longs:
        """Returns the units of each group, int64 [groups], that would be free if everything yielded except the turns
        `kept`, their sessions and pinned sessions. Units that several of these hold count once."""
        held = [int(mask.sum()) for mask in self._held_by(kept)]
        return np.array([pool.capacity - n for pool, n in zip(self._memory.pools, held, strict=True)], np.int64)

    def _held_by(self, turns: Iterable[Turn]) -> Masks:
        """Returns the units that `turns` and their sessions must keep, and those of the committed memory of pinned
        sessions."""
        held = tuple(np.zeros(pool.capacity, np.bool_) for pool in self._memory.pools)
        for session in self._pinned:
            for group, lease in session.memory.kept_leases():
                held[group][units_of(lease)] = True
        for turn in turns:
            for group, lease in turn.session.memory.essential_leases():
                held[group][units_of(lease)] = True
        return held

    def reclaimable(self) -> Longs:
        """Returns the units of each group, int64 [groups], that only cached checkpoints and closed sessions hold."""
        return np.array([int(mask.sum()) for mask in self._reclaimable()], np.int64)

    def _reclaimable(self) -> Masks:
        """Returns the units of `reclaimable` as masks. Checkpoints that an open session needs as well do not count."""
        units = [array("i") for _ in self._memory.pools]
        for checkpoint, pins in self._needed.items():
            if checkpoint.pins == pins:
                for listed, part in zip(units, checkpoint.parts, strict=True):
                    if part is not None:
                        listed.extend(part.units)
        masks = []
        for group, (listed, pool) in enumerate(zip(units, self._memory.pools, strict=True)):
            held = self._memory.cache.leases(group) + self._closed_counts[group]
            held += np.bincount(np.frombuffer(listed, np.int32), minlength=pool.capacity)
            masks.append((held > 0) & (held == np.frombuffer(pool.counts, np.int32)))
        return tuple(masks)

    # -- making room

    def relieve(
        self,
        needed: Callable[[], Longs],
        kept: Sequence[Turn],
        victims: Iterable[Turn],
        *,
        draft: bool = False,
        at_once: bool = False,
    ) -> None:
        """Makes sessions and turns yield until `needed()` units of each group are free, now or when the steps in flight
        settle. Stops early after `MAX_YIELDS` in this step, unless the units are needed `at_once`.

        The turns `kept` and their sessions do not yield. Running turns yield in the order of `victims`. For a `draft`
        only cached checkpoints and closed sessions yield. The caller has checked with `room_beside`, or for a draft
        with `reclaimable`, that there is enough."""
        held, spared, running = self._held_by(kept), {turn.session for turn in kept}, iter(victims)
        cache = self._memory.cache
        while short := self._short(needed()):
            if at_once:
                self._may_yield = max(1, self._may_yield)
            if self._may_yield <= 0:
                self.unfinished = True
                return
            evicted = cache.evicted
            if cache.evict_for(short):
                self._count("checkpoint", cache.evicted - evicted)
            elif self._drop_closed(short) or (
                not draft
                and (self._withdraw() or self._drop_one(short, spared) or self._drop_sharing(short, held, spared))
            ):
                continue
            else:
                victim = next(running, None)
                if victim is None:
                    return
                self._count("running")
                self.preempt(victim, "preempted")

    def make_way(self, needed: Callable[[], Longs], rest: float | None) -> bool:
        """Makes room for state that comes back early, `needed()` units of each group: closed sessions and cached
        checkpoints yield and, unless it is `None`, idle sessions that are expected to rest for `rest` seconds. Returns
        whether the units are free now; without enough room, nothing yields."""
        if (needed() > self._room_of(rest)).any():
            return False
        cache = self._memory.cache
        while (short := self._short(needed())) and self._may_yield > 0:
            evicted = cache.evicted
            if cache.evict_for(short):
                self._count("checkpoint", cache.evicted - evicted)
            elif not self._drop_closed(short) and not (rest is not None and self._drop_resting(short, rest)):
                return False
        return bool((needed() <= self._memory.free()).all())

    def _room_of(self, rest: float | None) -> Longs:
        """Returns the units of each group, int64 [groups], that are free, or can be for `make_way`."""
        if rest is None:
            return self._memory.free() + self.reclaimable()
        held = self._held_by(self._batch.running())
        resting = set(self._resting(rest))
        for place, sessions in self._rungs.items():
            for session in sessions if place[0] is not Rung.PREFIX else ():
                for group, lease in session.memory.essential_leases() if session not in resting else ():
                    held[group][units_of(lease)] = True
        return np.array([int((~mask).sum()) for mask in held], np.int64)

    def _resting(self, rest: float) -> Iterator[Session]:
        """Yields the idle sessions that are expected to rest for `rest` seconds, in the order of yielding."""
        for place in sorted(self._rungs):
            yield from self._rungs[place].longest_first(rest) if place[0] is Rung.IDLE else ()

    def _drop_resting(self, short: Sequence[int], rest: float) -> bool:
        """Drops the first session of `_resting` that frees a unit of a `short` group. Returns whether there was one."""
        for session in self._resting(rest):
            if any(session.memory.frees(group) for group in short):
                self._count("idle")
                self.drop(session, "made way")
                return True
        return False

    def make_room(self, lacking: Lacking, *, in_flight: bool) -> bool:
        """Makes cached and idle state, then later running turns, yield to a running turn that lacks room. Returns False
        if the turn must wait: nothing yielded, more yields at the next step, or units become free when the steps in
        flight settle."""
        running = self._batch.running()
        turn, kept = lacking.turn, running[: lacking.place + 1]
        if (lacking.alone > self.room_beside([turn])).any():
            if in_flight:
                return False  # its window may release pages when steps settle
            self.preempt(turn, "restart")  # fits only without the memory its session keeps
            self.drop(turn.session, "restart")
            return True
        if (lacking.needed > self.room_beside(kept)).any():
            return False
        victims = (victim for victim in reversed(running[lacking.place + 1 :]) if victim in self._batch)
        self.relieve(lambda: lacking.needed, kept, victims)
        return bool((lacking.needed <= self._memory.free()).all())

    def unstick(self, lacking: Turn | None) -> bool:
        """Preempts `lacking`, the last turn left out for lack of room, when no running turn can continue and no step in
        flight could change that. Returns False if the turn is a draft that runs alone: then preempting it would not
        help."""
        running = self._batch.running()
        if lacking is None:
            waiting = ", ".join(turn.name for turn in running)
            raise InvariantError(f"no running turn can continue, although none lacks room: {waiting}")
        if len(running) > 1:
            self.preempt(lacking, "preempted")
        elif not lacking.drafting:
            raise InvariantError(f"{lacking.name} runs alone but does not fit memory")
        return len(running) > 1

    def _short(self, needed: Longs) -> list[int]:
        """Returns the groups that lack units, even counting those that steps in flight will free."""
        pools = self._memory.pools
        return [g for g, n in enumerate(needed.tolist()) if n > pools[g].free + pools[g].limbo]

    def _droppable(self, spared: set[Session], last: Rung = Rung.WAITING) -> Iterator[tuple[Rung, Session]]:
        """Yields the sessions up to the rung `last`, except those `spared`, in the order of yielding."""
        for place in sorted(self._rungs):
            for session in self._rungs[place].longest_first() if place[0] <= last else ():
                if session not in spared:
                    yield place[0], session

    def _drop_closed(self, short: Sequence[int]) -> bool:
        """Drops closed sessions until a unit of a `short` group is free: the first session that frees one alone, or
        else all that share one. Returns False if closed sessions cannot free any; only then do open sessions yield."""
        if (Rung.PREFIX, 0) not in self._rungs:
            return False
        if self._drop_one(short, set(), Rung.PREFIX):
            return True
        theirs = self._reclaimable()
        if not any(theirs[group].any() for group in short):
            return False
        return self._drop_sharing(short, tuple(~mask for mask in theirs), set(), Rung.PREFIX)

    def _drop_one(self, short: Sequence[int], spared: set[Session], last: Rung = Rung.WAITING) -> bool:
        """Drops the first session, up to the rung `last`, that frees a unit of a `short` group. Returns whether there
        was one."""
        for rung, session in self._droppable(spared, last):
            if any(session.memory.frees(group) for group in short):
                self._yield(rung, session)
                return True
        return False

    def _drop_sharing(self, short: Sequence[int], held: Masks, spared: set[Session], last: Rung = Rung.WAITING) -> bool:
        """Frees a shared unit when no session up to the rung `last` frees one alone. Takes the first session with a
        unit of a `short` group that is not `held`, chooses such a unit with the fewest leases, and drops holders of it
        until a unit is free. Returns whether any session was dropped."""
        shared = (self._least_shared(session, short, held) for _, session in self._droppable(spared, last))
        wanted = next((unit for unit in shared if unit is not None), None)
        if wanted is None:
            return False
        group, unit = wanted
        dropped, unused = False, self._unused(short)
        for rung, session in list(self._droppable(spared, last)):
            while any(at == group and unit in lease.units for at, lease in session.memory.essential_leases()):
                self._yield(rung, session)  # its turn's memory first, then its own
                dropped = True
                if self._unused(short) > unused or self._may_yield <= 0:
                    return True
        return dropped  # if no unit is free yet, cached checkpoints hold it, too

    def _least_shared(self, session: Session, short: Sequence[int], held: Masks) -> tuple[int, int] | None:
        """Returns group and number of the session's unit with the fewest leases, among units of `short` groups that are
        not `held`. Returns None without such a unit."""
        least: tuple[int, int, int] | None = None
        for group, lease in session.memory.essential_leases():
            units = units_of(lease)
            units = units[~held[group][units]] if group in short else units[:0]
            if len(units):
                counts = self._memory.pools[group].counts
                count, unit = min((counts[unit], unit) for unit in units.tolist())
                found = (count, group, unit)
                least = found if least is None else min(least, found)
        return least[1:] if least is not None else None

    def _unused(self, groups: Sequence[int]) -> int:
        """Returns the number of units of `groups` that are free now or once the steps in flight settle."""
        return sum(self._memory.pools[group].free + self._memory.pools[group].limbo for group in groups)

    def _yield(self, rung: Rung, session: Session) -> None:
        self._count(rung.name.lower())
        self.drop(session, "pressure")

    def _count(self, kind: str, number: int = 1) -> None:
        self.yielded[kind] += number
        self._may_yield -= number


def units_of(lease: Lease) -> npt.NDArray[np.int32]:
    """Returns the units of a lease, int32."""
    return np.array(lease.units, np.int32)
