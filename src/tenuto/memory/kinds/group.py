"""The interface of every kind of memory: a group covers all running rows at once, a table one sequence. Each kind has
a file that defines both, and an entry in `memory.KINDS`."""

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
"""A length in tokens that no sequence reaches."""
NOWHERE = -1
"""Stands for the absence of a position."""


@dataclass(frozen=True, slots=True)
class Growth:
    """New pages of a row in group number `group`, as table entries [index, index + len(pages)). Before the first is
    used, the first `copy_slots` slots of page `copy_from` are copied to `pages[0]` (`NO_PAGE`: no copy)."""

    group: int
    row: int
    index: int
    pages: array[int]
    copy_from: int
    copy_slots: int


@dataclass(slots=True)
class MemoryChanges:
    """A step's changes to memory, in the form of `Plan`: each group adds to `tables` and `copies`, or to `states`.
    `left`: rows that stood at a checkpoint and write elsewhere from now on."""

    tables: list[TableChanges] = field(default_factory=list)
    copies: list[PageCopies] = field(default_factory=list)
    states: list[StateMoves] = field(default_factory=list)
    left: dict[int, None] = field(default_factory=dict)


class Group(ABC):
    """One memory group of the model: its pool, and its data about running turns, by row.

    Arrays over rows are int64 [rows] unless stated otherwise.
    """

    needs_checkpoints: ClassVar[bool] = True
    """Whether some positions are resumable only at a checkpoint."""
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
        """Returns an empty table for one sequence; `holder` holds the units that its session keeps."""

    # -- counting

    @staticmethod
    @abstractmethod
    def turn_units(spec: GroupSpec, page_size: int, shape: Shape, end: int, *, generates: bool) -> int:
        """Returns the most units that a turn holds at once if it starts from nothing and computes `end` tokens."""

    @staticmethod
    @abstractmethod
    def session_units(spec: GroupSpec, page_size: int, computed: int) -> int:
        """Returns the units that an idle session with `computed` tokens in memory holds, without older checkpoints."""

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that the empty pool can hold."""
        return UNLIMITED

    def min_units(self, longest: int) -> int:
        """Returns the smallest allowed pool if the longest sequence has `longest` tokens."""
        return self.turn_units(self.spec, self.page_size, self.shape, longest, generates=True)

    @property
    def units_at_start(self) -> int:
        """The most units that a turn is given when it starts; 0 if it acquires units as it grows."""
        return 0

    def needs(self, rows: Longs, ends: Longs) -> Longs | int:
        """Returns the units that `rows` have to acquire to compute up to `ends`."""
        return 0

    def pledged(self, rows: Longs, ends: Longs) -> int:
        """Returns an upper bound on the units that running rows will still acquire to compute up to `ends`."""
        return 0

    def expected_growth(self, lengths: Longs, ends: Longs) -> int:
        """Returns an estimate of the units that sequences of `lengths` tokens still need to grow to `ends`."""
        return 0

    # -- steps

    def grow(self, growing: Sequence[tuple[Table, int]]) -> list[Growth]:
        """Acquires, in one call, the units that the open turns of tables need to compute up to their ends; `growing`
        pairs each table with its end. The caller has checked that there is room."""
        lacking = [(table, count) for table, end in growing if (count := table.lacking(end))]
        if lacking and not self.pool.grow([(table.opened, count) for table, count in lacking]):
            raise InvariantError(f"{self.pool.name}: a plan was applied without room for it")
        return [table.grown(count) for table, count in lacking]

    @abstractmethod
    def advance(self, rows: Longs, starts: Longs, keeps: Mask, grown: Sequence[Growth], moves: MemoryChanges) -> None:
        """Applies a plan in which `rows`, having `grown`, compute from `starts` on: moves them to the units they write,
        and adds to `moves` the changes for the executor, which keeps the inputs of the rows in `keeps`, bool [rows]."""

    def write_elsewhere(self, row: int) -> None:
        """Keeps the row's next step from writing where the row stands, because a checkpoint was just made there."""
        return

    def slide(self, rows: Longs) -> None:
        """Gives back the units that rows no longer need, now that a step of theirs has settled."""
        return


