"""The running turns: their rows, their order, and the changes not yet sent to the executor."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError
from tenuto.base.plan import RowSampling
from tenuto.memory.kinds.group import Growth
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Lease
from tenuto.memory.rows import FAR
from tenuto.memory.turn_memory import TurnMemory
from tenuto.sched.shares import Shares, places
from tenuto.session.turn import Rank, Turn

NO_STOP = -1
"""Pads the rows of `Batch.stop_ids`; no sampled token equals it."""


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """Page table entries and sampling options of rows taken since the last plan."""

    taken: list[Growth]
    sampling: dict[int, RowSampling]
    runs: dict[int, int]  # `Rows.run` of each of these rows


class Batch:
    """Turns that have a row.

    Invariant: `turns[row]` is set exactly for rows taken, and its session's turn memory is attached to that row.
    """

    def __init__(self, memory: Memory, shares: Shares, eos_ids: tuple[int, ...], aging_seconds: float) -> None:
        self.memory = memory
        self.shares = shares
        self.rows = memory.rows
        rows = memory.shape.max_running
        self.turns: npt.NDArray[np.object_] = np.full(rows, None, object)
        self.stop_ids = np.full((rows, max(1, len(eos_ids))), NO_STOP, np.int32)
        self.has_text = np.zeros(rows, np.bool_)
        self.speculates = np.zeros(rows, np.bool_)  # may get guesses
        self.constrained = np.zeros(rows, np.bool_)  # generates with a grammar
        self.adapters = np.zeros(rows, np.int32)  # slots; 0 without an adapter
        self.adapted = 0  # rows with an adapter
        self.scoring: set[int] = set()  # rows with input tokens still to be scored
        self.pooling: set[int] = set()  # rows whose vector is not complete
        self.held: set[int] = set()  # rows that may not compute for now; written by `Sharing`
        self.work = np.zeros(rows, np.int64)  # tokens computed since the row was taken
        self._wanted_marks: dict[Turn, set[int]] = {}  # positions of checkpoints that others want
        self._left: dict[Turn, None] = {}  # turns that left their row while a step was computing them
        self.departures = 0  # turns that have left, in total
        self.crowded = False  # a submitted turn lacks room; written by admission
        self._eos_ids = eos_ids
        self._aging = aging_seconds
        self._ranked: list[tuple[Rank, int]] = []  # (rank, row), sorted
        self._running: list[Turn] = []  # in running order
        self._order = np.zeros(0, np.int64)  # their rows
        self._places: dict[Turn, float] = {}  # the tenant's load up to each turn
        self._stale = False
        self._taken: list[Growth] = []
        self._sampling: dict[int, RowSampling] = {}

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, turn: Turn) -> bool:
        memory = turn.session.memory.turn
        return memory is not None and memory.row >= 0 and self.turns[memory.row] is turn

    def order(self) -> npt.NDArray[np.int64]:
        """Returns the rows in running order, int64 [running]: tenants alternate by weight, ranks decide within a
        tenant, and drafts come last. Read only."""
        if self._stale:
            self._sort()
        return self._order

    def running(self) -> list[Turn]:
        """Returns the turns in running order. Read only."""
        if self._stale:
            self._sort()
        return self._running

    def _sort(self) -> None:
        turns = [self.turns[row] for _, row in self._ranked]
        found = places(turns, self.shares)
        self._places = dict(zip(turns, (load for _, load in found), strict=True))
        order = list(range(len(turns)))
        if not self.shares.single:
            order.sort(key=lambda index: found[index])
        self._running = [turns[index] for index in order]
        self._order = np.array([self._ranked[index][1] for index in order], np.int64)
        self._stale = False

    def load_before(self, turn: Turn) -> float:
        """Returns the load that a running turn's tenant would have if this turn, and its turns after it, yielded."""
        if self._stale:
            self._sort()
        return self._places[turn] - 1 / self.shares.weight(turn)

    def row_of(self, turn: Turn) -> int:
        """Returns the row of a running turn. Raises `InvariantError` if it has no row."""
        memory = turn.session.memory.turn
        if memory is None or memory.row < 0:
            raise InvariantError(f"{turn.name} has no row")
        return memory.row

    def add(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Gives the turn a row and its reserved `slots`, one lease per group; it continues where its memory ends."""
        memory = turn.session.memory.turn
        if memory is None:
            memory = turn.session.memory.begin(turn.name, turn.begins_at, slots)
        elif slots:
            memory.add_slots(slots)
        row = self.rows.take()
        self._taken += memory.attach(row)
        self._fill(row, turn, memory)
        self.turns[row] = turn
        insort(self._ranked, (turn.rank(self._aging), row))
        self.shares.started(turn)
        self._stale = True

    def _fill(self, row: int, turn: Turn, memory: TurnMemory) -> None:
        rows = self.rows
        generates = turn.generating
        rows.known[row] = rows.expected[row] = turn.length
        rows.limit[row] = turn.last_position if generates else max(0, turn.length - 1)
        rows.samples[row] = generates
        rows.next_token[row] = turn.tokens(turn.length - 1, turn.length)[0]
        self.work[row] = 0
        self.has_text[row] = turn.text is not None
        self.constrained[row] = generates and turn.constraint is not None
        stops = (() if turn.params.ignore_eos else self._eos_ids) + turn.params.stop_ids
        if len(stops) > self.stop_ids.shape[1]:
            more = np.full((len(self.stop_ids), len(stops) - self.stop_ids.shape[1]), NO_STOP, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more], axis=1)
        self.stop_ids[row] = NO_STOP
        self.stop_ids[row, : len(stops)] = stops
        self.adapters[row] = turn.adapter
        self.adapted += turn.adapter > 0
        self.speculates[row] = turn.params.speculate
        if turn.params.scores_input and turn.next_scored < turn.prompt_length:
            self.scoring.add(row)
        if turn.pool is not None and not turn.pool.complete:
            self.pooling.add(row)
        if generates:
            self._sampling[row] = row_sampling(turn, stops)
        if self.memory.needs_checkpoints:
            end = turn.resume_position
            if generates and memory.lacks_checkpoint(end):
                memory.mark(end, end_of_input=True)
            rows.mark[row] = self.next_mark(turn, memory.scheduled)

    def next_mark(self, turn: Turn, position: int) -> int:
        """Returns the next mark of the turn after `position`: a position for a checkpoint. Marks are at regular
        intervals of whole pages in its input, where other turns want to resume, and, if the turn generates, at the end
        of its input, where regenerating resumes."""
        end, interval = turn.resume_position, self.memory.shape.checkpoint_interval
        spaced = (position // interval + 1) * interval
        wanted = min((mark for mark in self._wanted_marks.get(turn, ()) if mark > position), default=end)
        if min(spaced, wanted) < end:
            return min(spaced, wanted)
        return end if position < end and turn.generating else int(FAR)

    def mark_at(self, turn: Turn, position: int) -> None:
        """Asks for a further checkpoint of a running turn at `position`, unless the turn has passed it. The checkpoint
        is made only if a unit can be spared."""
        row = self.row_of(turn)
        if position > self.rows.scheduled[row]:
            self._wanted_marks.setdefault(turn, set()).add(position)
            self.rows.mark[row] = min(int(self.rows.mark[row]), position)

    def marks_due(self, scheduled: npt.NDArray[np.int64]) -> None:
        """Makes the checkpoints that are due: those of the rows `scheduled` whose mark the plan being applied reaches
        or passes."""
        rows = self.rows
        for row in scheduled[rows.scheduled[scheduled] >= rows.mark[scheduled]].tolist():
            turn: Turn = self.turns[row]
            memory = turn.session.memory.turn
            if memory is None:
                raise InvariantError(f"{turn.name} runs without memory")
            while rows.mark[row] <= rows.scheduled[row]:
                mark = int(rows.mark[row])
                end_of_input = mark == turn.resume_position and bool(rows.samples[row])
                if end_of_input or (not self.crowded and memory.spare_slot()):
                    memory.mark(mark, end_of_input=end_of_input)
                rows.mark[row] = self.next_mark(turn, mark)

    def remove(self, turn: Turn, row: int) -> None:
        """Removes a turn that has left `row`; its memory is detached or gone."""
        position = bisect_left(self._ranked, (turn.rank(self._aging), row))
        if position == len(self._ranked) or self._ranked[position][1] != row:
            raise InvariantError(f"{turn.name} is not in row {row}, or its rank has changed since")
        del self._ranked[position]
        self.shares.left(turn)
        self._stale = True
        self.turns[row] = None
        self.adapted -= turn.adapter > 0
        self._sampling.pop(row, None)
        self.scoring.discard(row)
        self.pooling.discard(row)
        self.held.discard(row)
        self._wanted_marks.pop(turn, None)
        self._taken = [growth for growth in self._taken if growth.row != row]
        turn.computed_tokens += int(self.work[row])
        if self.rows.scheduled[row] > self.rows.computed[row]:
            self._left[turn] = None
        self.departures += 1

    def take_left(self, step: int) -> list[Turn]:
        """Returns the turns that left their row while `step`, or an earlier step, was computing them, and forgets
        them."""
        waiting = [turn for turn in self._left if _unsettled_step(turn) > 0]
        self._left = {turn: None for turn in waiting if _unsettled_step(turn) > step}
        return [turn for turn in waiting if turn not in self._left]

    def take_updates(self) -> RowUpdates:
        """Returns the changes not yet sent to the executor, for the plan being made."""
        rows = {growth.row for growth in self._taken} | set(self._sampling)
        updates = RowUpdates(self._taken, self._sampling, {row: int(self.rows.run[row]) for row in rows})
        self._taken, self._sampling = [], {}
        return updates

    def return_updates(self, updates: RowUpdates) -> None:
        """Takes back the changes of a plan that is not submitted, so that the next plan sends them for rows still
        taken."""
        same = {row for row, run in updates.runs.items() if self.turns[row] is not None and self.rows.run[row] == run}
        self._taken = [growth for growth in updates.taken if growth.row in same] + self._taken
        self._sampling = {row: sampling for row, sampling in updates.sampling.items() if row in same} | self._sampling


def _unsettled_step(turn: Turn) -> int:
    """Returns the number of the step in flight that was computing for the turn when it left its row, or 0 without
    one."""
    memory = turn.session.memory.turn if turn.session.turn is turn else None
    return memory.unsettled.step if memory is not None and memory.unsettled is not None else 0


def row_sampling(turn: Turn, stops: tuple[int, ...]) -> RowSampling:
    """Returns the sampling options of `turn` from its next token on; `stops`: its stop ids."""
    params, sampling = turn.params, turn.params.sampling
    prompt = output = None
    if sampling.penalised:
        output = np.array(turn.output, np.int32)
    if sampling.repetition_penalty != 1:
        prompt = np.unique(np.array(turn.tokens(0, turn.prompt_length), np.int32))
    masked = stops if len(turn.output) < params.min_new_tokens else ()
    masked_before = turn.prompt_length + params.min_new_tokens
    return RowSampling(sampling, prompt, output, masked, masked_before, params.logprobs, params.logprob_ids)


def continues_from(turn: Turn) -> int:
    """Returns the position from which the turn would compute next. Changes nothing."""
    memory = turn.session.memory
    return memory.turn.scheduled if memory.turn is not None else memory.resumable(turn.begins_at)


def is_computed(turn: Turn) -> bool:
    """Whether a prefill-only turn is fully computed, so that it needs no row and no memory."""
    memory = turn.session.memory.turn
    settled = memory is None or memory.unsettled is None
    return not turn.generates and settled and continues_from(turn) >= turn.last_position
