"""The witness: an executor without a model, which proves that every turn sees exactly its own history.

It stores in every token slot the token and a running hash of all tokens up to it, and in every state slot the hash and
the position; and in every token slot the weights that computed it, which are part of its hash. Before it computes a
row, it reads the row's whole memory through the page tables and checks that each hash follows from the previous one and
that all groups agree. If the row's history is known, it also checks the tokens: a page that is consistent in itself may
belong to another turn. Kept inputs have a hash as well, and have to lead from the state that absorbs them to the row's
first token.

The next token is a function of the hash and, for turns that are not greedy, of the seed, so that a repetition with
another seed differs. A wrong page, stale slot or double use is detected at the step where it happens, or changes the
output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from tenuto.base.config import EngineOptions
from tenuto.base.errors import InvariantError, ModelError, StepFailed
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.plan import (
    PREVIOUS_SAMPLE,
    AdapterWeights,
    Bytes,
    CopyFailed,
    Ints,
    MemoryPart,
    Plan,
    StepResult,
    Weights,
)
from tenuto.exec.witness_hashes import (
    START,
    Hashes,
    Longs,
    WitnessAdapter,
    WitnessWeights,
    advance_all,
    compare,
    follows,
    mark_of,
    start_of,
    sums_of,
)
from tenuto.exec.witness_inputs import KeptInputs
from tenuto.exec.witness_sampler import WitnessSampler
from tenuto.kernels.ragged import ragged_arange

TOKEN_BITS = 40
"""The number of low bits that a token or position takes beside the weights in a copied slot."""
NEVER = np.int64(-1)
"""Token or position of a slot that was never written."""
LOST = np.int64(-1)
"""Page number in page table entries that were lost in a failed step."""
MAX_IN_FLIGHT = 2
"""Maximum number of steps submitted and not yet collected."""


Stored = tuple[int, Longs, Hashes, Longs, Longs]
"""A group, some of its slots, and their contents: hashes, tokens or positions, and weights."""


@dataclass(slots=True)
class _Step:
    """A step in flight; `result` is None until it is computed. `histories`: see `WitnessExecutor.histories`. `before`:
    the contents it has overwritten. `begins`: the hash of the empty history of each row. `void`: an earlier step
    failed, so this one may read wrong contents."""

    plan: Plan
    begins: Hashes
    histories: Sequence[Ints] | None = None
    result: StepResult | None = None
    before: Sequence[Stored] = ()
    void: bool = False


class WitnessExecutor:
    """An `Executor` that computes hashes.

    Up to two steps are in flight and are computed in order. A step is computed at `submit` unless `late()` is true, its
    masks are not yet known, or an earlier step is still uncomputed; otherwise at `collect`, so that it uses memory as
    late as a step can. Without `verify`, only the slots that the next token depends on are checked, for benchmarks.

    `fail()` decides at every `collect` whether the step fails, and `written()` the fraction of a failed step's writes
    that was done, in order (default 1). Page tables and options of the rows of a failed step, and of the step submitted
    after it, are lost. `wait()` is called at every `collect`, to simulate steps that take time. `copy_fails()` decides
    whether a copy fails.

    With `eager`, pages and state slots that a plan acquires for a sequence are marked as never written at `submit`,
    even if an earlier step is still uncomputed, because a real executor may write them from then on. So a unit that was
    handed out while an unsettled step reads it is detected when that step is computed.

    Of the sampling options it respects masked ids, grammars and, for turns that are not greedy, the seed. Its token has
    probability 1, all others `LEAST_LOGPROB`; input tokens are scored with seed 0. The vector after a token is
    `vectors_of` the hash."""

    def __init__(
        self,
        page_size: int,
        groups: Sequence[GroupSpec],
        vocab_size: int,
        *,
        verify: bool = True,
        fail: Callable[[], bool] = lambda: False,
        late: Callable[[], bool] = lambda: False,
        written: Callable[[], float] | None = None,
        wait: Callable[[], None] = lambda: None,
        eager: bool = False,
        copy_fails: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spec = MemorySpec(page_size, tuple(groups))
        self.layout = "witness"
        self.batch_invariant = True
        self.defaults = EngineOptions()
        self.predicts = False
        self._vocab_size = vocab_size
        self._verify = verify
        self._fail = fail
        self._late = late
        self._written = written
        self._before: list[Stored] = []  # contents that the step being computed overwrites, in order
        self._wait = wait
        self._eager = eager
        self._copy_fails = copy_fails
        self._weights = np.zeros(1, np.int64)  # the mark of the weights in use
        self._adapters: dict[int, np.uint64] = {}  # by slot: what the hash of the empty history is changed by
        self._units: tuple[int, ...] = ()
        self._slots: list[tuple[Hashes, Longs]] = []
        self._flight: deque[_Step] = deque()  # the oldest first
        self._losing: list[_Step] = []  # steps whose rows are lost once all of them are computed
        self._trusting = False  # whether the step being computed is void: its reads are not verified
        self._histories: Sequence[Ints] | None = None  # of the rows of the step being computed
        self.steps = 0

    def prepare(self, units: tuple[int, ...], rows: int, overlap: int = 1, lookahead: int = 0) -> None:  # noqa: ARG002 - it never waits
        self._units = units
        self._allocate(units)
        self._paged = [i for i, g in enumerate(self.spec.groups) if g.paged]
        self._states = [i for i, g in enumerate(self.spec.groups) if not g.paged]
        self._tables = [np.zeros((rows, 64), np.int64) for _ in self._paged]
        self._kept = [KeptInputs(rows, lookahead + 1) for _ in self._states]
        self._sampler = WitnessSampler(self._vocab_size, rows)

    def _allocate(self, units: tuple[int, ...]) -> None:
        size = self.spec.page_size
        self._slots = [  # hash and token of every token slot, or hash and position of every state slot
            (np.zeros(n * (size if g.paged else 1), np.uint64), np.full(n * (size if g.paged else 1), NEVER))
            for g, n in zip(self.spec.groups, units, strict=True)
        ]
        self._computed_with = [np.zeros(len(tokens), np.int64) for _, tokens in self._slots]  # marks

    def release(self, parts: Collection[MemoryPart]) -> None:
        """See `Executor.release`. Releasing weights does nothing."""
        if self._flight:
            raise InvariantError("memory was released with a step in flight")
        if "kv_cache" in parts:
            self._allocate((0,) * len(self._units))

    def load(self, path: str | None) -> WitnessWeights:
        """See `Executor.load`. Every `path` stands for different weights."""
        return WitnessWeights(mark_of(path) if path is not None else int(self._weights[0]))

    def restore(
        self,
        parts: Collection[MemoryPart],
        weights: Weights | None,
        kept: Sequence[Ints] = (),
    ) -> None:
        """See `Executor.restore`. With other weights, all units but those kept become unwritten."""
        if self._flight:
            raise InvariantError("memory was restored with a step in flight")
        if isinstance(weights, WitnessWeights):
            self._weights = np.array([weights.mark], np.int64)
            for group, (_, tokens) in enumerate(self._slots):
                units = tokens.reshape(-1, self._slots_of(group))
                units[np.setdiff1d(np.arange(len(units)), kept[group] if kept else ())] = NEVER
        if "kv_cache" in parts:
            self._allocate(self._units)

    def read_adapter(self, path: str) -> WitnessAdapter:
        """See `Executor.read_adapter`. Every `path` stands for another adapter, and `missing` for none. Raises
        `ModelError`."""
        if path == "missing":
            raise ModelError(f"there is no adapter at {path!r}")
        return WitnessAdapter(start_of(f"adapter {path}"))

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        """See `Executor.set_adapter`. Rows that name an empty slot stop the engine."""
        if adapter is None:
            del self._adapters[slot]
        else:
            self._adapters[slot] = cast("WitnessAdapter", adapter).start

    def _begins(self, plan: Plan) -> Hashes:
        """Returns the hash of the empty history of each row."""
        slots = [0] * len(plan.rows) if plan.adapters is None else plan.adapters.tolist()
        if missing := set(slots) - {0, *self._adapters}:
            raise InvariantError(f"step {plan.step} has rows with the adapters {sorted(missing)}, which are not loaded")
        return np.array([np.uint64(START) ^ self._adapters.get(slot, np.uint64(0)) for slot in slots], np.uint64)

    def submit(self, plan: Plan) -> None:
        if len(self._flight) >= MAX_IN_FLIGHT:
            raise InvariantError(f"a step was submitted while {MAX_IN_FLIGHT} are in flight")
        late = self._late() or not all(masks.allowed.done() for masks in plan.masks)
        step = _Step(plan, self._begins(plan), self.histories(plan) if self._verify else None)
        behind = bool(self._flight) and self._flight[-1].result is None
        if behind and self._eager:
            self._begin_writing(plan, self._flight[-1].plan)
        if not behind and not late:
            self._carry_out(step)
        self._flight.append(step)

    def collect(self) -> StepResult:
        if not self._flight:
            raise InvariantError("a result was collected with no step in flight")
        step = self._flight.popleft()
        self._wait()
        result = step.result
        if result is None:
            result = self._carry_out(step)
        self.steps += 1
        failed = self._fail()
        if failed and not step.void:
            self._take_back(step)
            for later in self._flight:
                later.void = True
            self._losing += [step, *self._flight]
        if all(lost.result is not None for lost in self._losing):
            for lost in self._losing:
                self._lose_rows(lost.plan)
            self._losing.clear()
        if failed:
            raise StepFailed("the witness was told to fail this step")
        return result

    def unit_bytes(self, group: int) -> int:
        """See `Copier.unit_bytes`. Every slot has a hash, and a token or position with the weights in its high bits."""
        return 16 * self._slots_of(group)

    def read_units(self, group: int, units: Ints) -> Bytes:
        """See `Copier.read_units`."""
        if self._copy_fails():
            raise CopyFailed("the witness was told to fail this copy")
        stored = *self._slots[group], self._computed_with[group]
        hashes, tokens, weights = (each.reshape(-1, self._slots_of(group))[units] for each in stored)
        together = np.where(tokens == NEVER, NEVER, tokens | weights << TOKEN_BITS)
        return np.concatenate([part.view(np.uint8) for part in (hashes, together)], axis=1)

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """See `Copier.write_units`."""
        if self._copy_fails():
            raise CopyFailed("the witness was told to fail this copy")
        rows = np.stack(list(data))
        half = rows.shape[1] // 2
        hashes, together = (np.ascontiguousarray(part).view(np.int64) for part in (rows[:, :half], rows[:, half:]))
        never = together == NEVER
        tokens, weights = together & ((1 << TOKEN_BITS) - 1), together >> TOKEN_BITS
        parts = hashes.view(np.uint64), np.where(never, NEVER, tokens), np.where(never, 0, weights)
        for stored, part in zip((*self._slots[group], self._computed_with[group]), parts, strict=True):
            stored.reshape(-1, self._slots_of(group))[units] = part

    def _slots_of(self, group: int) -> int:
        return self.spec.page_size if self.spec.groups[group].paged else 1

    def close(self) -> None:
        """See `Executor.close`. Does nothing."""

    # -- a step

    def _lose_rows(self, plan: Plan) -> None:
        """Forgets page tables and sampling options of a plan's rows."""
        rows = {*plan.rows.tolist(), *(row for row, _ in plan.sampling)}
        rows.update(row for change in plan.tables for row in change.rows.tolist())
        lost = list(rows)
        for table in self._tables:
            table[lost] = LOST
        for kept in self._kept:
            kept.lose(lost)
        self._sampler.lose(lost)

    def _begin_writing(self, plan: Plan, before: Plan) -> None:
        """Marks units that `plan` newly gives to a sequence as never written, while the step of the earlier plan
        `before` is still uncomputed."""
        size = self.spec.page_size
        starts = dict(zip(plan.rows.tolist(), plan.starts.tolist(), strict=True))
        for group, change, copy in zip(self._paged, plan.tables, plan.copies, strict=True):
            tokens = self._slots[group][1].reshape(-1, size)
            for row, index, page in zip(
                change.rows.tolist(), change.index.tolist(), change.pages.tolist(), strict=True
            ):
                if row in starts and index * size >= starts[row]:
                    tokens[page] = NEVER
            tokens[copy.targets] = NEVER
        owners, earlier_owners = self.sequences(plan), self.sequences(before)
        for group, moves, earlier in zip(self._states, plan.states, before.states, strict=True):
            had = {*zip(earlier_owners, earlier.reads.tolist(), strict=True)}
            had |= {*zip(earlier_owners, earlier.writes.tolist(), strict=True)}
            for owner, read, write in zip(owners, moves.reads.tolist(), moves.writes.tolist(), strict=True):
                if write != read and (owner, write) not in had:  # otherwise the sequence had it already
                    self._slots[group][1][write] = NEVER

    def sequences(self, plan: Plan) -> list[int]:
        """Returns a key of the sequence of each row of a plan in flight: by default its row. Tests that know the turns
        override this, because a turn may change its row."""
        return [int(row) for row in plan.rows]

    def histories(self, plan: Plan) -> Sequence[Ints] | None:  # noqa: ARG002 - the witness does not know turns
        """Returns the known leading tokens of each row's sequence, when `plan` is submitted; by default None, for
        unknown. Tests that know the turns override this."""
        return None

    def _carry_out(self, step: _Step) -> StepResult:
        self._before, self._trusting, self._histories = [], step.void, step.histories
        step.result = self._compute(step.plan, step.begins)
        self._trusting, self._histories = False, None
        step.before = self._before
        return step.result

    def _note(self, group: int, slots: Longs) -> None:
        """Records the contents of slots that the step being computed is about to write."""
        if self._written is not None:
            hashes, tokens = self._slots[group]
            self._before.append((group, slots, hashes[slots], tokens[slots], self._computed_with[group][slots]))

    def _take_back(self, step: _Step) -> None:
        """Undoes the writes of a failed step beyond the fraction `written()`."""
        left = sum(len(slots) for _, slots, *_ in step.before)
        left -= int(left * self._written()) if self._written is not None else left
        for group, slots, hashes, tokens, weights in reversed(step.before):
            kept = max(0, len(slots) - left)
            left -= len(slots) - kept
            self._slots[group][0][slots[kept:]] = hashes[kept:]
            self._slots[group][1][slots[kept:]] = tokens[kept:]
            self._computed_with[group][slots[kept:]] = weights[kept:]

    def _compute(self, plan: Plan, begins: Hashes) -> StepResult:
        self._update_tables(plan)
        self._copy_pages(plan)
        self._sampler.set_options(plan.sampling)
        rows, tokens = plan.rows.astype(np.int64), plan.tokens.astype(np.int64)
        by_reference = tokens == PREVIOUS_SAMPLE
        tokens[by_reference] = self._sampler.last[np.repeat(rows, plan.counts)[by_reference]]
        hashes = self._extend(plan, tokens, begins)
        scored = self._sampler.score(plan.scores, hashes) if plan.scores is not None else None
        vectors = sums_of(plan.vectors, hashes) if plan.vectors is not None else None
        stops = plan.counts.cumsum(dtype=np.int64)
        return StepResult(*self._sampler.sample(plan, rows, stops, hashes), scored, vectors)

    def _extend(self, plan: Plan, tokens: Longs, begins: Hashes) -> Hashes:
        """Extends the rows' histories by `tokens`, int64 [tokens], and stores these. Returns the hash after each."""
        rows, starts, counts = (each.astype(np.int64) for each in (plan.rows, plan.starts, plan.counts))
        before = self._read(plan, rows, starts, begins)
        states = before.copy()
        hashes = np.zeros(len(tokens), np.uint64)
        offsets = np.cumsum(counts) - counts
        for step in range(int(counts.max())):  # each row's step-th token
            live = counts > step
            states[live] = advance_all(states[live], tokens[offsets[live] + step], self._weights)
            hashes[offsets[live] + step] = states[live]
        self._write(plan, rows, starts, counts, tokens, hashes, before)
        return hashes

    def _update_tables(self, plan: Plan) -> None:
        for i, change in enumerate(plan.tables):
            if not len(change.rows):
                continue
            table, widest = self._tables[i], int(change.index.max())
            if widest >= table.shape[1]:
                wider = np.zeros((len(table), max(widest + 1, 2 * table.shape[1])), np.int64)
                wider[:, : table.shape[1]] = table
                self._tables[i] = table = wider
            table[change.rows, change.index] = change.pages

    def _copy_pages(self, plan: Plan) -> None:
        size = self.spec.page_size
        for i, copy in enumerate(plan.copies):
            copied = *self._slots[self._paged[i]], self._computed_with[self._paged[i]]
            for source, target, slots in zip(
                copy.sources.tolist(), copy.targets.tolist(), copy.slots.tolist(), strict=True
            ):
                self._note(self._paged[i], np.arange(target * size, target * size + slots))
                for slot in copied:
                    slot[target * size : target * size + slots] = slot[source * size : source * size + slots]

    def _read(self, plan: Plan, rows: Longs, starts: Longs, begins: Hashes) -> Hashes:
        """Returns the hash of each row's history before its first token in this step, read and verified in all
        groups."""
        found = [self._read_pages(i, self.spec.groups[g], rows, starts, begins) for i, g in enumerate(self._paged)]
        for moves, group, kept in zip(plan.states, self._states, self._kept, strict=True):
            stored = self._slots[group]
            found.append(kept.read(stored, moves, rows, starts, begins, self._weights, trusting=self._trusting))
        for other in found[1:]:
            if not self._trusting and (other != found[0]).any():
                raise InvariantError(
                    f"memory groups disagree on the history of rows {rows[other != found[0]].tolist()}"
                )
        return found[0]

    def _read_pages(self, index: int, group: GroupSpec, rows: Longs, starts: Longs, begins: Hashes) -> Hashes:
        """Reads the hashes like `_read`, in one group. Each row reads exactly the pages of its history or window."""
        kind, reach = group.kind.value, group.window - 1 if group.kind is Kind.SLIDING else starts
        first = np.maximum(0, starts - (reach if self._verify else np.minimum(reach, 1)))
        if ((first == starts) & (starts > 0)).any():
            raise InvariantError("a window of one token does not determine the history; use at least two")
        result, reading = begins.copy(), np.flatnonzero(starts > 0)
        if not len(reading):
            return result
        rows, starts, first, begins = rows[reading], starts[reading], first[reading], begins[reading]
        known = [self._histories[i] for i in reading.tolist()] if self._histories is not None else None
        size = self.spec.page_size
        leading = first // size
        counts = (starts - 1) // size + 1 - leading  # pages
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(rows)), counts)
        numbers = ragged_arange(counts) + leading[owner]
        pages = self._tables[index][rows[owner], numbers]
        if (pages == LOST).any():
            raise InvariantError(f"{kind}: a row's page table was lost in a failed step and not sent again")
        stored = *self._slots[self._paged[index]], self._computed_with[self._paged[index]]
        hashes, tokens, weights = (each.reshape(-1, size)[pages] for each in stored)
        if not self._trusting:
            columns = np.arange(size)
            skipped = np.zeros(hashes.shape, bool)  # slots that the row does not read
            skipped[ends - counts] = columns < (first % size)[:, None]
            skipped[ends - 1] |= columns > ((starts - 1) % size)[:, None]
            if ((tokens == NEVER) & ~skipped).any():
                raise InvariantError(f"{kind}: a row reads a slot that was never written")
            if known is not None:
                compare(kind, size, rows, first, starts, known, pages, tokens, ends - counts)
            skipped[ends - counts, first % size] |= first > 0  # a window begins here; the hash before it is not read
            wrong = ~skipped & ~follows(hashes, tokens, weights, numbers == 0, begins[owner[numbers == 0]])
            if wrong.any():
                page, column = np.argwhere(wrong)[0]
                row = owner[page]
                raise InvariantError(
                    f"{kind}: row {rows[row]} computing from {starts[row]} reads a hash at position "
                    f"{numbers[page] * size + column} that does not follow from the position before"
                )
        result[reading] = hashes[ends - 1, (starts - 1) % size]
        return result

    def _write(
        self, plan: Plan, rows: Longs, starts: Longs, counts: Longs, tokens: Longs, hashes: Hashes, before: Hashes
    ) -> None:
        """Writes tokens and `hashes` to pages, the hashes `before` the rows' tokens or after them to state slots, and
        keeps inputs."""
        size = self.spec.page_size
        owner = np.repeat(np.arange(len(rows)), counts)
        positions = ragged_arange(counts) + starts[owner]
        for i, group in enumerate(self._paged):
            pages = self._tables[i][rows[owner], positions // size]
            if (pages == LOST).any():
                raise InvariantError("a row's page table was lost in a failed step, but is used for writing")
            slots = pages * size + positions % size
            if len(np.unique(slots)) != len(slots):
                raise InvariantError(f"{self.spec.groups[group].kind.value}: two rows write the same slot in one step")
            self._note(group, slots)
            stored_hashes, stored_tokens = self._slots[group]
            stored_hashes[slots], stored_tokens[slots] = hashes, tokens
            self._computed_with[group][slots] = self._weights
        after = hashes[counts.cumsum() - 1]
        for moves, group, kept in zip(plan.states, self._states, self._kept, strict=True):
            if len(np.unique(moves.writes)) != len(moves.writes):
                raise InvariantError("two rows write the same state slot in one step")
            self._note(group, moves.writes.astype(np.int64))
            stored_hashes, stored_positions = self._slots[group]
            keeps = moves.keeps > 0
            stored_hashes[moves.writes] = np.where(keeps, before, after)
            stored_positions[moves.writes] = starts + np.where(keeps, 0, counts)
            kept.keep(moves, rows, starts, counts, tokens, hashes)
