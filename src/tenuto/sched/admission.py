"""Which waiting turns may start now."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from tenuto.base.groups import Kind
from tenuto.memory.full import FullTable
from tenuto.memory.memory import Memory, state_slots, turn_units
from tenuto.memory.paged import PagedTable, pages_for
from tenuto.memory.pool import Lease
from tenuto.sched.batch import Batch, is_computed, start_target
from tenuto.sched.pressure import Pressure
from tenuto.sched.queue import WaitingQueue
from tenuto.session.session import Session
from tenuto.session.turn import Turn

Longs = npt.NDArray[np.int64]


class Admission:
    """Moves turns from the queue into rows while the worst case of their input fits beside what runs already.

    The next is the first in the queue of the tenant with the fewest rows by its weight. For it others yield: running
    turns of the same tenant if it has higher priority and outranks them, those of a tenant that even without them has
    as many rows by weight as the waiting turn's will have, and drafts. Nobody yields to a draft.
    """

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
    ) -> None:
        self._memory = memory
        self._batch = batch
        self._queue = queue
        self._pressure = pressure
        self._start = start
        self._pause = pause
        self._drop = drop
        self._refused: tuple[int, ...] | None = None  # what room could not be made for, as in `_make_room`

    def leases(self) -> list[Lease]:
        """Nothing between steps: what a pass reserves and does not use goes back at its end."""
        return []

    def admit(self) -> None:
        """Start waiting turns, in order, until the first that does not fit."""
        blocked = self._pass()
        while blocked is not None and self._make_room(blocked):
            blocked = self._pass()
        self._batch.crowded = blocked is not None and not blocked.drafting

    def _next(self, aside: Collection[Turn]) -> Turn | None:
        """The first in the queue of the tenant whose turn it is; those `aside` are passed over, with all behind
        them."""
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
        """One pass over the queue with one reservation of state slots. Returns the turn in the way. A draft that does
        not fit is in the way of its tenant's drafts alone."""
        memory = self._memory
        if not len(self._queue):
            return None
        most, aside = state_slots(memory.shape, generates=True), list[Turn]()
        with memory.reserve_states(min(len(self._queue), memory.rows.free) * most, self) as slots:
            while (turn := self._next(aside)) is not None:
                need = self._need(turn)
                available = memory.free() - self._pledged(turn)
                for i, group in enumerate(memory.states):
                    available[group] = len(slots[i])
                fits = memory.rows.free and (need <= available).all() and self._can_stay(turn, need)
                if not fits and not is_computed(turn):
                    if not turn.drafting:
                        return turn
                    aside.append(turn)
                    continue
                mine = tuple(
                    s.take(len(s) - int(need[g]), len(s), self) for s, g in zip(slots, memory.states, strict=True)
                )
                self._queue.remove(turn)
                self._start(turn, mine)
        return aside[0] if aside else None

    # -- making room

    def _make_room(self, turn: Turn) -> bool:
        """Have others yield so that `turn` can start. False if it has to wait, and then nobody yields who would have
        done so in vain."""
        memory, running = self._memory, self._batch.running()
        asked = turn.number, self._batch.departures, turn.session.memory.computed
        if running and not turn.drafting and self._refused == asked:
            return False  # looked at again when a turn leaves its row: at worst that much later
        need = self._need(turn)
        keeps = turn.session.memory.computed or turn.session.memory.turn is not None
        if keeps and (need > self._pressure.room_beside([turn])).any():
            self._drop(turn.session, "restart")  # beside what it keeps it would never fit; from nothing it does
            return True
        kept = [other for other in running if not self._may_yield(other, turn)]
        victims = [other for other in reversed(running) if other not in kept]
        if not self._fits_beside(turn, need, kept) or (not memory.rows.free and not victims):
            self._refused = asked
            return False
        if not memory.rows.free:
            self._pause(victims.pop(0))
        self._pressure.relieve(
            lambda: need + self._pledged(turn, later=True),
            [turn, *kept],
            (victim for victim in victims if victim in self._batch),
        )
        return bool((need + self._pledged(turn) <= memory.free()).all())

    def _fits_beside(self, turn: Turn, need: Longs, kept: list[Turn]) -> bool:
        """Whether there is room for `turn` once all have yielded but the turns `kept`; for a draft, once cached
        checkpoints have."""
        if turn.drafting:
            room = self._memory.free() + [self._memory.cache.reclaimable(g) for g in range(len(self._memory.pools))]
            return bool((need + self._pledged(turn) <= room).all())
        wanted = need + self._pledged(turn, later=True) + self._growth(turn, kept)
        return bool((wanted <= self._pressure.room_beside([turn, *kept])).all())

    def _can_stay(self, turn: Turn, need: Longs) -> bool:
        """Whether a turn that has lost its memory once would not soon lose it again."""
        kept = [other for other in self._batch.running() if not self._may_yield(other, turn)]
        return not self._growth(turn, kept).any() or self._fits_beside(turn, need, kept)

    def _growth(self, turn: Turn, kept: list[Turn]) -> Longs:
        """Pages that `turn`, if it was preempted, and the running turns `kept` are expected to want besides, int64
        [groups]: each goes on for as long as it has generated, if it may. So what is computed again is worth it."""
        memory, growth = self._memory, np.zeros(len(self._memory.pools), np.int64)
        if not turn.preempted or turn.session.memory.turn is not None or not kept:
            return growth
        pages = 0
        for other in (turn, *kept):
            end = min(other.length + len(other.output), max(other.length, other.last_position))
            pages += pages_for(end, memory.page_size) - pages_for(other.length, memory.page_size)
        for group in memory.paged:
            if memory.spec.groups[group].kind is Kind.FULL:
                growth[group] = pages
        return growth

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
        """Pages that running turns, except those that would yield to `turn`, will still acquire for tokens they know
        already and, with `later`, for those they generate until what is released now can be used; an upper bound, int64
        [groups]."""
        memory, rows = self._memory, self._memory.rows
        running = [other for other in self._batch.running() if not self._may_yield(other, turn)]
        pledged = np.zeros(len(memory.pools), np.int64)
        order = np.array([self._batch.row_of(turn) for turn in running], np.int64)
        ahead = 2 * memory.shape.overlap * rows.samples[order] if later else 0
        ends = np.minimum(rows.expected[order] + ahead, rows.limit[order])
        for i, group in enumerate(memory.paged):
            pages = np.maximum(-(-ends // memory.page_size) - rows.capacity[i, order] // memory.page_size, 0)
            if memory.spec.groups[group].kind is Kind.FULL:
                pledged[group] = int(pages.sum())
                continue
            for index in np.flatnonzero(pages).tolist():
                turn_memory = running[index].session.memory.turn
                most = turn_units(
                    memory.spec.groups[group], memory.page_size, memory.shape, int(ends[index]), generates=True
                )
                own = turn_memory.own_units()[group] if turn_memory is not None else 0
                pledged[group] += min(int(pages[index]), max(0, most - own))
        return pledged

    def _need(self, turn: Turn) -> Longs:
        """Units to acquire for the tokens it knows, an upper bound, int64 [groups]."""
        memory, kept = self._memory, turn.session.memory
        if is_computed(turn):
            return np.zeros(len(memory.pools), np.int64)
        end = min(turn.length, max(1, turn.last_position))
        start = kept.resumable(start_target(turn))
        need = np.array(memory.turn_units(end, generates=turn.generating), np.int64)
        for group in memory.paged:
            table = kept.tables[group]
            if isinstance(table, PagedTable):
                there = table.entries if kept.turn is not None else self._entries_at(table, start, kept.computed)
                own = kept.turn.own_units()[group] if kept.turn is not None else 0
                need[group] = min(need[group] - own, pages_for(end, memory.page_size) - there)
        if kept.turn is not None:
            need[list(memory.states)] -= np.array(kept.turn.own_units(), np.int64)[list(memory.states)]
        return np.maximum(need, 0)

    @staticmethod
    def _entries_at(table: PagedTable, start: int, computed: int) -> int:
        """Table entries that a turn need not acquire which starts at `start`: the page it lies in is copied if the
        session may not write it in place."""
        in_place = start == computed and isinstance(table, FullTable) and table.writable(start)
        return pages_for(start, table.page_size) if in_place else start // table.page_size
