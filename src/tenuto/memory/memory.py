"""All pools of a model, and the questions and changes that concern every group at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from tenuto.base.config import EngineConfig
from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.memory.checkpoint import CheckpointCache
from tenuto.memory.full import FullTable
from tenuto.memory.paged import pages_for
from tenuto.memory.pool import Holder, Lease, Pool
from tenuto.memory.rows import Rows
from tenuto.memory.sliding import SlidingTable
from tenuto.memory.state import StateTable

Table = FullTable | SlidingTable | StateTable


@dataclass(frozen=True, slots=True)
class Shape:
    """What the worst case of a turn depends on, besides the model.

    `max_step_tokens` is the most tokens one step computes for one turn. `double_buffered`: a step may be planned before
    the outcome of the one before is known (overlap) or compute tokens that are rejected (lookahead), so the state
    before it has to outlive it.
    """

    context_length: int
    max_running: int
    max_step_tokens: int
    overlap: bool
    double_buffered: bool
    checkpoint_interval: int
    checkpoint_share: float

    @staticmethod
    def of(config: EngineConfig, page_size: int) -> Shape:
        """What an engine with this configuration has; checkpoints are spaced by whole pages."""
        return Shape(
            context_length=config.context_length,
            max_running=config.max_running,
            max_step_tokens=config.token_budget,
            overlap=config.overlap > 0,
            double_buffered=config.overlap > 0 or config.lookahead > 0,
            checkpoint_interval=-(-config.checkpoint_interval // page_size) * page_size,
            checkpoint_share=config.checkpoint_share,
        )


def window_pages(group: GroupSpec, page_size: int) -> int:
    """The most pages a window can lie in."""
    return pages_for(group.window - 1, page_size) + 1


def turn_units(group: GroupSpec, page_size: int, shape: Shape, end: int, *, generates: bool) -> int:
    """The most units of a group that a turn holds at once if it starts from nothing and computes `end` tokens."""
    if group.kind is Kind.STATE:
        return state_slots(shape, generates=generates)
    pages = pages_for(end, page_size)
    if group.kind is Kind.FULL:
        return pages
    window = window_pages(group, page_size)
    ahead = pages_for(shape.max_step_tokens * (2 if shape.overlap else 1), page_size) + 1
    return min(pages, 2 * window + ahead)


def state_slots(shape: Shape, *, generates: bool) -> int:
    """Working slots of a turn, and one that stays at the end of its input while it generates."""
    if not generates:
        return 1
    return 3 if shape.double_buffered else 2


def session_units(group: GroupSpec, page_size: int, computed: int) -> int:
    """Units of a group that an idle session with `computed` tokens in memory holds, its checkpoints aside."""
    if group.kind is Kind.STATE:
        return 1
    pages = pages_for(computed, page_size)
    return pages if group.kind is Kind.FULL else min(pages, window_pages(group, page_size))


def units_for_budget(spec: MemorySpec, shape: Shape, budget: int, expected: int) -> tuple[int, ...]:
    """Units of each group that `budget` bytes hold.

    First one turn as long as the context gets its worst case; what is left is divided as sessions of `expected` tokens,
    one turn in `max_running` of them running, would use it. Raises `ConfigError` if not even one turn fits.
    """
    context = shape.context_length
    least = [turn_units(g, spec.page_size, shape, context, generates=True) + 1 for g in spec.groups]
    needed = sum(n * g.bytes_per_unit for n, g in zip(least, spec.groups, strict=True))
    if needed > budget:
        raise ConfigError(
            f"{budget:,} bytes of memory cannot hold one turn of {context:,} tokens; "
            f"allowed: at least {needed:,} bytes, or a shorter context length"
        )
    each = [
        session_units(g, spec.page_size, expected) + turn_units(g, spec.page_size, shape, expected, generates=True)
        for g in spec.groups
    ]
    cost = sum(n * g.bytes_per_unit for n, g in zip(each, spec.groups, strict=True))
    sessions = (budget - needed) / cost
    return tuple(n + int(sessions * more) for n, more in zip(least, each, strict=True))


class Memory:
    """The pools of every memory group, the rows of running turns, and the cache of checkpoints."""

    def __init__(self, spec: MemorySpec, units: Sequence[int], shape: Shape) -> None:
        self.spec = spec
        self.shape = shape
        self.page_size = spec.page_size
        names = [f"{g.kind.value}{i}" for i, g in enumerate(spec.groups)]
        self.pools = tuple(Pool(name, n) for name, n in zip(names, units, strict=True))
        self.paged = tuple(i for i, g in enumerate(spec.groups) if g.paged)
        self.states = tuple(i for i, g in enumerate(spec.groups) if not g.paged)
        self.rows = Rows(shape.max_running, len(self.paged), len(self.states))
        self.cache = CheckpointCache(self.pools, [int(shape.checkpoint_share * n) for n in units])
        self._refuse_too_small()

    def _refuse_too_small(self) -> None:
        """The longest turn must fit the empty pools; a full attention pool shortens what is longest instead."""
        longest = min(self.shape.context_length, self.max_length)
        for group, pool in zip(self.spec.groups, self.pools, strict=True):
            least = (
                1 if group.kind is Kind.FULL else turn_units(group, self.page_size, self.shape, longest, generates=True)
            )
            if pool.capacity < least:
                raise ConfigError(f"{pool.name} has {pool.capacity} units; allowed: at least {least}, for one turn")

    def table(self, group: int, holder: Holder) -> Table:
        """An empty table of the right kind for one sequence."""
        spec, pool = self.spec.groups[group], self.pools[group]
        if spec.kind is Kind.FULL:
            return FullTable(pool, self.page_size, holder)
        if spec.kind is Kind.SLIDING:
            return SlidingTable(pool, self.page_size, spec.window)
        return StateTable(pool)

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that the empty pools can hold (its last token is never computed)."""
        full = [p.capacity for g, p in zip(self.spec.groups, self.pools, strict=True) if g.kind is Kind.FULL]
        return min(full) * self.page_size + 1 if full else 2**40

    def turn_units(self, end: int, *, generates: bool) -> list[int]:
        """Worst case of a turn that starts from nothing, a group each."""
        return [turn_units(g, self.page_size, self.shape, end, generates=generates) for g in self.spec.groups]

    @contextmanager
    def reserve_states(self, slots: int, holder: Holder) -> Iterator[tuple[Lease, ...]]:
        """Up to `slots` state slots of every state group; those not taken out go back at the end."""
        with ExitStack() as stack:
            yield tuple(stack.enter_context(self.pools[g].reserve(slots, holder)) for g in self.states)

    def step_submitted(self) -> None:
        """One more step is in flight: what is released from now on waits in limbo until it has settled."""
        for pool in self.pools:
            pool.step_submitted()

    def step_settled(self) -> None:
        """The oldest step in flight has settled."""
        for pool in self.pools:
            pool.step_settled()

    def free(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Units of each group that can be acquired now, int64 [groups]."""
        return np.array([pool.free for pool in self.pools], np.int64)

    @property
    def touched(self) -> int:
        """Units whose count was changed, ever."""
        return sum(pool.touched for pool in self.pools)

    def check_totals(self) -> None:
        """The cheap audit of every step."""
        for pool in self.pools:
            pool.check_totals()
