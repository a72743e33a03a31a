"""Full attention: a sequence keeps all of its pages, and every position is resumable."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Self

from tenuto.base.errors import InvariantError
from tenuto.memory.kinds.paged import NO_PAGE, PagedGroup, PagedTable, pages_for
from tenuto.memory.pool import Holder, Lease
from tenuto.memory.rows import Longs


class FullGroup(PagedGroup):
    """A full attention group."""

    needs_checkpoints = False

    def table(self, holder: Holder) -> FullTable:
        return FullTable(self, holder)

    @property
    def max_length(self) -> int:
        return self.pool.capacity * self.page_size + 1  # the last token is never computed

    def min_units(self, longest: int) -> int:
        return 1  # a small pool limits the longest sequence instead

    def pledged(self, rows: Longs, ends: Longs) -> int:
        return int(self.needs(rows, ends).sum())

    def expected_growth(self, lengths: Longs, ends: Longs) -> int:
        return int((-(-ends // self.page_size) + -lengths // self.page_size).sum())


class FullTable(PagedTable):
    """A sequence's pages in a full attention group. `base` holds the session's, from entry 0 on. A checkpoint has no
    part in this group, since the sequences that refer to it hold the pages."""

    def __init__(self, group: FullGroup, holder: Holder) -> None:
        super().__init__(group)
        self.base = Lease(group.pool, array("i"), holder)
        self._began = 0  # entry in which the open turn began

    def leases(self) -> Iterator[Lease]:
        yield self.base

    def frees(self) -> bool:  # a holder of a page holds all pages before it, so the last page decides
        return len(self.base) > 0 and self.pool.counts[self.base.units[-1]] == 1

    def kept(self, part: Lease | None) -> Lease:
        return self.base

    def sealed(self, position: int) -> array[int]:
        units = self.base.units if self.own is None else self.view()[1]
        return units[: position // self.page_size]

    def receive(self, units: Lease, holder: Holder) -> None:
        self.base.absorb(units)

    def own_frees(self) -> bool:  # the last page decides here too
        return self.own is not None and len(self.own) > 0 and self.pool.counts[self.own.units[-1]] == 1

    # -- the open turn

    def begin(self, units: Lease, start: int, part: Lease | None, *, at_end: bool) -> None:
        page, in_place = self._page_at(start), self.writes_in_place(start, at_end=at_end)
        if in_place and start % self.page_size and not self.has_tail(page, start):
            self.pool.take_alone(page, start % self.page_size)
        self.open(units, start, page, in_place=in_place)
        self._began = start // self.page_size

    def writes_in_place(self, start: int, *, at_end: bool) -> bool:
        return at_end and self.writable(start)

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
        return 0, self.base.units[: self.first] + self.opened.units

    def live_below(self, target: int, scheduled: int) -> int:
        return target

    def keep(self, position: int, holder: Holder) -> None:
        return None

    def truncate_turn(self, position: int, part: Lease | None, *, again: bool) -> None:
        """Cuts the turn's own pages to slots below `position`, which is at or past the turn's beginning. At the
        beginning it gives back all of them, because the copy into the first may not have been made."""
        began = self.first * self.page_size + self._copy_slots
        self.opened.truncate(max(0, pages_for(position, self.page_size) - self.first) if position > began else 0)
        self.go_on(position)

    def commit(self, position: int, part: Lease | None) -> None:
        own, brought = self.opened, self.brings(position)
        if len(own):  # otherwise everything was written in place, into a page the session keeps
            own.truncate(pages_for(position, self.page_size) - self.first)
            self.base.truncate(self.first)
        self.base.absorb(own)
        self.own = None
        self.pool.add_reader(self.base.units[self._began : position // self.page_size])  # full pages never change again
        self.end_at(position, self._page_at(position), brought=brought)

    # -- the session

    def fork(self, child: Self, position: int) -> None:
        entries, holder = pages_for(position, self.page_size), child.base.holder
        child.base.absorb(self.base.share(0, entries, holder, self.used(position)))

    def fork_turn(self, child: Self, position: int) -> None:
        entries, holder = pages_for(position, self.page_size), child.base.holder
        reads = self.used(position)
        if entries <= self.first:
            child.base.absorb(self.base.share(0, entries, holder, reads))
        else:
            child.base.absorb(self.base.share(0, self.first, holder))
            child.base.absorb(self.opened.share(0, entries - self.first, holder, reads))

    def truncate(self, position: int, part: Lease | None) -> None:
        """Cuts the session's pages to slots below `position`."""
        self.base.truncate(pages_for(position, self.page_size))
        self.end_at(position, self._page_at(position))

    def check_floors(self, position: int, part: Lease | None) -> None:
        units = self.base.units
        self.check_tail(units[-1] if len(units) else NO_PAGE, position)
        if not units or self.pool.counts[units[0]] == 1:  # any holder of a later page holds the first too
            return
        wrong = self.pool.unprotected(units, self.used(position))
        wrong = [unit for unit in wrong if unit != self.tail and self.pool.counts[unit] > 1]
        if wrong:
            name = self.base.holder.holder_name
            raise InvariantError(f"{self.pool.name}: {name} reads slots of units {wrong} that may still be written")
