"""Who yields when memory is short: cached checkpoints, then what closed sessions have left, drafts, idle sessions,
waiting ones, and running turns last. Nobody yields in vain."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError
from tenuto.base.views import SessionState
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Lease
from tenuto.memory.rows import Longs
from tenuto.sched.batch import Batch
from tenuto.sched.planner import Lacking
from tenuto.session.session import Session, Turn

Masks = tuple[npt.NDArray[np.bool_], ...]
"""For each group, one flag per unit."""


class Rung(IntEnum):
    """Classes of sessions without a running turn; the lowest yields first."""

    PREFIX = 0
    DRAFT = 1
    IDLE = 2
    WAITING = 3


class Pressure:
    """Knows every session that holds memory without a running turn, and takes memory from them when it is short.

    Within a rung the lowest priority yields first, then whoever has been there longest. Sessions that would free
    nothing that is short are passed over; if units are shared so that nobody frees any alone, all who share them yield.
    """

    def __init__(
        self, memory: Memory, batch: Batch, preempt: Callable[[Turn, str], None], drop: Callable[[Session, str], None]
    ) -> None:
        self._memory = memory
        self._batch = batch
        self._preempt = preempt
        self._drop = drop
        self._rungs: dict[tuple[Rung, int], OrderedDict[Session, None]] = {}
        self._places: dict[Session, tuple[Rung, int]] = {}
        self.yielded: Counter[str] = Counter()  # how often each rung yielded

    def note(self, session: Session) -> None:
        """The session's state has changed: find its place."""
        place = self._place(session)
        old = self._places.pop(session, None)
        if old is not None:
            del self._rungs[old][session]
            if not self._rungs[old]:
                del self._rungs[old]
        if place is not None:
            self._places[session] = place
            self._rungs.setdefault(place, OrderedDict())[session] = None

    @staticmethod
    def _place(session: Session) -> tuple[Rung, int] | None:
        turn, memory = session.turn, session.memory
        if session.has_running_turn or (memory.computed == 0 and memory.turn is None):
            return None
        if session.state is SessionState.CLOSED:
            return Rung.PREFIX, 0
        if turn is None:
            return Rung.IDLE, session.policy.priority
        drafted = turn.drafting and memory.turn is not None
        return (Rung.DRAFT if drafted else Rung.WAITING), turn.priority

    # -- what could be freed

    def room_beside(self, kept: Iterable[Turn]) -> Longs:
        """Units of each group that are free once everybody but the turns `kept` and their sessions has yielded, int64
        [groups]. Units that several of them hold are counted once."""
        held = [int(mask.sum()) for mask in self._held_by(kept)]
        return np.array([pool.capacity - n for pool, n in zip(self._memory.pools, held, strict=True)], np.int64)

    def _held_by(self, turns: Iterable[Turn]) -> Masks:
        """The units that these turns and their sessions cannot do without."""
        held = tuple(np.zeros(pool.capacity, np.bool_) for pool in self._memory.pools)
        for turn in turns:
            for group, lease in turn.session.memory.essential_leases():
                held[group][units_of(lease)] = True
        return held

    def reclaimable(self) -> Longs:
        """Units of each group that nobody holds but cached checkpoints, or else but closed sessions, int64 [groups]."""
        found = [self._memory.cache.reclaimable(group) for group in range(len(self._memory.pools))]
        counts = [np.zeros(pool.capacity, np.int32) for pool in self._memory.pools]
        for (rung, _), sessions in self._rungs.items():
            for session in sessions if rung is Rung.PREFIX else ():
                for group, lease in session.memory.essential_leases():
                    counts[group][units_of(lease)] += 1
        for group, (held, pool) in enumerate(zip(counts, self._memory.pools, strict=True)):
            found[group] += int(((held > 0) & (held == np.frombuffer(pool.counts, dtype=np.int32))).sum())
        return np.array(found, np.int64)

    # -- making room

    def relieve(self, needed: Callable[[], Longs], kept: Sequence[Turn], victims: Iterable[Turn]) -> None:
        """Free units until `needed()` of each group are free, or will be when the steps in flight settle. The turns
        `kept` and their sessions keep everything; running turns yield in the order of `victims`. The caller has checked
        with `room_beside` that there is enough."""
        held, spared, running = self._held_by(kept), {turn.session for turn in kept}, iter(victims)
        cache = self._memory.cache
        while short := self._short(needed()):
            evicted = cache.evicted
            if cache.evict_for(short):
                self.yielded["checkpoint"] += cache.evicted - evicted
            elif not (self._drop_one(short, spared) or self._drop_sharing(short, held, spared)):
                victim = next(running, None)
                if victim is None:
                    return
                self.yielded["running"] += 1
                self._preempt(victim, "preempted")

    def make_room(self, lacking: Lacking, *, in_flight: bool) -> bool:
        """Have cached and idle state, then later turns, yield to a running turn that has no room to go on. False if it
        has to wait: either nobody yielded, or the units become free when the steps in flight settle."""
        running = self._batch.running()
        turn, kept = lacking.turn, running[: lacking.place + 1]
        if (lacking.alone > self.room_beside([turn])).any():
            if in_flight:
                return False  # its window may release pages when they settle
            self._preempt(turn, "restart")  # it never fits beside what its session keeps, but does from nothing
            self._drop(turn.session, "restart")
            return True
        if (lacking.needed > self.room_beside(kept)).any():
            return False
        victims = (victim for victim in reversed(running[lacking.place + 1 :]) if victim in self._batch)
        self.relieve(lambda: lacking.needed, kept, victims)
        return bool((lacking.needed <= self._memory.free()).all())

    def unstick(self, suspect: Turn | None) -> bool:
        """No running turn has room and nothing in flight could make any: have one turn yield, `suspect` if failed steps
        singled it out. False if nobody would gain by that: at most one draft runs."""
        running = self._batch.running()
        if suspect is not None or len(running) > 1:
            self._preempt(suspect if suspect is not None else running[-1], "preempted")
        elif running and not running[0].drafting:
            raise InvariantError(f"{running[0].name} runs alone, and does not fit memory")
        else:
            return False
        return True

    def _short(self, needed: Longs) -> list[int]:
        pools = self._memory.pools
        return [g for g, n in enumerate(needed.tolist()) if n > pools[g].free + pools[g].limbo]

    def _droppable(self, spared: set[Session]) -> Iterator[tuple[Rung, Session]]:
        for place in sorted(self._rungs):
            for session in self._rungs[place]:
                if session not in spared:
                    yield place[0], session

    def _drop_one(self, short: Sequence[int], spared: set[Session]) -> bool:
        """Drop the first session that frees a unit of a `short` group."""
        for rung, session in self._droppable(spared):
            if any(session.memory.frees(group) for group in short):
                self._yield(rung, session)
                return True
        return False

    def _drop_sharing(self, short: Sequence[int], held: Masks, spared: set[Session]) -> bool:
        """No session frees a unit by itself: take the first with short units that are not `held`, pick of these the one
        with the fewest leases, and drop those who share it until a unit is free."""
        shared = (self._least_shared(session, short, held) for _, session in self._droppable(spared))
        wanted = next((unit for unit in shared if unit is not None), None)
        if wanted is None:
            return False
        group, page = wanted
        dropped, unused = False, self._unused(short)
        for rung, session in list(self._droppable(spared)):
            while any(at == group and page in lease.units for at, lease in session.memory.essential_leases()):
                self._yield(rung, session)  # its turn's memory first, then its own
                dropped = True
                if self._unused(short) > unused:
                    return True
        return dropped  # if no unit is free yet, cached checkpoints hold them too

    def _least_shared(self, session: Session, short: Sequence[int], held: Masks) -> tuple[int, int] | None:
        """The group and number of a session's unit with the fewest leases, among those in `short` groups that are not
        `held`. `None` if there is none."""
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
        return sum(self._memory.pools[group].free + self._memory.pools[group].limbo for group in groups)

    def _yield(self, rung: Rung, session: Session) -> None:
        self.yielded[rung.name.lower()] += 1
        self._drop(session, "pressure")


def units_of(lease: Lease) -> npt.NDArray[np.int32]:
    """The units of a lease, int32."""
    return np.array(lease.units, np.int32)
