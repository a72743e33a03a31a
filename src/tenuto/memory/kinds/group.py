"""The interface of every kind of memory: a group covers all running rows at once, a table one sequence. A kind is a
file with both, and an entry in `memory.KINDS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError
from tenuto.base.groups import GroupSpec
from tenuto.base.plan import PageCopies, StateMoves, TableChanges
from tenuto.memory.pool import Holder, Lease, Pool
from tenuto.memory.rows import Longs, Rows
from tenuto.memory.shape import Shape

Mask = npt.NDArray[np.bool_]

UNLIMITED = 2**40
"""Tokens: longer than any sequence."""
NOWHERE = -1
"""No position."""


@dataclass(frozen=True, slots=True)
class Growth:
    """New pages of a row in group number `group`: table entries [index, index + len(pages)), and the copy needed before
    the first is used: the first `copy_slots` slots of page `copy_from` go to `pages[0]` (`NO_PAGE`: no copy)."""

    group: int
    row: int
    index: int
    pages: array[int]
    copy_from: int
    copy_slots: int


@dataclass(slots=True)
class MemoryChanges:
    """What a step does to memory, in the form of `Plan`: each group adds to `tables` and `copies`, or to `states`.
    `left`: rows that stood at a checkpoint and write elsewhere from now on."""

    tables: list[TableChanges] = field(default_factory=list)
    copies: list[PageCopies] = field(default_factory=list)
    states: list[StateMoves] = field(default_factory=list)
    left: dict[int, None] = field(default_factory=dict)


class Group(ABC):
    """One memory group of the model: its pool, and what it knows of the running turns, by row.

    Arrays over rows are int64 [rows] unless they say otherwise.
    """

    needs_checkpoints: ClassVar[bool] = True
    """Whether some positions are resumable only where there is a checkpoint."""
    stands_at_step_ends: ClassVar[bool] = False
    """Whether a checkpoint can be made only where a step ends."""

    def __init__(self, index: int, spec: GroupSpec, pool: Pool, page_size: int, shape: Shape, rows: Rows) -> None:
        self.index = index  # in the memory spec
        self.spec = spec
        self.pool = pool
        self.page_size = page_size
        self.shape = shape
        self.rows = rows
        self.running: dict[int, Table] = {}  # by row; written by the tables

    @abstractmethod
    def table(self, holder: Holder) -> Table:
        """An empty table for one sequence; `holder` holds what its session keeps."""

    # -- counting

    @staticmethod
    @abstractmethod
    def turn_units(spec: GroupSpec, page_size: int, shape: Shape, end: int, *, generates: bool) -> int:
        """The most units that a turn holds at once if it starts from nothing and computes `end` tokens."""

    @staticmethod
    @abstractmethod
    def session_units(spec: GroupSpec, page_size: int, computed: int) -> int:
        """Units that an idle session with `computed` tokens in memory holds, not counting older checkpoints."""

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that the empty pool can hold."""
        return UNLIMITED

    def min_units(self, longest: int) -> int:
        """The smallest allowed pool if the longest sequence has `longest` tokens."""
        return self.turn_units(self.spec, self.page_size, self.shape, longest, generates=True)

    @property
    def units_at_start(self) -> int:
        """The most units that a turn is given when it starts; 0: it acquires units as it grows."""
        return 0

    def needs(self, rows: Longs, ends: Longs) -> Longs | int:
        """Units that rows have to acquire to compute up to `ends`."""
        return 0

    def pledged(self, rows: Longs, ends: Longs) -> int:
        """Units that running rows will still acquire to compute up to `ends`, an upper bound."""
        return 0

    def expected_growth(self, lengths: Longs, ends: Longs) -> int:
        """An estimate of the units that sequences of `lengths` tokens still need to grow to `ends`."""
        return 0

    # -- steps

    def grow(self, growing: Sequence[tuple[Table, int]]) -> list[Growth]:
        """Acquire, in one go, what the open turns of tables need to compute up to an end each. The caller has checked
        that there is room."""
        lacking = [(table, count) for table, end in growing if (count := table.lacking(end))]
        if lacking and not self.pool.grow([(table.opened, count) for table, count in lacking]):
            raise InvariantError(f"{self.pool.name}: a plan was applied without room for it")
        return [table.grown(count) for table, count in lacking]

    @abstractmethod
    def advance(self, rows: Longs, starts: Longs, grown: Sequence[Growth], moves: MemoryChanges) -> None:
        """Apply a plan in which `rows`, having `grown`, compute from `starts` on: move on to the units they write, and
        add to `moves` what the executor has to know."""

    def can_reject(self, rows: Longs) -> Mask | bool:
        """Which rows could return to their present position if the next step were rejected."""
        return True

    def reject(self, row: int, start: int, position: int) -> int:
        """Accept the row's last step, which began at `start`, only below `position`. Returns where the row stands then:
        the highest resumable position at or below `position`."""
        return position

    def write_elsewhere(self, row: int) -> None:
        """A checkpoint was just made where the row stands, so its next step must not write there."""
        return

    def slide(self, rows: Longs, before: Longs) -> None:
        """More than `before` tokens of the rows are computed now: give back what they no longer need."""
        return


