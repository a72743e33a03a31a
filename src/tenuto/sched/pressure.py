"""Who yields when memory is short: cached checkpoints, then drafts, idle sessions, waiting ones, and running turns
last."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tenuto.base.groups import Kind
from tenuto.memory.memory import Memory
from tenuto.sched.batch import Batch
from tenuto.session.session import Session
from tenuto.session.turn import Turn, TurnState

Longs = npt.NDArray[np.int64]


class Rung(IntEnum):
    """Classes of sessions without a running turn, the first to yield first."""

    DRAFT = 0
    IDLE = 1
    WAITING = 2


class Pressure:
    """Knows every session that holds memory and has no running turn, and takes it from them when it is short.

    Within a rung the lowest priority yields first, then whoever has been there longest.
    """

    def __init__(
        self, memory: Memory, batch: Batch, preempt: Callable[[Turn], None], drop: Callable[[Session], None]
    ) -> None:
        self._memory = memory
        self._batch = batch
        self._preempt = preempt
        self._drop = drop
        self._rungs: dict[tuple[Rung, int], OrderedDict[str, Session]] = {}
        self._places: dict[str, tuple[Rung, int]] = {}
        self.yielded: Counter[str] = Counter()  # how often each rung gave way

    def note(self, session: Session) -> None:
        """The session's state has changed: find its place."""
        place = self._place(session)
        old = self._places.pop(session.id, None)
        if old is not None:
            del self._rungs[old][session.id]
            if not self._rungs[old]:
                del self._rungs[old]
        if place is not None:
            self._places[session.id] = place
            self._rungs.setdefault(place, OrderedDict())[session.id] = session

    @staticmethod
    def _place(session: Session) -> tuple[Rung, int] | None:
        turn, memory = session.turn, session.memory
        if session.has_running_turn or (memory.computed == 0 and memory.turn is None):
            return None
        if turn is None:
            return Rung.IDLE, session.policy.priority
        drafted = turn.state is TurnState.DRAFTING and memory.turn is not None
        return (Rung.DRAFT if drafted else Rung.WAITING), turn.priority

    def relieve(self, needed: Longs, *, may_preempt: bool, sparing: Session | None = None) -> bool:
        """Free units until `needed[g]` of each group g are free or will be when the step in flight settles. With
        `may_preempt` running turns yield too, the last first, never the first. False if it could not be done."""
        while True:
            short = np.flatnonzero(
                [n > p.free + p.limbo for n, p in zip(needed.tolist(), self._memory.pools, strict=True)]
            )
            if not len(short):
                return True
            kinds = {self._memory.spec.groups[g].kind for g in short.tolist()}
            if kinds != {Kind.FULL} and self._memory.cache.evict():
                self.yielded["checkpoint"] += 1
            elif not self._drop_one(sparing) and not (may_preempt and self._preempt_last()):
                return False

    def _drop_one(self, sparing: Session | None) -> bool:
        for place in sorted(self._rungs):
            for session in self._rungs[place].values():
                if session is not sparing:
                    self.yielded[place[0].name.lower()] += 1
                    self._drop(session)
                    return True
        return False

    def _preempt_last(self) -> bool:
        victim = self._batch.last()
        if victim is None:
            return False
        self.yielded["running"] += 1
        self._preempt(victim)
        return True

    def preempt_below(self, turn: Turn) -> bool:
        """Make the last running turn yield to a waiting one, if that has higher priority and would run before it."""
        running = self._batch.running()
        if not running or not self._batch.outranks(turn, running[-1]):
            return False
        if running[-1].state is not TurnState.DRAFTING and running[-1].priority >= turn.priority:
            return False
        self._preempt(running[-1])
        return True
