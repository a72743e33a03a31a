"""Which waiting turns may start now."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar, Protocol

import numpy as np

from tenuto.memory.memory import Memory
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.rows import Longs
from tenuto.sched.batch import Batch, is_computed, start_target
from tenuto.sched.pressure import Pressure
from tenuto.sched.queue import WaitingQueue
from tenuto.session.session import Session, Turn

RECONSIDERED_AFTER = 8
"""Steps after which a turn that found no room is considered again, at a cost in proportion to what is in memory."""


class Restoring(Protocol):
    """Knows what can be brought back of sessions that have left the device."""

    def plan(self, turn: Turn) -> int:
        """Where a waiting turn would begin if its session were restored, as it is if the turn starts next; 0:
        nowhere."""
        ...

    def units(self, turn: Turn, *, alone: bool = False) -> Longs:
        """Units of each group to acquire for that; `alone`: when nobody else has any of them in memory."""
        ...


class Admission:
    """Moves turns from the queue into rows while the worst case of their input fits beside the running turns.

    The next turn is the first in the queue of the tenant with the fewest rows for its weight. Others yield to it:
    running turns of the same tenant that it outranks with a higher priority, those of a tenant that even without them
    has as many rows for its weight as the waiting turn's tenant will have, and drafts. Nobody yields to a draft.
    """

    holder_kind: ClassVar[HolderKind] = "admission"
    holder_name = "admission"

    def __init__(
        self,
        memory: Memory,
        batch: Batch,
        queue: WaitingQueue,
        pressure: Pressure,
        start: Callable[[Turn, tuple[Lease, ...]], None],
        pause: Callable[[Turn], None],
        drop: Callable[[Session, str], None],
        share: Callable[[Turn], None],
        restoring: Restoring | None,
    ) -> None:
        self._memory = memory
        self._batch = batch
        self._queue = queue
        self._pressure = pressure
        self._start = start
        self._pause = pause
        self._drop = drop
        self._share = share
        self._restoring = restoring
        self._refused: tuple[int, ...] | None = None  # for what no room could be made, as in `_make_room`
        self._room_for: Turn | None = None  # others have yielded to it; not started since
        self._passes = 0  # over the queue, in total

    def leases(self) -> list[Lease]:
        """Nothing between steps: what a pass reserves and does not use goes back at its end."""
        return []

    def admit(self) -> None:
        """Start waiting turns, in order, until the first that does not fit."""
        self._passes += 1
        blocked = self._pass()
        while blocked is not None and self._make_room(blocked):
            blocked = self._pass()
        self._batch.crowded = blocked is not None and not blocked.drafting

    def _next(self, aside: Collection[Turn]) -> Turn | None:
        """The first in the queue of the tenant that is next. Turns in `aside` are passed over, with all behind them."""
        shares, aging = self._batch.shares, self._queue.aging_seconds
        heads = [turn for turn in self._queue.heads() if turn not in aside]
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(
            heads,
            key=lambda turn: (
                turn.drafting,
                shares.load(turn),  # a tenant without rows comes first, however low its weight
                shares.last_start(turn),
                turn.rank(aging),
            ),
        )

    def _pass(self) -> Turn | None:
        """One pass over the queue with one reservation. Returns the turn that blocks it; a draft that does not fit
        blocks only its tenant's drafts."""
        memory, aside = self._memory, list[Turn]()
        if not len(self._queue):
            return None
        restored = self._restoring is not None
        with memory.reserve(min(len(self._queue), memory.rows.free), self, restored=restored) as reserved:
            while (turn := self._next(aside)) is not None:
                self._share(turn)
                need = self._need(turn)
                available = reserved.available() - self._pledged(turn)
                fits = memory.rows.free > 0 and bool((need <= available).all())
                fits = fits and (turn is self._room_for or self._can_stay(turn, need))
                if not fits and not is_computed(turn):
                    if not turn.drafting:
                        return turn
                    aside.append(turn)
                    continue
                self._queue.remove(turn)
                self._start(turn, reserved.take(need))
                if turn is self._room_for:
                    self._room_for = None
        return aside[0] if aside else None

    # -- making room

    def _make_room(self, turn: Turn) -> bool:
        """Have others yield so that `turn` can start. False if it has to wait; nobody yields in vain."""
        memory, running = self._memory, self._batch.running()
        asked = turn.number, self._batch.departures, turn.session.memory.computed, self._passes // RECONSIDERED_AFTER
        if running and not turn.drafting and self._refused == asked:
            return False  # until a turn leaves its row, or a few steps later: windows and checkpoints are freed
        need = self._need(turn, alone=True)  # those with whom it would share may be the ones who yield
        keeps = turn.session.memory.computed or turn.session.memory.turn is not None
        keeps = keeps or (self._restoring is not None and self._restoring.plan(turn))
        if keeps and (need > self._pressure.room_beside([turn])).any():
            self._drop(turn.session, "restart")  # it never fits beside what it keeps, but does from nothing
            return True
        kept = [other for other in running if not self._may_yield(other, turn)]
        victims = [other for other in reversed(running) if other not in kept]
        if not self._fits_beside(turn, need, kept) or (not memory.rows.free and not victims):
            self._refused = asked
            return False
        if not memory.rows.free:
            self._pause(victims.pop(0))
        self._room_for = turn
        self._pressure.relieve(
            lambda: self._need(turn) + self._pledged(turn, later=not turn.drafting),
            [turn, *kept],
            (victim for victim in victims if victim in self._batch),
            draft=turn.drafting,
        )
        return bool((self._need(turn) + self._pledged(turn) <= memory.free()).all())

    def _fits_beside(self, turn: Turn, need: Longs, kept: list[Turn]) -> bool:
        """Whether there is room for `turn` once everybody but the turns `kept` has yielded; for a draft, once cached
        checkpoints and closed sessions have."""
        if turn.drafting:
            return bool((need + self._pledged(turn) <= self._memory.free() + self._pressure.reclaimable()).all())
        wanted = need + self._pledged(turn, later=True) + self._growth(turn, kept)
        return bool((wanted <= self._pressure.room_beside([turn, *kept])).all())

    def _can_stay(self, turn: Turn, need: Longs) -> bool:
        """Whether a turn that has lost its memory would keep it this time."""
        kept = [other for other in self._batch.running() if not self._may_yield(other, turn)]
        return not self._growth(turn, kept).any() or self._fits_beside(turn, need, kept)

    def _growth(self, turn: Turn, kept: list[Turn]) -> Longs:
        """Units that `turn`, if it was preempted, and the running turns `kept` are expected to need besides, int64
        [groups], if each generates as much again as it has, where it may. So recomputing is worth it."""
        if not turn.preempted or turn.session.memory.turn is not None or not kept:
            return np.zeros(len(self._memory.pools), np.int64)
        turns = (turn, *kept)
        ends = [min(t.length + len(t.output), max(t.length, t.last_position)) for t in turns]
        return self._memory.expected_growth(np.array([t.length for t in turns]), np.array(ends))

    def _may_yield(self, running: Turn, turn: Turn) -> bool:
        """Whether a running turn yields its row and its memory to a waiting one."""
        if turn.drafting:
            return False
        if running.drafting:
            return True
        if running.session.policy.tenant != turn.session.policy.tenant:
            shares = self._batch.shares
            return self._batch.load_before(running) >= shares.next_load(turn)
        aging = self._queue.aging_seconds
        return running.priority < turn.priority and turn.rank(aging) < running.rank(aging)

    # -- what is needed

    def _pledged(self, turn: Turn, *, later: bool = False) -> Longs:
        """An upper bound on the units, int64 [groups], that running turns, except those that would yield to `turn`,
        will still acquire for tokens they know and, with `later`, for those they generate before units released now
        can be used."""
        memory, rows = self._memory, self._memory.rows
        running = [other for other in self._batch.running() if not self._may_yield(other, turn)]
        order = np.array([self._batch.row_of(turn) for turn in running], np.int64)
        ahead = 2 * memory.shape.overlap * rows.samples[order] if later else 0
        ends = np.minimum(rows.expected[order] + ahead, rows.limit[order])
        return memory.pledged(order, ends)

    def _need(self, turn: Turn, *, alone: bool = False) -> Longs:
        """An upper bound on the units to acquire for the tokens it knows, int64 [groups]; `alone`: see `Restoring`."""
        if is_computed(turn):
            return np.zeros(len(self._memory.pools), np.int64)
        end = min(turn.length, max(1, turn.last_position))
        restored = self._restoring.plan(turn) if self._restoring is not None else 0
        need = turn.session.memory.need(start_target(turn), end, generates=turn.generating, restored=restored)
        return need + self._restoring.units(turn, alone=alone) if self._restoring is not None and restored else need
