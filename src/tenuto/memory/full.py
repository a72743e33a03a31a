"""Full attention: every page of the sequence, and every position is resumable."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from tenuto.memory.paged import NO_PAGE, PagedTable, Tail, pages_for
from tenuto.memory.pool import Holder, Lease, Pool


class FullTable(PagedTable):
    """A sequence's pages in a full attention group. `base` holds the session's, entry 0 on."""

    def __init__(self, pool: Pool, page_size: int, holder: Holder) -> None:
        super().__init__(pool, page_size)
        self.base = Lease(pool, array("i"), holder)

    def leases(self) -> Iterator[Lease]:
        yield self.base

    # -- the open turn

    def begin(self, holder: Holder, start: int, *, at_end: bool) -> None:
        """Open a turn at `start`; `at_end`: that is where the session's memory ends, so its tail can be written."""
        in_place = at_end and self.writable(start)
        if in_place and start % self.page_size and not self.has_tail(self._page_at(start), start):
            self.tail = Tail(self._page_at(start), start)
        self.open(holder, start, in_place=in_place)

    def writable(self, position: int) -> bool:
        """Whether the session, whose memory ends at `position`, may write there in place: it has the tail of the last
        page, or holds that page alone and may take it."""
        page = self._page_at(position)
        return page == NO_PAGE or self.has_tail(page, position) or self.pool.counts[page] == 1

    def _page_at(self, position: int) -> int:
        index = position // self.page_size
        return self.base.units[index] if index < len(self.base) else NO_PAGE

    def kept_page(self, index: int) -> int:
        return self.base.units[index]

    def view(self) -> tuple[int, array[int]]:
        """The turn's whole page table as (first entry, pages)."""
        return 0, self.base.units[: self.first] + self.opened.units

    def truncate_turn(self, position: int) -> None:
        """Cut the turn's own pages back to slots below `position`, not before where it began. There, not even the copy
        may have been made that comes before its first token."""
        began = self.first * self.page_size + self._copy_slots
        self.opened.truncate(max(0, pages_for(position, self.page_size) - self.first) if position > began else 0)

    def commit(self, position: int, _kept: Lease | None) -> None:
        """The turn commits with `position` tokens computed, more than where it began. No checkpoint keeps anything of
        this group."""
        own, brought = self.opened, self.brings(position)
        if len(own):  # else all was written in place, into a page the session keeps
            own.truncate(pages_for(position, self.page_size) - self.first)
            self.base.truncate(self.first)
        self.base.absorb(own)
        self.own = None
        self.end_at(position, self._page_at(position), brought=brought)

    def abort(self) -> None:
        """The turn gives back what it acquired."""
        self.opened.release()
        self.own = None

    # -- the session

    def fork(self, child: FullTable, position: int) -> None:
        """Share the pages below `position` with the fresh table `child`. The tail stays here."""
        child.base.absorb(self.base.share(0, pages_for(position, self.page_size), child.base.holder))
        self.lend(self._page_at(position), position)

    def truncate(self, position: int, _kept: Lease | None) -> None:
        """Cut the session's pages to slots below `position`."""
        self.base.truncate(pages_for(position, self.page_size))
        self.end_at(position, self._page_at(position))
