"""All pools of a model, and the questions and changes that concern every group at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.memory.checkpoint import CheckpointCache
from tenuto.memory.full import FullGroup
from tenuto.memory.group import Group, Growth, Moves
from tenuto.memory.pool import Holder, Lease, Pool
from tenuto.memory.rows import Longs, Rows
from tenuto.memory.shape import Shape
from tenuto.memory.sliding import SlidingGroup
from tenuto.memory.state import StateGroup

KINDS: dict[Kind, type[Group]] = {Kind.FULL: FullGroup, Kind.SLIDING: SlidingGroup, Kind.STATE: StateGroup}
"""What each kind of memory is made of."""


def turn_units(group: GroupSpec, page_size: int, shape: Shape, end: int, *, generates: bool) -> int:
    """The most units of a group that a turn holds at once if it starts from nothing and computes `end` tokens."""
    return KINDS[group.kind].turn_units(group, page_size, shape, end, generates=generates)


def session_units(group: GroupSpec, page_size: int, computed: int) -> int:
    """Units of a group that an idle session with `computed` tokens in memory holds, its older checkpoints aside."""
    return KINDS[group.kind].session_units(group, page_size, computed)


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


class Reservation:
    """Units of the groups that are given out when a turn starts, held until turns take them."""

    def __init__(self, groups: Sequence[Group], leases: Sequence[Lease]) -> None:
        self._groups = groups
        self._leases = leases

    def available(self) -> Longs:
        """Units of each group that a turn can have now, int64 [groups]: what is left in here, or what is free."""
        pairs = zip(self._groups, self._leases, strict=True)
        return np.array([len(lease) if group.units_at_start else group.pool.free for group, lease in pairs], np.int64)

    def take(self, need: Longs) -> tuple[Lease, ...]:
        """Of the `need` of a turn what it is given when it starts, a lease a group."""
        firsts = [max(0, len(lease) - n) for lease, n in zip(self._leases, need.tolist(), strict=True)]
        pairs = zip(self._leases, firsts, strict=True)
        return tuple(lease.take(first, len(lease), lease.holder) for lease, first in pairs)


class Memory:
    """The pools of every memory group, the rows of running turns, and the cache of checkpoints."""

    def __init__(self, spec: MemorySpec, units: Sequence[int], shape: Shape) -> None:
        self.spec = spec
        self.shape = shape
        self.page_size = spec.page_size
        names = [f"{g.kind.value}{i}" for i, g in enumerate(spec.groups)]
        self.pools = tuple(Pool(name, n) for name, n in zip(names, units, strict=True))
        self.rows = Rows(shape.max_running)
        self.groups = tuple(
            KINDS[group.kind](i, group, pool, spec.page_size, shape, self.rows)
            for i, (group, pool) in enumerate(zip(spec.groups, self.pools, strict=True))
        )
        self.paged = tuple(i for i, g in enumerate(spec.groups) if g.paged)  # as plans list them
        self.states = tuple(i for i, g in enumerate(spec.groups) if not g.paged)
        self.needs_checkpoints = any(group.needs_checkpoints for group in self.groups)
        self.stands_at_step_ends = any(group.stands_at_step_ends for group in self.groups)
        self.cache = CheckpointCache(self.pools, [int(shape.checkpoint_share * n) for n in units])
        self._refuse_too_small()

    def _refuse_too_small(self) -> None:
        """The longest turn must fit the empty pools."""
        longest = min(self.shape.context_length, self.max_length)
        for group, pool in zip(self.groups, self.pools, strict=True):
            least = group.least_units(longest)
            if pool.capacity < least:
                raise ConfigError(f"{pool.name} has {pool.capacity} units; allowed: at least {least}, for one turn")

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that the empty pools can hold (its last token is never computed)."""
        return min(group.max_length for group in self.groups)

    # -- counting: arrays have an entry a group

    def turn_units(self, end: int, *, generates: bool) -> list[int]:
        """Worst case of a turn that starts from nothing, a group each."""
        return [turn_units(g, self.page_size, self.shape, end, generates=generates) for g in self.spec.groups]

    def needs(self, rows: Longs, ends: Longs) -> npt.NDArray[np.int64]:
        """Units of each group that rows have to acquire to compute up to `ends`, int64 [groups, rows]."""
        needs = np.empty((len(self.groups), len(rows)), np.int64)
        for i, group in enumerate(self.groups):
            needs[i] = group.needs(rows, ends)
        return needs

    def pledged(self, rows: Longs, ends: Longs) -> Longs:
        """Units that running rows will still acquire to compute up to `ends`, an upper bound."""
        return np.array([group.pledged(rows, ends) for group in self.groups], np.int64)

    def expected_growth(self, lengths: Longs, ends: Longs) -> Longs:
        """Units that sequences of `lengths` tokens want besides if they grow to `ends`, as an estimate."""
        return np.array([group.expected_growth(lengths, ends) for group in self.groups], np.int64)

    def free(self) -> Longs:
        """Units that can be acquired now."""
        return np.array([pool.free for pool in self.pools], np.int64)

    @contextmanager
    def reserve(self, turns: int, holder: Holder) -> Iterator[Reservation]:
        """Of every group what so many turns are given when they start, as far as it is free; what they do not take goes
        back at the end."""
        with ExitStack() as stack:
            counts = [turns * group.units_at_start for group in self.groups]
            reserved = [pool.reserve(n, holder) for pool, n in zip(self.pools, counts, strict=True)]
            yield Reservation(self.groups, [stack.enter_context(lease) for lease in reserved])

    # -- steps

    def advance(self, rows: Longs, starts: Longs, grown: Sequence[Growth]) -> Moves:
        """A plan is applied in which `rows` compute from `starts` on, after they have `grown`: every group goes on to
        the units it writes. Returns what the executor has to know."""
        moves = Moves()
        for group in self.groups:
            group.advance(rows, starts, [growth for growth in grown if growth.group == group.index], moves)
        return moves

    def reject(self, row: int, start: int, position: int) -> None:
        """Of the row's last step, which began at `start`, only what is below `position` is accepted: cut every group to
        the highest resumable position at or below it."""
        position = min(group.reject(row, start, position) for group in self.groups)
        self.rows.computed[row] = self.rows.scheduled[row] = position

    def slide(self, rows: Longs, before: Longs) -> None:
        """Rows that had `before` tokens computed have more now: give back what none of them needs any more."""
        for group in self.groups:
            group.slide(rows, before)

    def step_submitted(self) -> None:
        """One more step is in flight: what is released from now on waits in limbo until it has settled."""
        for pool in self.pools:
            pool.step_submitted()

    def step_settled(self) -> None:
        """The oldest step in flight has settled."""
        for pool in self.pools:
            pool.step_settled()

    @property
    def touched(self) -> int:
        """Units whose count was changed, ever."""
        return sum(pool.touched for pool in self.pools)

    def check_totals(self) -> None:
        """The cheap audit of every step."""
        for pool in self.pools:
            pool.check_totals()
