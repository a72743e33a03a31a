"""What page tables of full and of sliding attention have in common: own pages, the tail, and its copy."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from tenuto.base.errors import InvariantError
from tenuto.memory.pool import Holder, Lease, Pool

NO_PAGE = -1
"""The page of a slot that has none yet."""


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


@dataclass(frozen=True, slots=True)
class Growth:
    """Pages a turn has acquired: table entries [index, index + len(pages)), and the copy that has to come before the
    first is used (`copy_from` `NO_PAGE`: none; else the page whose first `copy_slots` slots go to `pages[0]`)."""

    index: int
    pages: array[int]
    copy_from: int
    copy_slots: int


class PagedTable:
    """One sequence's pages in one group: what its session keeps, and what its open turn has added.

    Token slot p is in table entry p // page_size. A turn reads kept entries below `first` and its own from `first` on.
    It writes into its own pages, and into the last kept page only if the session has that page's tail.
    """

    def __init__(self, pool: Pool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.tail: Tail | None = None  # written by begin, commit, fork and truncate of this table
        self.own: Lease | None = None  # held by the open turn
        self.first = 0  # entry of the first page the turn ever owned
        self.released = 0  # own pages given back from the front, windows only
        self._copy_slots = 0  # used slots to copy into entry `first`; 0: written in place

    # -- the open turn

    def open(self, holder: Holder, start: int, *, in_place: bool) -> None:
        """Begin a turn that computes from `start` on; `in_place`: it may fill the page `start` lies in."""
        if self.own is not None:
            raise InvariantError(f"{self.pool.name}: {holder.holder_name} begins on a table another turn has open")
        self.own = Lease(self.pool, array("i"), holder)
        self.released = 0
        self._copy_slots = 0 if in_place else start % self.page_size
        self.first = start // self.page_size if self._copy_slots else pages_for(start, self.page_size)

    @property
    def opened(self) -> Lease:
        """The open turn's own pages."""
        if self.own is None:
            raise InvariantError(f"{self.pool.name}: no turn is open on this table")
        return self.own

    @property
    def entries(self) -> int:
        """Table entries the turn can write through."""
        return self.first + self.released + len(self.opened)

    @property
    def capacity(self) -> int:
        """Token slots the turn can write through now."""
        return self.entries * self.page_size

    def grow(self, end: int) -> Growth:
        """Acquire the pages for slots up to `end`. The caller has seen that there are enough."""
        index = self.entries
        had = len(self.opened)
        if not self.opened.grow(pages_for(end, self.page_size) - index):
            raise InvariantError(f"{self.pool.name}: a plan was applied without room for it")
        copies = self._copy_slots > 0 and index == self.first
        return Growth(index, self.opened.units[had:], self.kept_page(index) if copies else NO_PAGE, self._copy_slots)

    def kept_page(self, index: int) -> int:
        """The unit of kept entry `index`."""
        raise NotImplementedError  # abstract: full and sliding keep their pages differently

    def view(self) -> tuple[int, array[int]]:
        """The turn's page table, as (first entry, pages)."""
        raise NotImplementedError  # abstract: as `kept_page`

    # -- the tail

    def has_tail(self, page: int, position: int) -> bool:
        """Whether the session may write slot `position`, which lies in its page `page`."""
        tail = self.tail
        return tail is not None and tail.page == page and position >= tail.floor

    def lend(self, page: int, position: int) -> None:
        """Another sequence now reads `page` below `position` and does not get the tail."""
        if self.tail is not None and self.tail.page == page:
            self.tail.floor = max(self.tail.floor, position)

    def brings(self, position: int) -> bool:
        """Whether the page of slot `position` is one that the open turn has acquired."""
        return len(self.opened) > 0 and position // self.page_size >= self.first

    def end_at(self, position: int, page: int, *, brought: bool = False) -> None:
        """The session's memory now ends at `position`, in `page`: take the tail of a page the turn `brought`, keep that
        of the same page, or lose it."""
        if position % self.page_size == 0:
            self.tail = None
        elif brought:
            self.tail = Tail(page, 0)
        elif not self.has_tail(page, position):
            self.tail = None
