"""Lays out plans by hand for models with any mix of memory groups, in memory that is full of garbage.

Free units are overwritten: pages with large numbers, state slots with NaN. So any read of memory that the sequence
itself did not write shows in its logits.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from tenuto.base.groups import Kind
from tenuto.base.plan import NO_SLOT, InputVectors, PageCopies, Plan, StateMoves, TableChanges
from tenuto.exec.model_executor import ModelExecutor
from tests.exec.driver import columns, ints, logits_of
from tests.exec.spoil import spoil

LOOKAHEAD = 4


class MixedDriver:
    """Rows that grow token by token. Pages are scattered and freed as the window passes them; a state is written where
    it was read, or elsewhere, at random."""

    def __init__(self, executor: ModelExecutor, rows: int, units: int = 60, seed: int = 0) -> None:
        self.executor, self.rng = executor, np.random.default_rng(seed)
        self.size, self.groups = executor.spec.page_size, executor.spec.groups
        executor.prepare((units,) * len(self.groups), rows, lookahead=LOOKAHEAD)
        self.free = [self.rng.permutation(units).tolist() for _ in self.groups]
        self.held: list[dict[int, dict[int, int]]] = [defaultdict(dict) for _ in self.groups]  # row -> entry -> unit
        self.lengths = [0] * rows
        self.kept = [0] * rows  # inputs that the row's next step absorbs
        self.steps = 0
        for group in range(len(self.groups)):
            spoil(executor.forward, group, range(units))

    def _take(self, group: int) -> int:
        return self.free[group].pop()

    def _give_back(self, group: int, row: int, entries: Sequence[int]) -> None:
        units = [self.held[group][row].pop(entry) for entry in entries]
        spoil(self.executor.forward, group, units)
        self.free[group] = [*units, *self.free[group]]

    def release(self, row: int) -> None:
        """Ends the row's sequence."""
        for group in range(len(self.groups)):
            self._give_back(group, row, list(self.held[group][row]))
        self.lengths[row] = self.kept[row] = 0

    def logits(
        self,
        work: Mapping[int, Sequence[int]],
        adapters: Mapping[int, int] | None = None,
        accepted: Mapping[int, int] | None = None,
    ) -> torch.Tensor:
        """Computes tokens of rows; returns the logits after each, float32 [tokens, vocab]. `adapters`: the slots of
        rows with an adapter. `accepted`: rows whose tokens after the first are guesses, at most `LOOKAHEAD`, with the
        number of tokens that become part of the row."""
        accepted = accepted or {}
        plan = self.plan(work, adapters, accepted)
        found = logits_of(self.executor, plan)
        self.end({row: tokens[: accepted.get(row, len(tokens))] for row, tokens in work.items()})
        for row in work:
            self.kept[row] = accepted.get(row, 0)
        return found

    def vectors(self, work: Mapping[int, Sequence[int]], parts: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """Computes tokens of rows; returns the sums of vectors of these `parts`, each (first, count), or the vector
        after each token, float32 [parts or tokens, hidden]."""
        plan = self.plan(work)
        asked = np.array(parts or [(i, 1) for i in range(len(plan.tokens))], np.int32).T
        self.executor.submit(replace(plan, vectors=InputVectors(*map(np.ascontiguousarray, asked))))
        found = self.executor.collect().vectors
        assert found is not None
        self.end(work)
        return torch.from_numpy(found)

    def end(self, work: Mapping[int, Sequence[int]]) -> None:
        """Makes computed tokens part of their rows."""
        for row, tokens in work.items():
            self.lengths[row] += len(tokens)
            self._slide(row)

    def plan(
        self,
        work: Mapping[int, Sequence[int]],
        adapters: Mapping[int, int] | None = None,
        guessed: Collection[int] = (),
    ) -> Plan:
        """Returns the step that computes tokens of rows, with a sample after each. `adapters`: as in `logits`;
        `guessed`: the rows with guesses."""
        starts = [self.lengths[row] for row in work]
        tables, states = [], []
        for group, spec in enumerate(self.groups):
            if spec.kind is Kind.STATE:
                states.append(self._moves(group, list(work), guessed))
                continue
            tables.append(self._grow(group, work))
        self.steps += 1
        counts = [len(tokens) for tokens in work.values()]
        return Plan(
            step=self.steps,
            rows=ints(list(work)),
            starts=ints(starts),
            counts=ints(counts),
            tokens=ints([token for tokens in work.values() for token in tokens]),
            samples=ints(counts),
            tables=tuple(tables),
            copies=(PageCopies(*columns([])),) * len(tables),
            states=tuple(states),
            sampling=(),
            adapters=ints([adapters.get(row, 0) for row in work]) if adapters else None,
        )

    def _grow(self, group: int, work: Mapping[int, Sequence[int]]) -> TableChanges:
        changes = []
        for row, tokens in work.items():
            end = self.lengths[row] + len(tokens)
            for entry in range(-(-self.lengths[row] // self.size), -(-end // self.size)):
                if entry in self.held[group][row]:  # of a rejected guess
                    continue
                self.held[group][row][entry] = self._take(group)
                changes.append((row, entry, self.held[group][row][entry]))
        return TableChanges(*columns(changes))

    def _moves(self, group: int, rows: Sequence[int], guessed: Collection[int]) -> StateMoves:
        """A row's state is entry 0; the slot that it leaves is freed, and overwritten, before the next step."""
        reads, writes = [], []
        for row in rows:
            held = self.held[group][row]
            reads.append(held.get(0, NO_SLOT))
            if 1 in held:
                self._give_back(group, row, [1])
            if 0 not in held:
                held[0] = self._take(group)
            elif self.rng.random() < 0.5:
                held[1], held[0] = held[0], self._take(group)
            writes.append(held[0])
        keeps = [int(row in guessed) for row in rows]
        return StateMoves(ints(reads), ints(writes), ints([self.kept[row] for row in rows]), ints(keeps))

    def _slide(self, row: int) -> None:
        for group, spec in enumerate(self.groups):
            if spec.kind is Kind.SLIDING:
                first = max(0, self.lengths[row] - spec.window + 1) // self.size
                self._give_back(group, row, [entry for entry in self.held[group][row] if entry < first])
