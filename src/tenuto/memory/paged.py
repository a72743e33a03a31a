"""What full and sliding page tables have in common: own pages, the tail, and its copy."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.groups import GroupSpec
from tenuto.base.plan import PageCopies, TableChanges
from tenuto.memory.group import Group, Growth, Moves, Table
from tenuto.memory.pool import Holder, Lease, Pool
from tenuto.memory.rows import Longs, Rows
from tenuto.memory.shape import Shape

NO_PAGE = -1
"""Stands for a page that does not exist."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` token slots."""
    return -(-tokens // page_size)


@dataclass(slots=True)
class Tail:
    """The right to fill the free slots of `page`, a unit of the pool.

    Invariant: of all sequences that hold the page at most one has its tail, and its session's memory ends in the page.
    `floor` is the lowest position the holder may write: forks of it read what lies below. Written by the table that has
    it.
    """

    page: int
    floor: int


class PagedGroup(Group):
    """A group of pages. `entries[row]`: how many table entries the row can write through."""

    def __init__(self, index: int, spec: GroupSpec, pool: Pool, page_size: int, shape: Shape, rows: Rows) -> None:
        super().__init__(index, spec, pool, page_size, shape, rows)
        self.entries = np.zeros(shape.max_running, np.int64)
        self._nothing = _changes([]), _copies([])

    @staticmethod
    def turn_units(spec: GroupSpec, page_size: int, shape: Shape, end: int, *, generates: bool) -> int:
        return pages_for(end, page_size)

    @staticmethod
    def session_units(spec: GroupSpec, page_size: int, computed: int) -> int:
        return pages_for(computed, page_size)

    def needs(self, rows: Longs, ends: Longs) -> Longs:
        lacking: Longs = -(-ends // self.page_size) - self.entries[rows]
        return np.maximum(lacking, 0, out=lacking)

    def advance(self, rows: Longs, starts: Longs, grown: Sequence[Growth], moves: Moves) -> None:
        changes, copies = (_changes(grown), _copies(grown)) if grown else self._nothing
        moves.tables.append(changes)
        moves.copies.append(copies)


class PagedTable(Table):
    """One sequence's pages in one group: what its session keeps, and what its open turn has added.

    Token slot p is in table entry p // page_size. A turn reads kept entries below `first` and its own from `first` on.
    It writes into its own pages, and into the last kept page only if the session has that page's tail.
    """

    _group: PagedGroup

    def __init__(self, group: PagedGroup) -> None:
        super().__init__(group)
        self.page_size = group.page_size
        self.tail: Tail | None = None  # written by begin, commit, fork and truncate of this table
        self.first = 0  # entry of the first page the turn ever owned
        self.released = 0  # own pages given back from the front, windows only
        self._copy_slots = 0  # used slots to copy into entry `first`; 0: written in place

    # -- what is kept

    def first_entry(self, position: int) -> int:
        """The first table entry that resuming at `position` needs."""
        return 0

    def span(self, position: int) -> int:
        """How many table entries resuming at `position` needs."""
        return pages_for(position, self.page_size) - self.first_entry(position)

    def used(self, position: int) -> int:
        return (position - 1) % self.page_size + 1

    def kept_units(self, position: int) -> int:
        return self.span(position)

    def covers(self, at: int, position: int) -> bool:
        return self.first_entry(position) >= self.first_entry(at)

    def share_part(self, part: Lease, at: int, position: int, holder: Holder) -> Lease:
        skip = self.first_entry(position) - self.first_entry(at)
        return part.share(skip, skip + self.span(position), holder)

    # -- admission

    def need(self, worst_case: int, held: int, start: int, end: int, *, at_end: bool) -> int:
        there = self.entries if self.own is not None else self.entries_at(start, at_end=at_end)
        return max(0, min(worst_case - held, pages_for(end, self.page_size) - there))

    def entries_at(self, start: int, *, at_end: bool) -> int:
        """Table entries that a turn starting at `start` need not acquire. The page `start` lies in is copied unless the
        turn is certain to write in place."""
        certain = self.writes_in_place(start, at_end=at_end)
        return pages_for(start, self.page_size) if certain else start // self.page_size

    def writes_in_place(self, start: int, *, at_end: bool) -> bool:
        """Whether a turn starting at `start` is certain to write into the page that the session keeps there."""
        return False

    # -- the open turn

    def open(self, units: Lease, start: int, page: int, *, in_place: bool) -> None:
        """Open a turn that computes from `start` on; `in_place`: it may fill `page`, in which `start` lies."""
        self.take_up(units)
        self.released = 0
        self._copy_slots = 0 if in_place else start % self.page_size
        self.first = start // self.page_size if self._copy_slots else pages_for(start, self.page_size)
        if in_place and start % self.page_size:
            self.pool.generation[page] += 1

    @property
    def has_grown(self) -> bool:
        return self.own is not None and len(self.own) + self.released > 0

    @property
    def entries(self) -> int:
        """Table entries the turn can write through."""
        return self.first + self.released + len(self.opened)

    def attach(self, row: int) -> Growth:
        super().attach(row)
        self._group.entries[row] = self.entries
        first, pages = self.view()
        return Growth(self._group.index, row, first, pages, NO_PAGE, 0)

    def lacking(self, end: int) -> int:
        return max(0, pages_for(end, self.page_size) - self.entries)

    def grow(self, end: int) -> Growth | None:
        index, had, wanted = self.entries, len(self.opened), self.lacking(end)
        if not wanted:
            return None
        if not self.opened.grow(wanted):
            raise InvariantError(f"{self.pool.name}: a plan was applied without room for it")
        self._group.entries[self.row] = index + wanted
        copied = self.kept_page(index) if self._copy_slots > 0 and index == self.first else NO_PAGE
        return Growth(self._group.index, self.row, index, self.opened.units[had:], copied, self._copy_slots)

    @abstractmethod
    def kept_page(self, index: int) -> int:
        """The unit of kept entry `index`."""

    @abstractmethod
    def view(self) -> tuple[int, array[int]]:
        """The pages the turn reads, as (first entry, pages)."""

    # -- the tail

    def has_tail(self, page: int, position: int) -> bool:
        """Whether the session may write slot `position`, which lies in its page `page`."""
        tail = self.tail
        return tail is not None and tail.page == page and position >= tail.floor

    def lend(self, page: int, position: int) -> None:
        """Another sequence now reads `page` below `position`, without getting the tail."""
        if self.tail is not None and self.tail.page == page:
            self.tail.floor = max(self.tail.floor, position)

    def lend_of_turn(self, page: int, position: int) -> None:
        """Another sequence now reads what the open turn has computed below `position`. If the turn writes in place, to
        the session's last page `page`, the session cannot go on there without it."""
        if not self._copy_slots:
            self.lend(page, position)

    def brings(self, position: int) -> bool:
        """Whether the open turn acquired the page of slot `position`."""
        return len(self.opened) > 0 and position // self.page_size >= self.first

    def end_at(self, position: int, page: int, *, brought: bool = False) -> None:
        """The session's memory now ends at `position`, in `page`: take the tail if the turn `brought` the page, keep it
        if it is of this page, or lose it."""
        if position % self.page_size == 0:
            self.tail = None
        elif brought:
            self.tail = Tail(page, 0)
        elif not self.has_tail(page, position):
            self.tail = None


def _changes(grown: Sequence[Growth]) -> TableChanges:
    rows = [growth.row for growth in grown for _ in growth.pages]
    index = [growth.index + i for growth in grown for i in range(len(growth.pages))]
    pages = [page for growth in grown for page in growth.pages]
    return TableChanges(np.array(rows, np.int32), np.array(index, np.int32), np.array(pages, np.int32))


def _copies(grown: Sequence[Growth]) -> PageCopies:
    copied = [growth for growth in grown if growth.copy_from != NO_PAGE]
    return PageCopies(
        np.array([growth.copy_from for growth in copied], np.int32),
        np.array([growth.pages[0] for growth in copied], np.int32),
        np.array([growth.copy_slots for growth in copied], np.int32),
    )
