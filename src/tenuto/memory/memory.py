"""The pools of a model, with the queries and changes that concern all groups at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.memory.checkpoints.cache import CheckpointCache
from tenuto.memory.kinds.full import FullGroup
from tenuto.memory.kinds.group import Group, Growth, MemoryChanges, Table
from tenuto.memory.kinds.sliding import SlidingGroup
from tenuto.memory.kinds.state import StateGroup
from tenuto.memory.lineage import Lineage, Stamp, WeightsVersion
from tenuto.memory.pool import Holder, Lease, Pool
from tenuto.memory.rows import Longs, Rows
from tenuto.memory.shape import Shape

KINDS: dict[Kind, type[Group]] = {Kind.FULL: FullGroup, Kind.SLIDING: SlidingGroup, Kind.STATE: StateGroup}
"""The group class of each kind of memory."""
CHECKPOINTS = 16
"""The number of older checkpoints that a session should have room for. A rewind then replays at most about as many
tokens as it goes back; see `Thinning`."""
ENDLESS = 2**30
"""A length in tokens that no session reaches."""


def turn_units(group: GroupSpec, page_size: int, shape: Shape, end: int, *, generates: bool) -> int:
    """Returns the most units of a group that a turn holds at once if it starts at 0 and computes `end` tokens."""
    return KINDS[group.kind].turn_units(group, page_size, shape, end, generates=generates)


def session_units(group: GroupSpec, page_size: int, computed: int) -> int:
    """Returns the units of a group that an idle session with `computed` tokens in memory holds, without older
    checkpoints."""
    return KINDS[group.kind].session_units(group, page_size, computed)


def checkpoint_units(group: GroupSpec, page_size: int) -> int:
    """Returns the most units of a group that a checkpoint holds."""
    kind = KINDS[group.kind]
    return kind.session_units(group, page_size, ENDLESS) if kind.needs_checkpoints else 0


def kept_checkpoints(spec: MemorySpec, shape: Shape, tokens: int) -> int:
    """Returns the number of older checkpoints that a session of `tokens` tokens should have room for: `CHECKPOINTS`,
    or fewer if they would take more bytes than the session and its turn otherwise use. 0 for a model without
    checkpoints."""
    each = _bytes(spec, (checkpoint_units(g, spec.page_size) for g in spec.groups))
    return min(CHECKPOINTS, _bytes(spec, _units_in_use(spec, shape, tokens)) // each) if each else 0


def _bytes(spec: MemorySpec, units: Iterable[int]) -> int:
    """Returns the size of these numbers of units, one for each group."""
    return sum(n * g.bytes_per_unit for n, g in zip(units, spec.groups, strict=True))


def _units_in_use(spec: MemorySpec, shape: Shape, tokens: int) -> list[int]:
    """Returns the units of each group that a session of `tokens` tokens and its running turn use."""
    return [
        session_units(g, spec.page_size, tokens) + turn_units(g, spec.page_size, shape, tokens, generates=True)
        for g in spec.groups
    ]


def _least_units(spec: MemorySpec, shape: Shape) -> list[int]:
    """Returns the units of each group for one turn as long as the context."""
    return [turn_units(g, spec.page_size, shape, shape.context_length, generates=True) + 1 for g in spec.groups]


def session_bytes(spec: MemorySpec, shape: Shape) -> int:
    """Returns the bytes that a session as long as the context takes, with its turn and its older checkpoints."""
    return _bytes(spec, _with_checkpoints(spec, shape, shape.context_length, _least_units(spec, shape)))


def _with_checkpoints(spec: MemorySpec, shape: Shape, tokens: int, units: Sequence[int]) -> list[int]:
    """Returns `units` of each group plus those of the older checkpoints of a session of `tokens` tokens."""
    kept = kept_checkpoints(spec, shape, tokens)
    return [n + kept * checkpoint_units(g, spec.page_size) for n, g in zip(units, spec.groups, strict=True)]


def kept_bytes(spec: MemorySpec, shape: Shape) -> int:
    """Returns the bytes of the inputs that an executor may keep; see `plan.StateMoves`."""
    return shape.max_running * shape.most_kept * sum(group.bytes_per_input for group in spec.groups)


def units_for_budget(spec: MemorySpec, shape: Shape, budget: int, expected: int) -> tuple[int, ...]:
    """Returns the units of each group that `budget` bytes hold, beside the inputs that are kept.

    One turn as long as the context gets its worst case. The rest is divided in the proportions in which sessions of
    `expected` tokens, their running turns and their older checkpoints would use it. Raises `ConfigError` if not even
    one turn fits.
    """
    context, minimum = shape.context_length, _least_units(spec, shape)
    needed = _bytes(spec, minimum) + kept_bytes(spec, shape)
    if needed > budget:
        raise ConfigError(
            f"{budget:,} bytes of memory cannot hold one turn of {context:,} tokens; "
            f"allowed: at least {needed:,} bytes, or a shorter context length"
        )
    each = _with_checkpoints(spec, shape, expected, _units_in_use(spec, shape, expected))
    sessions = (budget - needed) / _bytes(spec, each)
    return tuple(n + int(sessions * more) for n, more in zip(minimum, each, strict=True))


class Reservation:
    """Units reserved for turns that start; held until these take them."""

    def __init__(self, groups: Sequence[Group], leases: Sequence[Lease]) -> None:
        self._groups = groups
        self._leases = leases

    def available(self) -> Longs:
        """Returns the units of each group that a turn can have now, int64 [groups]: those left in the reservation, or
        for groups that reserve nothing, those that are free."""
        pairs = zip(self._groups, self._leases, strict=True)
        return np.array([len(lease) if group.units_at_start else group.pool.free for group, lease in pairs], np.int64)

    def take(self, need: Longs) -> tuple[Lease, ...]:
        """Takes out the part of a turn's `need` that it is given when it starts, as one lease per group."""
        firsts = [max(0, len(lease) - n) for lease, n in zip(self._leases, need.tolist(), strict=True)]
        pairs = zip(self._leases, firsts, strict=True)
        return tuple(lease.take(first, len(lease), lease.holder) for lease, first in pairs)


