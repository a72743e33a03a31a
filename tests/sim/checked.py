"""The simulator's witness: it sees every plan and checks what each is about to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.base.errors import StepFailed
from tenuto.base.plan import Bytes, Ints, Plan, StepResult
from tenuto.exec.witness import WitnessExecutor
from tenuto.exec.witness_hashes import Hashes
from tests.readers import SlotWritten, check_writes, known_histories
from tests.sim import internals
from tests.sim.letters import VOCAB
from tests.sim.slots import Needed

if TYPE_CHECKING:
    from tests.sim.world import World


class CheckedExecutor(WitnessExecutor):
    """A witness that asks its world what may be written, and counts the tokens computed for each turn."""

    def __init__(self, world: World, **options: Any) -> None:
        config = world.config
        super().__init__(config.page_size, config.groups, VOCAB, eager=True, **options)
        self._world = world
        self._needed: Needed | None = None
        # by step in flight: turn number to the position where the step ends for it
        self.members: dict[int, dict[int, int]] = {}
        self.collecting: dict[int, int] = {}
        self.tokens = 0  # total tokens computed

    def submit(self, plan: Plan) -> None:
        world = self._world
        self.members[plan.step] = world.planned(plan)
        self.tokens += int(plan.counts.sum())
        try:
            check_writes(world.engine, plan)
        except SlotWritten as error:
            world.found("writes", str(error))
        super().submit(plan)
        world.copies.go_on()
        world.watch.submitted(self.members[plan.step])

    def histories(self, plan: Plan) -> list[Ints]:
        return known_histories(self._world.engine, plan)

    def sequences(self, plan: Plan) -> list[int]:
        return list(self.members[plan.step])

    def collect(self) -> StepResult:
        world, plan = self._world, self._flight[0].plan
        self.collecting = self.members.pop(plan.step)
        if world.looking:
            for group, units in enumerate(internals.touched_by(self, plan)):
                if wrong := units.intersection(internals.reusable(world.engine, group)):
                    world.found("limbo", f"group {group}: {sorted(wrong)} are free and the step in flight names them")
        world.copies.go_on()
        try:
            world.masks.require(plan.masks)
            result = super().collect()
        except StepFailed:
            world.landed(self.collecting, failed=True)
            raise
        world.landed(self.collecting, failed=False)
        return result

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        world = self._world
        if wrong := set(units.tolist()).intersection(internals.reusable(world.engine, group)):
            world.found("copies", f"group {group}: {sorted(wrong)} are free, and a copy writes them")
        if world.looking:
            self._needed, size = world.needed(), self._slots_of(group)
            slots = (units.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
            self._check(group, slots, "a copy from host memory")
        super().write_units(group, units, data)

    def _compute(self, plan: Plan, begins: Hashes) -> StepResult:
        self._needed = self._world.needed() if self._world.looking else None
        return super()._compute(plan, begins)

    def _check(self, group: int, slots: np.ndarray, what: str) -> None:
        assert self._needed is not None
        if (wrong := self._needed.written(group, slots)) is not None:
            self._world.found("writes", f"group {group}: {what} writes {wrong}")

    def _copy_pages(self, plan: Plan) -> None:
        if self._needed is not None:
            size = self.spec.page_size
            for group, copy in zip(self._paged, plan.copies, strict=True):
                if len(copy.targets):
                    slots = (copy.targets.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
                    self._check(group, slots, f"a copy of step {plan.step}")
        super()._copy_pages(plan)

    def _write(self, plan: Plan, rows, starts, counts, *rest) -> None:
        if self._needed is not None:
            size, owner = self.spec.page_size, np.repeat(np.arange(len(rows)), counts)
            positions = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[owner]
            for i, group in enumerate(self._paged):
                slots = self._tables[i][rows[owner], positions // size] * size + positions % size
                self._check(group, slots, f"step {plan.step}")
            for moves, group in zip(plan.states, self._states, strict=True):
                self._check(group, moves.writes.astype(np.int64), f"step {plan.step}")
        super()._write(plan, rows, starts, counts, *rest)
