"""Which waiting turns may start now."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tenuto.base.groups import Kind
from tenuto.memory.memory import Memory, session_units, state_slots
from tenuto.memory.pool import Lease
from tenuto.sched.batch import Batch, start_target
from tenuto.sched.pressure import Pressure
from tenuto.sched.queue import WaitingQueue
from tenuto.session.session import Session
from tenuto.session.turn import Turn, TurnState

Longs = npt.NDArray[np.int64]


class Admission:
    """Moves turns from the queue into rows while the worst case of their input fits beside what runs already."""

    holder_name = "admission"

    def __init__(
        self,
        memory: Memory,
        batch: Batch,
        queue: WaitingQueue,
        pressure: Pressure,
        start: Callable[[Turn, tuple[Lease, ...]], None],
        drop: Callable[[Session], None],
    ) -> None:
        self._memory = memory
        self._batch = batch
        self._queue = queue
        self._pressure = pressure
        self._start = start
        self._drop = drop
        self._refused: tuple[int, int] | None = None  # the first turn, and departures, when room could not be made

    def leases(self) -> list[Lease]:
        """Nothing between steps: what a pass reserves and does not use goes back at its end."""
        return []

    def admit(self) -> None:
        """Start waiting turns, in order, until the first that does not fit."""
        while self._queue.first() is not None:
            blocked = self._pass()
            if blocked is None or not self._make_room(*blocked):
                return

    def _pass(self) -> tuple[Turn, Longs] | None:
        """One pass over the queue with one reservation of state slots. Returns the turn in the way and what it
        needs."""
        memory = self._memory
        most = state_slots(memory.shape, generates=True)
        with memory.reserve_states(min(len(self._queue), memory.rows.free) * most, self) as slots:
            pledged = self._pledged()
            while (turn := self._queue.first()) is not None:
                if not memory.rows.free:
                    return turn, np.zeros(len(memory.pools), np.int64)
                self._make_startable(turn)
                need = self._need(turn)
                available = memory.free() - pledged
                for i, group in enumerate(memory.states):
                    available[group] = len(slots[i])
                if (need > available).any():
                    return turn, need + pledged
                for group in memory.paged:
                    pledged[group] += need[group]
                mine = tuple(
                    s.take(len(s) - int(need[g]), len(s), self) for s, g in zip(slots, memory.states, strict=True)
                )
                self._queue.remove(turn)
                self._start(turn, mine)
        return None

    def _make_room(self, turn: Turn, need: Longs) -> bool:
        """Have others yield so that `turn` can start. False if it has to wait."""
        memory, state = self._memory, (turn.number, self._batch.departures)
        if len(self._batch) and self._refused == state:
            return False  # looked at again when a turn leaves its row: at worst that much later
        while not memory.rows.free or (need > self._reclaimable(turn)).any():
            if self._pressure.preempt_below(turn):
                continue
            kept = turn.session.memory
            if not len(self._batch) and (kept.computed or kept.turn is not None):
                self._drop(turn.session)  # from nothing it fits, or it would have been refused
                return True
            self._refused = state
            return False
        if turn.state is TurnState.DRAFTING and (need > memory.free()).any():
            return False  # nobody yields to a draft
        self._pressure.relieve(need, may_preempt=False, sparing=turn.session)
        return bool((need <= memory.free()).all())

    def _reclaimable(self, turn: Turn) -> Longs:
        """Units of each group that are not held by running turns, their sessions, or the session of `turn`."""
        held = np.zeros(len(self._memory.pools), np.int64)
        for session in [*(t.session for t in self._batch.running()), turn.session]:
            for group in range(len(held)):
                held[group] += session.memory.units(group)
        for running in [*self._batch.running(), turn]:
            memory = running.session.memory.turn
            if memory is not None:
                held += memory.units()
        return np.array([p.capacity for p in self._memory.pools], np.int64) - held

    def _pledged(self) -> Longs:
        """Pages that running turns will still acquire for tokens they know already, an upper bound, int64 [groups]."""
        memory, rows, order = self._memory, self._memory.rows, self._batch.order()
        pledged = np.zeros(len(memory.pools), np.int64)
        ends = np.minimum(rows.expected[order], rows.limit[order])
        for i, group in enumerate(memory.paged):
            if memory.spec.groups[group].kind is Kind.FULL:
                pages = -(-ends // memory.page_size) - rows.capacity[i, order] // memory.page_size
                pledged[group] = int(np.maximum(pages, 0).sum())
        return pledged

    def _need(self, turn: Turn) -> Longs:
        """Units to acquire for the tokens it knows, an upper bound, int64 [groups]."""
        need = np.array(
            self._worst(turn, min(turn.length, max(1, turn.last_position)), generates=turn.generating), np.int64
        )
        if turn.session.memory.turn is not None:
            need -= turn.session.memory.turn.own_units()
        return np.maximum(need, 0)

    def _worst(self, turn: Turn, end: int, *, generates: bool) -> list[int]:
        """The most units a group that the turn holds besides its session while it computes up to `end`."""
        memory = self._memory
        start = turn.session.memory.resumable(start_target(turn))
        worst = memory.turn_units(end, generates=generates)
        for group, spec in enumerate(memory.spec.groups):
            if spec.kind is Kind.FULL:
                worst[group] -= start // memory.page_size
        return worst

    def _make_startable(self, turn: Turn) -> None:
        """If what its session keeps would leave no room for the turn's worst case in the empty pool, drop the session
        to
        its tokens: from nothing it fits, or it would have been refused."""
        while not self._startable(turn):
            self._drop(turn.session)

    def _startable(self, turn: Turn) -> bool:
        memory, kept = self._memory, turn.session.memory
        if not kept.computed and kept.turn is None:
            return True
        start = kept.resumable(start_target(turn))
        worst = self._worst(turn, max(1, turn.last_position), generates=turn.generates)
        for group, (spec, pool) in enumerate(zip(memory.spec.groups, memory.pools, strict=True)):
            other = (
                0 if spec.kind is Kind.FULL or start == kept.computed else session_units(spec, memory.page_size, start)
            )
            if worst[group] + kept.units(group) + other > pool.capacity:
                return False
        return True