class Memory:
    """The pool of each memory group, the rows of running turns, and the cache of checkpoints."""

    def __init__(self, spec: MemorySpec, units: Sequence[int], shape: Shape) -> None:
        self.spec = spec
        self.shape = shape
        self.page_size = spec.page_size
        names = [f"{g.kind.value}{i}" for i, g in enumerate(spec.groups)]
        self.pools = tuple(
            Pool(name, n, spec.page_size if group.paged else 1)
            for name, n, group in zip(names, units, spec.groups, strict=True)
        )
        self.rows = Rows(shape.max_running)
        self.groups = tuple(
            KINDS[group.kind](i, group, pool, spec.page_size, shape, self.rows)
            for i, (group, pool) in enumerate(zip(spec.groups, self.pools, strict=True))
        )
        self.paged = tuple(i for i, g in enumerate(spec.groups) if g.paged)  # in the order of plans
        self.states = tuple(i for i, g in enumerate(spec.groups) if not g.paged)
        self.needs_checkpoints = any(group.needs_checkpoints for group in self.groups)
        self.stands_at_step_ends = any(group.stands_at_step_ends for group in self.groups)
        self.weights = WeightsVersion()  # in use; written by `Occupation`
        self.cache = CheckpointCache(self.pools, [int(shape.checkpoint_share * n) for n in units])
        self._refuse_too_small()

    @property
    def current(self) -> Lineage:
        """The lineage of state that was computed with the weights in use alone."""
        return (Stamp(0, self.weights),)

    def _refuse_too_small(self) -> None:
        """Raises `ConfigError` if the longest turn does not fit the empty pools."""
        longest = min(self.shape.context_length, self.max_length)
        for group, pool in zip(self.groups, self.pools, strict=True):
            minimum = group.min_units(longest)
            if pool.capacity < minimum:
                raise ConfigError(f"{pool.name} has {pool.capacity} units; allowed: at least {minimum}, for one turn")

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that the empty pools can hold; its last token is never computed."""
        return min(group.max_length for group in self.groups)

    # -- counting: arrays have one entry per group

    def turn_units(self, end: int, *, generates: bool) -> list[int]:
        """Returns the units of each group in the worst case of a turn that starts from nothing."""
        return [turn_units(g, self.page_size, self.shape, end, generates=generates) for g in self.spec.groups]

    def needs(self, rows: Longs, ends: Longs) -> npt.NDArray[np.int64]:
        """Returns the units of each group that rows have to acquire to compute up to `ends`, int64 [groups, rows]."""
        needs = np.empty((len(self.groups), len(rows)), np.int64)
        for i, group in enumerate(self.groups):
            needs[i] = group.needs(rows, ends)
        return needs

    def pledged(self, rows: Longs, ends: Longs) -> Longs:
        """Returns an upper bound on the units that running rows will still acquire to compute up to `ends`."""
        return np.array([group.pledged(rows, ends) for group in self.groups], np.int64)

    def expected_growth(self, lengths: Longs, ends: Longs) -> Longs:
        """Returns an estimate of the units that sequences of `lengths` tokens still need to grow to `ends`."""
        return np.array([group.expected_growth(lengths, ends) for group in self.groups], np.int64)

    def free(self) -> Longs:
        """Returns the units of each group that can be acquired now, int64 [groups]."""
        return np.array([pool.free for pool in self.pools], np.int64)

    @contextmanager
    def reserve(self, turns: int, holder: Holder, *, restored: bool = False) -> Iterator[Reservation]:
        """Reserves the units that this many turns are given when they start, as far as they are free; if their sessions
        may be `restored`, also one unit for each session. Units that are not taken go back at the end of the block."""
        with ExitStack() as stack:
            counts = [turns * (n + restored) if (n := group.units_at_start) else 0 for group in self.groups]
            reserved = [pool.reserve(n, holder) for pool, n in zip(self.pools, counts, strict=True)]
            yield Reservation(self.groups, [stack.enter_context(lease) for lease in reserved])

    # -- steps

    def grow(self, growing: Sequence[tuple[Sequence[Table], int]]) -> list[Growth]:
        """Acquires, in one call per group, the units that open turns need; `growing` pairs the tables of each session
        with the position up to which its turn computes."""
        return [
            growth
            for group in self.groups
            for growth in group.grow([(tables[group.index], end) for tables, end in growing])
        ]

    def advance(self, rows: Longs, starts: Longs, uncertain: Longs, grown: Sequence[Growth]) -> MemoryChanges:
        """Applies a plan in which `rows`, having `grown`, compute from `starts` on: every group moves on to the units
        it writes. `uncertain`, int64 [rows]: the number of tokens that a row with guesses computes, 0 for others.
        Returns the changes for the executor."""
        moves, keeps = MemoryChanges(), uncertain > 0
        for group in self.groups:
            group.advance(rows, starts, keeps, [growth for growth in grown if growth.group == group.index], moves)
        if self.states:
            self.rows.kept[rows] = uncertain
        return moves

    def reject(self, row: int, position: int) -> None:
        """Accepts the row's last step, which had guesses, only below `position`. Nothing is computed again: recurrent
        state stands where the step began, and the row's next step absorbs the inputs that were accepted."""
        rows = self.rows
        if self.states:
            rows.kept[row] -= rows.scheduled[row] - position
        rows.computed[row] = rows.scheduled[row] = position

    def slide(self, rows: Longs) -> None:
        """Gives back the units that rows no longer need, now that a step of theirs has settled."""
        for group in self.groups:
            group.slide(rows)

    def step_submitted(self) -> None:
        """Records that one more step is in flight: units released from now on wait in limbo until it has settled."""
        for pool in self.pools:
            pool.step_submitted()

    def step_settled(self) -> None:
        """Records that the oldest step in flight has settled."""
        for pool in self.pools:
            pool.step_settled()

    @property
    def touched(self) -> int:
        """The total number of changes to unit counts."""
        return sum(pool.touched for pool in self.pools)

    def check_totals(self) -> None:
        """Checks the totals of every pool: the cheap audit of every step."""
        for pool in self.pools:
            pool.check_totals()
