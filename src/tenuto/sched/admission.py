"""Admission: starts waiting turns that fit, and makes room for the next one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Protocol

import numpy as np

from tenuto.memory.memory import Memory
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.rows import Longs
from tenuto.sched.batch import Batch, is_computed
from tenuto.sched.pressure import Pressure
from tenuto.sched.queue import WaitingQueue
from tenuto.session.turn import Turn

RECONSIDERED_AFTER = 8
"""Number of calls of `admit` after which a turn that found no room is considered again. Considering it takes time
proportional to the memory in use."""


class Restoring(Protocol):
    """Plans the restoration of sessions whose state has left the device."""

    @property
    def possible(self) -> bool:
        """Whether sessions can be restored at all."""

    def plan(self, turn: Turn) -> int:
        """Returns the position from which a waiting turn would compute if its session were restored first; 0 if nothing
        can be restored."""

    def units(self, turn: Turn, *, alone: bool = False) -> Longs:
        """Returns the units of each group, int64 [groups], that restoring acquires. With `alone` it counts them as if
        no other holder had any of them in memory."""


class Admission:
    """Moves turns from the queue into rows while the most memory that their input can take fits beside the running
    turns.

    The next turn is the first in the queue of the tenant with the lowest load (rows divided by weight). Drafts yield to
    it, and so do running turns of the same tenant with lower priority and rank. A running turn of another tenant yields
    if that tenant's load without it is still at least the load that the waiting turn's tenant would have with one more
    row. No turn yields to a draft.
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
        share: Callable[[Turn], None],
        restoring: Restoring,
    ) -> None:
        self._memory = memory
        self._batch = batch
        self._queue = queue
        self._pressure = pressure
        self._start = start
        self._share = share
        self._restoring = restoring
        self._refused: tuple[int, ...] | None = None  # key of the turn that got no room; see `_make_room`
        self._room_for: Turn | None = None  # a turn that others have yielded to and that has not started since
        self._passes = 0  # calls of `admit`

    def leases(self) -> list[Lease]:
        """Returns an empty list, for the auditor: reservations do not outlast a pass."""
        return []

    def admit(self) -> None:
        """Starts waiting turns, in order, until one does not fit."""
        self._passes += 1
        blocked = self._pass()
        while blocked is not None and self._make_room(blocked):
            blocked = self._pass()
        self._batch.crowded = blocked is not None and not blocked.drafting

    def _next(self, aside: Collection[Turn]) -> Turn | None:
        """Returns the first turn of the tenant with the lowest load. Skips turns in `aside`, and all turns queued
        behind them."""
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
        """Starts turns in one pass over the queue, from one reservation of units. Returns the first turn that does not
        fit, if any. A draft that does not fit blocks only its own tenant's drafts."""
        memory, aside = self._memory, list[Turn]()
        if not len(self._queue):
            return None
        with memory.reserve(
            min(len(self._queue), memory.rows.free), self, restored=self._restoring.possible
        ) as reserved:
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
        """Makes other turns and sessions yield so that `turn` can start. If it would have to wait anyway, makes none
        yield. Returns whether to try again to start it."""
        memory, running = self._memory, self._batch.running()
        asked = turn.number, self._batch.departures, turn.session.memory.computed, self._passes // RECONSIDERED_AFTER
        if running and not turn.drafting and self._refused == asked:
            return False  # until a turn leaves its row, or for a few passes: windows and checkpoints get freed
        need = self._need(turn, alone=True)  # holders it would share with may be those that yield
        keeps = turn.session.memory.computed or turn.session.memory.turn is not None
        keeps = keeps or self._restoring.plan(turn)
        if keeps and (need > self._pressure.room_beside([turn])).any():
            self._pressure.drop(turn.session, "restart")  # fits only without the memory it keeps
            return True
        kept = [other for other in running if not self._may_yield(other, turn)]
        victims = [other for other in reversed(running) if other not in kept]
        if not self._fits_beside(turn, need, kept) or (not memory.rows.free and not victims):
            self._refused = asked
            return False
        if not memory.rows.free:
            self._pressure.pause(victims.pop(0))
        self._room_for = turn
        self._pressure.relieve(
            lambda: self._need(turn) + self._pledged(turn, later=not turn.drafting),
            [turn, *kept],
            (victim for victim in victims if victim in self._batch),
            draft=turn.drafting,
        )
        return bool((self._need(turn) + self._pledged(turn) <= memory.free()).all())

    def _fits_beside(self, turn: Turn, need: Longs, kept: list[Turn]) -> bool:
        """Whether `turn` would have room if all turns and sessions except the turns `kept` yielded; if it is a draft,
        if cached checkpoints and closed sessions yielded."""
        if turn.drafting:
            return bool((need + self._pledged(turn) <= self._memory.free() + self._pressure.reclaimable()).all())
        wanted = need + self._pledged(turn, later=True) + self._growth(turn, kept)
        return bool((wanted <= self._pressure.room_beside([turn, *kept])).all())

    def _can_stay(self, turn: Turn, need: Longs) -> bool:
        """Whether a turn that has lost its memory to preemption would probably keep it this time."""
        kept = [other for other in self._batch.running() if not self._may_yield(other, turn)]
        return not self._growth(turn, kept).any() or self._fits_beside(turn, need, kept)

    def _growth(self, turn: Turn, kept: list[Turn]) -> Longs:
        """Returns the further units, int64 [groups], that a preempted `turn` and the running turns `kept` are expected
        to need, if each generates as many tokens again as it has (up to its limit). A turn that restarts without this
        room would probably be preempted again."""
        if not turn.preempted or turn.session.memory.turn is not None or not kept:
            return np.zeros(len(self._memory.pools), np.int64)
        turns = (turn, *kept)
        ends = [min(t.length + len(t.output), max(t.length, t.last_position)) for t in turns]
        return self._memory.expected_growth(np.array([t.length for t in turns]), np.array(ends))

    def _may_yield(self, running: Turn, turn: Turn) -> bool:
        """Whether the turn `running` yields its row and memory to the waiting `turn`."""
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
        """Returns an upper bound on the units, int64 [groups], that running turns will still acquire for known tokens
        and, with `later`, for tokens that they generate until the steps in flight settle, when units released now
        become free. Turns that would yield to `turn` do not count."""
        return self.pledged([other for other in self._batch.running() if not self._may_yield(other, turn)], later=later)

    def pledged(self, running: Sequence[Turn], *, later: bool) -> Longs:
        """Returns what `_pledged` does, for these running turns."""
        memory, rows = self._memory, self._memory.rows
        order = np.array([self._batch.row_of(turn) for turn in running], np.int64)
        ahead = 2 * memory.shape.overlap * rows.samples[order] if later else 0
        ends = np.minimum(rows.expected[order] + ahead, rows.limit[order])
        return memory.pledged(order, ends)

    def _need(self, turn: Turn, *, alone: bool = False) -> Longs:
        """Returns an upper bound on the units, int64 [groups], to acquire for the turn's input and output so far;
        `alone`: see `Restoring.units`."""
        if is_computed(turn):
            return np.zeros(len(self._memory.pools), np.int64)
        end = min(turn.length, max(1, turn.last_position))
        restored = self._restoring.plan(turn)
        need = turn.session.memory.need(turn.begins_at, end, generates=turn.generating, restored=restored)
        return need + self._restoring.units(turn, alone=alone) if restored else need