class Table(ABC):
    """One sequence's part of a group: what its session keeps besides checkpoints, and what its open turn holds.

    A checkpoint's part is its lease on units of this group, or `None`.

    Invariant: `own` is set while a turn is open, and `row` is 0 or more while that turn has a row.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.pool = group.pool
        self.own: Lease | None = None  # units that the open turn has acquired; held by it
        self.row = -1  # written by `attach` and `leave`

    # -- what the session keeps

    def leases(self) -> Iterator[Lease]:
        """What the session holds besides its checkpoints."""
        return iter(())

    def frees(self) -> bool:
        """Whether giving up those leases frees a unit."""
        return False

    def own_frees(self) -> bool:
        """Whether giving up what the open turn has acquired frees a unit; may be wrongly true."""
        return self.own is not None and len(self.own) > 0

    @abstractmethod
    def kept(self, part: Lease | None) -> Lease:
        """What the session keeps of its last position, where a checkpoint with `part` stands."""

    @abstractmethod
    def kept_ranges(self, position: int) -> Iterator[tuple[int, int]]:
        """Which tokens each unit that is kept of `position` holds the state of, in order: those from the first number
        on, up to the second. The two are equal where a unit holds the state after that many tokens."""

    @abstractmethod
    def kept_units(self, position: int) -> int:
        """How many units are kept of `position`."""

    @abstractmethod
    def receive(self, units: Lease, holder: Holder) -> Lease | None:
        """The session, which has nothing, gets the units of a position. Those that the checkpoint `holder` there has to
        hold are returned, held by it."""

    def covers(self, at: int, position: int) -> bool:
        """Whether a checkpoint at `at` is enough to resume at the earlier `position`."""
        return False

    def share_part(self, part: Lease, at: int, position: int, holder: Holder) -> Lease:
        """A share of `part`, of a checkpoint at `at`, for `holder`, one at the covered `position`."""
        raise InvariantError(f"{self.pool.name}: what is kept at {at} does not cover {position}")

    @abstractmethod
    def fork(self, child: Self, position: int, part: Lease | None) -> None:
        """Share everything below `position`, where a checkpoint with `part` stands, with the fresh table `child`."""

    @abstractmethod
    def fork_turn(self, child: Self, position: int, part: Lease | None) -> None:
        """As `fork`, at a settled `position` of the open turn, past where it began and within its input."""

    @abstractmethod
    def truncate(self, position: int, part: Lease | None) -> None:
        """Cut the session to `position`, where a checkpoint with `part` stands."""

    def check_floors(self, position: int, part: Lease | None) -> None:
        """For the audit: raises `InvariantError` if another sequence may write slots that this session reads. The
        session ends at `position`, where a checkpoint with `part` stands."""
        return

    # -- admission

    @abstractmethod
    def need(self, worst_case: int, held: int, start: int, end: int, *, at_end: bool) -> int:
        """Units to acquire to compute up to `end`, an upper bound: for the open turn, which holds `held`, or else for
        one that starts at `start` (`at_end`: where the session's memory ends). `worst_case`: from nothing."""

    def counted(self, kept: Lease | None) -> int:
        """How many of the units that admission counted for it the open turn holds; `kept`: the part of the checkpoint
        at the end of its input."""
        return len(self.opened)

    # -- the open turn

    @property
    def opened(self) -> Lease:
        """The open turn's own units."""
        if self.own is None:
            raise InvariantError(f"{self.pool.name}: no turn is open on this table")
        return self.own

    @property
    def has_grown(self) -> bool:
        """Whether the open turn has acquired units, besides those it was given to start with."""
        return False

    def take_up(self, units: Lease) -> None:
        """A turn opens and is given `units` to start with."""
        if self.own is not None:
            name = units.holder.holder_name
            raise InvariantError(f"{self.pool.name}: {name} begins on a table that another turn has open")
        self.own = units

    @abstractmethod
    def begin(self, units: Lease, start: int, part: Lease | None, *, at_end: bool) -> None:
        """Open a turn at `start` and give it `units`; `at_end`: the session's memory ends there. The turn reads `part`,
        of a checkpoint there that outlives it."""

    def extend(self, units: Lease) -> None:
        """Add units to start with: a draft begins to generate."""
        self.opened.absorb(units)

    def attach(self, row: int) -> Growth | None:
        """The turn gets `row`. Returns the page table entries that the executor has to learn."""
        self.row = row
        self._group.running[row] = self
        return None

    def leave(self) -> None:
        """The turn leaves its row, if it has one, and keeps everything."""
        self._group.running.pop(self.row, None)
        self.row = -1

    def lacking(self, end: int) -> int:
        """Units to acquire to compute up to `end`."""
        return 0

    def grown(self, count: int) -> Growth:
        """The turn has just been given `count` units for what it is to compute."""
        raise InvariantError(f"{self.pool.name}: its turns acquire nothing as they grow")

    def slide(self, computed: int) -> None:
        """Give back own units that no position from `computed` on needs."""
        return

    @abstractmethod
    def live_below(self, target: int, scheduled: int) -> int:
        """The highest position at or below `target` from which the turn can go on with the units it reads or owns, or
        `NOWHERE`. `scheduled`: tokens of it that are computed, or in flight."""

    @abstractmethod
    def truncate_turn(self, position: int, part: Lease | None, *, again: bool) -> None:
        """Cut the turn to `position`: a live one, that of a checkpoint with `part`, or, `again`, where it began."""

    @abstractmethod
    def commit(self, position: int, part: Lease | None) -> None:
        """Commit the turn with `position` tokens computed, past where it began: move to the session what the checkpoint
        there, with `part`, does not hold, and give back the rest."""

    def abort(self) -> None:
        """Give back what the turn acquired."""
        self.leave()
        self.opened.release()
        self.own = None

    # -- checkpoints of the open turn

    @abstractmethod
    def keep(self, position: int, holder: Holder) -> Lease | None:
        """A lease, for the checkpoint `holder`, on what resuming at the live `position` needs of this group. `None` if
        the sequence itself holds that."""

    def take_back(self, part: Lease) -> None:
        """Undo `keep`."""
        part.release()

    @property
    def can_spare(self) -> bool:
        """Whether there is a unit to spare for an optional checkpoint."""
        return True

    def take_spare(self) -> None:
        """Acquire that unit."""
        return