class Table(ABC):
    """One sequence's part of a group: the units its session keeps besides checkpoints, and those its open turn holds.

    A checkpoint's part is its lease on units of this group, or `None`. A position is *live* if the open turn can go on
    there with the units it reads or owns.

    Invariant: `own` is set while a turn is open, and `row` is 0 or more while that turn has a row.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.pool = group.pool
        self.own: Lease | None = None  # units that the open turn has acquired; held by it
        self.row = -1  # written by `attach` and `leave`

    # -- what the session keeps

    def leases(self) -> Iterator[Lease]:
        """Yields the leases that the session holds besides its checkpoints."""
        return iter(())

    def frees(self) -> bool:
        """Whether a unit becomes free if the session gives up `leases()`."""
        return False

    def own_frees(self) -> bool:
        """Whether a unit becomes free if the open turn gives up what it has acquired. May be True although none does,
        because checkpoints may hold the units too."""
        return self.own is not None and len(self.own) > 0

    def kept(self, part: Lease | None) -> Lease:
        """Returns the lease on the units of the session's last position, where a checkpoint with `part` stands."""
        if part is None:
            raise InvariantError(f"{self.pool.name}: a kept position has no units")
        return part

    @abstractmethod
    def kept_ranges(self, position: int, skip: int = 0) -> Iterator[tuple[int, int]]:
        """Yields, for each unit kept for `position` except the first `skip`, in order, the range [start, end) of tokens
        whose state it holds. The two are equal if the unit holds the state after that many tokens."""

    @abstractmethod
    def kept_units(self, position: int) -> int:
        """Returns the number of units kept for `position`."""

    def sealed(self, position: int) -> array[int]:
        """Returns those of the units that the open turn, or without one the session, keeps at every position from
        `position` on, in the order of `kept`: no slot of them is written any more. `position` is settled."""
        return array("i")

    def receive(self, units: Lease, holder: Holder) -> Lease | None:
        """Gives an empty session the units of a position. If the checkpoint there has to hold them, returns them as a
        lease held by `holder`, the checkpoint."""
        return units.transfer(holder)

    def covers(self, at: int, position: int) -> bool:
        """Whether a checkpoint at `at` suffices to resume at the earlier `position`."""
        return False

    def share_part(self, part: Lease, at: int, position: int, holder: Holder) -> Lease:
        """Shares `part` of a checkpoint at `at` with `holder`, a checkpoint at the covered `position`."""
        raise InvariantError(f"{self.pool.name}: the units kept at {at} do not cover {position}")

    def fork(self, child: Self, position: int) -> None:
        """Shares the session's own units below `position` with the fresh table `child`, which refers to the same
        checkpoints. The tail stays here."""
        return

    def fork_turn(self, child: Self, position: int) -> None:
        """Does the same as `fork` at a settled `position` of the open turn, within its input and past its beginning."""
        return

    def truncate(self, position: int, part: Lease | None) -> None:
        """Cuts the session to `position`, where a checkpoint with `part` stands."""
        return

    def check_floors(self, position: int, part: Lease | None) -> None:
        """Raises `InvariantError` if another sequence may write slots that this session reads; for the audit. The
        session ends at `position`, where a checkpoint with `part` stands."""
        return

    # -- admission

    @abstractmethod
    def need(self, worst_case: int, held: int, start: int, end: int, *, at_end: bool) -> int:
        """Returns an upper bound on the units to acquire to compute up to `end`: for the open turn, which holds `held`,
        or without one for a turn that starts at `start` (`at_end`: where the session's memory ends). `worst_case`: the
        bound for a turn that starts from nothing."""

    def counted(self, kept: Lease | None) -> int:
        """Returns the number of units that the open turn holds of those that admission counted for it; `kept`: the part
        of the checkpoint at the end of its input."""
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
        """Whether the open turn has acquired units besides those it was given at its start."""
        return False

    def take_up(self, units: Lease) -> None:
        """Opens a turn and gives it `units` to start with."""
        if self.own is not None:
            name = units.holder.holder_name
            raise InvariantError(f"{self.pool.name}: {name} begins on a table on which another turn is open")
        self.own = units

    @abstractmethod
    def begin(self, units: Lease, start: int, part: Lease | None, *, at_end: bool) -> None:
        """Opens a turn at `start` and gives it `units`; `at_end`: the session's memory ends there. The turn reads
        `part` of a checkpoint at `start` that outlives the turn."""

    def extend(self, units: Lease) -> None:
        """Adds units for a draft that begins to generate."""
        self.opened.absorb(units)

    def attach(self, row: int) -> Growth | None:
        """Gives the turn `row`. Returns the page table entries to send to the executor."""
        self.row = row
        self._group.running[row] = self
        return None

    def leave(self) -> None:
        """Takes the turn out of its row, if it has one; it keeps all units."""
        self._group.running.pop(self.row, None)
        self.row = -1

    def lacking(self, end: int) -> int:
        """Returns the number of units to acquire to compute up to `end`."""
        return 0

    def grown(self, count: int) -> Growth:
        """Records that the turn has just acquired `count` units; returns its new pages."""
        raise InvariantError(f"{self.pool.name}: turns acquire no units of this group as they grow")

    def slide(self, position: int) -> None:
        """Gives back own units that no position from `position` on needs."""
        return

    @abstractmethod
    def live_below(self, target: int, scheduled: int) -> int:
        """Returns the highest live position at or below `target`, or `NOWHERE`. `scheduled`: the number of tokens that
        are computed or in flight."""

    @abstractmethod
    def stood_on(self, position: int) -> array[int]:
        """Returns the units that hold the state at `position`, where the open turn, which has no row, goes on past its
        beginning."""

    @abstractmethod
    def truncate_turn(self, position: int, part: Lease | None, *, again: bool) -> None:
        """Cuts the turn to `position`: a live one, that of a checkpoint with `part`, or with `again` its first one."""

    def commit(self, position: int, part: Lease | None) -> None:
        """Commits the turn with `position` tokens computed, past where it began: moves to the session the units that
        the checkpoint there, with `part`, does not hold, and gives back the rest."""
        self.abort()

    def abort(self) -> None:
        """Ends the turn: leaves its row and gives back the units it acquired."""
        self.leave()
        self.opened.release()
        self.own = None

    # -- checkpoints of the open turn

    @abstractmethod
    def keep(self, position: int, holder: Holder) -> Lease | None:
        """Returns a lease, for the checkpoint `holder`, on the units of this group that resuming at the live `position`
        needs. `None` if the sequence itself holds them."""

    def take_back(self, part: Lease) -> None:
        """Undoes `keep`."""
        part.release()

    @property
    def can_spare(self) -> bool:
        """Whether there is a unit to spare for an optional checkpoint."""
        return True

    def take_spare(self) -> None:
        """Acquires the unit for an optional checkpoint."""
        return
