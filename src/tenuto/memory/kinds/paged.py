"""The common part of full and sliding page tables: own pages, the tail, and its copy."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.groups import GroupSpec
from tenuto.base.plan import PageCopies, TableChanges
from tenuto.memory.kinds.group import Group, Growth, Mask, MemoryChanges, Table
from tenuto.memory.pool import Holder, Lease, Pool
from tenuto.memory.rows import Longs, Rows
from tenuto.memory.shape import Shape

NO_PAGE = -1
"""Stands for a page that does not exist."""


def pages_for(tokens: int, page_size: int) -> int:
    """Returns the number of pages that hold `tokens` token slots."""
    return -(-tokens // page_size)


class PagedGroup(Group):
    """A group of pages. `entries[row]`: the length of the row's page table."""

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

    def advance(self, rows: Longs, starts: Longs, keeps: Mask, grown: Sequence[Growth], moves: MemoryChanges) -> None:
        changes, copies = (_changes(grown), _copies(grown)) if grown else self._nothing
        moves.tables.append(changes)
        moves.copies.append(copies)


class PagedTable(Table):
    """One sequence's pages in one group: those its session keeps, and those its open turn has added.

    Token slot p is in table entry p // page_size. A turn reads kept entries below `first` and its own from `first` on.
    It writes into its own pages, and into the last kept page only if the session has that page's *tail*: the right to
    fill its free slots, from the page's floor on (see `Pool`).

    Invariant: of all sequences that hold a page, at most one has its tail, and the session of that one ends in it.
    """

    _group: PagedGroup

    def __init__(self, group: PagedGroup) -> None:
        super().__init__(group)
        self.page_size = group.page_size
        self.tail = NO_PAGE  # the page whose tail this sequence has; written by `_take_tail` and `_lose_tail`
        self.first = 0  # entry of the first page the turn ever owned
        self.released = 0  # number of own pages given back from the front; windows only
        self._copy_slots = 0  # used slots to copy into entry `first`; 0 if the turn writes in place

    # -- what is kept

    def first_entry(self, position: int) -> int:
        """Returns the first table entry that resuming at `position` needs."""
        return 0

    def span(self, position: int) -> int:
        """Returns the number of table entries that resuming at `position` needs."""
        return pages_for(position, self.page_size) - self.first_entry(position)

    def used(self, position: int) -> int:
        """Returns the number of used slots in the last page kept for `position`."""
        return (position - 1) % self.page_size + 1

    def kept_ranges(self, position: int, skip: int = 0) -> Iterator[tuple[int, int]]:
        size, first = self.page_size, self.first_entry(position)
        for entry in range(first + skip, first + self.span(position)):
            yield entry * size, min((entry + 1) * size, position)

    def kept_units(self, position: int) -> int:
        return self.span(position)

    def covers(self, at: int, position: int) -> bool:
        return self.first_entry(position) >= self.first_entry(at)

    def share_part(self, part: Lease, at: int, position: int, holder: Holder) -> Lease:
        skip = self.first_entry(position) - self.first_entry(at)
        return part.share(skip, skip + self.span(position), holder, self.used(position))

    # -- admission

    def need(self, worst_case: int, held: int, start: int, end: int, *, at_end: bool) -> int:
        there = self.entries if self.own is not None else self.entries_at(start, at_end=at_end)
        return max(0, min(worst_case - held, pages_for(end, self.page_size) - there))

    def entries_at(self, start: int, *, at_end: bool) -> int:
        """Returns the number of table entries that a turn starting at `start` need not acquire. The page in which
        `start` lies counts only if the turn is certain to write it in place; otherwise it is copied."""
        certain = self.writes_in_place(start, at_end=at_end)
        return pages_for(start, self.page_size) if certain else start // self.page_size

    def writes_in_place(self, start: int, *, at_end: bool) -> bool:
        """Whether a turn starting at `start` is certain to write into the page that the session keeps there."""
        return False

    # -- the open turn

    def open(self, units: Lease, start: int, page: int, *, in_place: bool) -> None:
        """Opens a turn that computes from `start` on; `in_place`: it may fill `page`, in which `start` lies."""
        self.take_up(units)
        self.released = 0
        self._copy_slots = 0 if in_place else start % self.page_size
        self.first = start // self.page_size if self._copy_slots else pages_for(start, self.page_size)
        if in_place and start % self.page_size:
            self.pool.write_on(page, start % self.page_size)
            self._take_tail(page)

    @property
    def has_grown(self) -> bool:
        return self.own is not None and len(self.own) + self.released > 0

    @property
    def entries(self) -> int:
        """The length of the turn's page table, including entries whose pages it has given back."""
        return self.first + self.released + len(self.opened)

    def attach(self, row: int) -> Growth:
        super().attach(row)
        self._group.entries[row] = self.entries
        first, pages = self.view()
        return Growth(self._group.index, row, first, pages, NO_PAGE, 0)

    def stood_on(self, position: int) -> array[int]:
        begin, pages = self.view()
        first = self.first_entry(position) - begin
        return pages[first : first + self.span(position)]

    def lacking(self, end: int) -> int:
        return max(0, pages_for(end, self.page_size) - self.entries)

    def grown(self, count: int) -> Growth:
        index = self.entries - count
        self._group.entries[self.row] = index + count
        copied = self.kept_page(index) if self._copy_slots > 0 and index == self.first else NO_PAGE
        return Growth(self._group.index, self.row, index, self.opened.units[-count:], copied, self._copy_slots)

    @abstractmethod
    def kept_page(self, index: int) -> int:
        """Returns the unit of kept entry `index`."""

    @abstractmethod
    def view(self) -> tuple[int, array[int]]:
        """Returns the pages the turn reads, as (first entry, pages)."""

    def go_on(self, position: int) -> None:
        """Lets the open turn, which was cut to `position`, write on there in a page that it has begun to fill."""
        index, slot = position // self.page_size, position % self.page_size
        own = index - self.first - self.released
        if slot and 0 <= own < len(self.opened):
            page = self.opened.units[own]
            if self.pool.counts[page] == 1:
                self.pool.take_alone(page, slot)
            self.pool.write_on(page, slot)
        elif slot and own == -1 and not self._copy_slots and not self.released:  # the last page it started from
            self.pool.write_on(self.kept_page(index), slot)

    # -- the tail

    def has_tail(self, page: int, position: int) -> bool:
        """Whether the session may write slot `position`, which lies in its page `page`."""
        return page != NO_PAGE and self.tail == page and position % self.page_size >= self.pool.floors[page]

    def brings(self, position: int) -> bool:
        """Whether the open turn acquired the page of slot `position`."""
        return len(self.opened) > 0 and position // self.page_size >= self.first

    def end_at(self, position: int, page: int, *, brought: bool = False) -> None:
        """Ends the session's memory at `position`, in `page`: takes the page's tail if the turn `brought` the page,
        else keeps the tail if the session may still write there, or gives it up. Slots that other sequences read stay
        below the page's floor."""
        if brought and position % self.page_size:
            self._take_tail(page)
        elif position % self.page_size == 0 or not self.has_tail(page, position):
            self._lose_tail()

    def _take_tail(self, page: int) -> None:
        self._lose_tail()
        other = self.pool.tails.setdefault(page, self)
        if other is not self:
            raise InvariantError(f"{self.pool.name} unit {page} would get a second tail")
        self.tail = page

    def _lose_tail(self) -> None:
        if self.tail != NO_PAGE:
            del self.pool.tails[self.tail]
            self.tail = NO_PAGE

    def check_tail(self, page: int, position: int) -> None:
        """Checks a session that ends at `position`, in `page`; for the audit. Raises `InvariantError` if it has the
        tail of another page, or if another sequence may write slots of `page` that this one reads."""
        if self.tail not in (NO_PAGE, page) or (self.tail != NO_PAGE and self.pool.tails.get(self.tail) is not self):
            raise InvariantError(f"{self.pool.name}: a session that ends in unit {page} has the tail of {self.tail}")
        other = self.pool.tails.get(page, self)
        if other is not self and self.used(position) > self.pool.floors[page]:
            raise InvariantError(
                f"{self.pool.name} unit {page} may be written from slot {self.pool.floors[page]} on; "
                f"a session that cannot write it reads {self.used(position)} slots"
            )


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
