"""Sliding attention: a sequence keeps the pages of its last window. A position is resumable while the pages of its
window are held."""

from __future__ import annotations

from array import array

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.groups import GroupSpec
from tenuto.memory.kinds.group import NOWHERE, Growth
from tenuto.memory.kinds.paged import NO_PAGE, PagedGroup, PagedTable, pages_for
from tenuto.memory.pool import Holder, Lease, Pool
from tenuto.memory.rows import Longs, Rows
from tenuto.memory.shape import Shape


def window_pages(group: GroupSpec, page_size: int) -> int:
    """Returns the most pages that one window can touch."""
    return pages_for(group.window - 1, page_size) + 1


class SlidingGroup(PagedGroup):
    """A sliding attention group. `first`, int64 [rows]: the first table entry that the row needed when a step of its
    turn last settled."""

    def __init__(self, index: int, spec: GroupSpec, pool: Pool, page_size: int, shape: Shape, rows: Rows) -> None:
        super().__init__(index, spec, pool, page_size, shape, rows)
        self.first = np.zeros(shape.max_running, np.int64)

    def table(self, holder: Holder) -> SlidingTable:
        return SlidingTable(self)

    @staticmethod
    def turn_units(spec: GroupSpec, page_size: int, shape: Shape, end: int, *, generates: bool) -> int:
        """Returns the pages of two windows and of the tokens that the steps in flight compute, or whose inputs are
        kept."""
        ahead = pages_for(shape.max_step_tokens * (2 if shape.overlap else 1) + shape.most_kept, page_size) + 1
        return min(pages_for(end, page_size), 2 * window_pages(spec, page_size) + ahead)

    @staticmethod
    def session_units(spec: GroupSpec, page_size: int, computed: int) -> int:
        return min(pages_for(computed, page_size), window_pages(spec, page_size))

    def pledged(self, rows: Longs, ends: Longs) -> int:
        pages, pledged = self.needs(rows, ends), 0
        for index in np.flatnonzero(pages).tolist():
            worst_case = self.turn_units(self.spec, self.page_size, self.shape, int(ends[index]), generates=True)
            pledged += min(int(pages[index]), max(0, worst_case - len(self.running[int(rows[index])].opened)))
        return pledged

    def expected_growth(self, lengths: Longs, ends: Longs) -> int:
        """Counts up to two windows, because the one at the end of the input is kept while the turn runs."""
        limit = 2 * window_pages(self.spec, self.page_size)
        return int(
            (np.minimum(-(-ends // self.page_size), limit) - np.minimum(-(-lengths // self.page_size), limit)).sum()
        )

    def slide(self, rows: Longs) -> None:
        stands = self.rows.stands(rows)
        first = (stands - self.spec.window + 1) // self.page_size
        for index in np.flatnonzero(first > self.first[rows]).tolist():
            self.running[int(rows[index])].slide(int(stands[index]))
        self.first[rows] = first


class SlidingTable(PagedTable):
    """A sequence's pages in a sliding group. The session keeps them in its checkpoints, one window each.

    The token at position p attends to positions p - window + 1 .. p, so resuming at p needs p - window + 1 .. p - 1.
    """

    _group: SlidingGroup

    def __init__(self, group: SlidingGroup) -> None:
        super().__init__(group)
        self.window = group.spec.window
        self._source: Lease | None = None  # part of the checkpoint the turn resumed from; entries below `_source_end`
        self._source_end = 0

    def first_entry(self, position: int) -> int:
        return min(max(0, position - self.window + 1) // self.page_size, pages_for(position, self.page_size))

    # -- the open turn

    def begin(self, units: Lease, start: int, part: Lease | None, *, at_end: bool) -> None:
        self.open(units, start, last_page(part), in_place=at_end and self.has_tail(last_page(part), start))
        self._read_through(part, start)

    def _read_through(self, source: Lease | None, position: int) -> None:
        self._source, self._source_end = source, pages_for(position, self.page_size)
        if source is not None and len(source) != self.span(position):
            raise InvariantError(f"{self.pool.name}: a checkpoint at {position} holds {len(source)} pages")

    def kept_page(self, index: int) -> int:
        if self._source is None:
            raise InvariantError(f"{self.pool.name}: entry {index} is not kept")
        return self._source.units[index - self._source_end]

    def view(self) -> tuple[int, array[int]]:
        if self._source is None or self.released:
            return self.first + self.released, self.opened.units[:]
        begin = self._source_end - len(self._source)
        return begin, self._source.units[: self.first - begin] + self.opened.units

    def attach(self, row: int) -> Growth:
        self._group.first[row] = 0
        return super().attach(row)

    def slide(self, position: int) -> None:
        expired = self.first_entry(position) - self.first - self.released
        if expired > 0:
            count = min(expired, len(self.opened))
            self.opened.drop_front(count)
            self.released += count

    def live_below(self, target: int, scheduled: int) -> int:
        begin, pages = self.view()
        live = begin <= self.first_entry(target) and pages_for(target, self.page_size) <= begin + len(pages)
        return target if live else NOWHERE

    def keep(self, position: int, holder: Holder) -> Lease:
        """Returns a second lease on the pages of the window of `position`."""
        lease = Lease(self.pool, array("i"), holder)
        low, high = self.first_entry(position), pages_for(position, self.page_size)
        if self._source is not None and low < self.first:
            offset = self._source_end - len(self._source)
            lease.absorb(self._source.share_within(low - offset, min(high, self.first) - offset, holder))
        own_from = self.first + self.released
        if high > self.first:
            lease.absorb(self.opened.share_within(max(low, self.first) - own_from, high - own_from, holder))
        return lease

    def truncate_turn(self, position: int, part: Lease | None, *, again: bool) -> None:
        """Cuts the turn. At one of its checkpoints it goes on in the pages it had filled up to that position. Where it
        began or last resumed (`again`), it gives back its own pages, because the copy into the first may not have been
        made."""
        if again:
            self.opened.truncate(0)
            self.released = 0
            self.go_on(position)
        elif part is not None:
            self.opened.truncate(0)
            self.first, self.released, self._copy_slots = pages_for(position, self.page_size), 0, 0
            self._read_through(part, position)
            self.go_on(position)
        else:
            self.opened.truncate(max(0, pages_for(position, self.page_size) - self.first - self.released))
            self.go_on(position)

    def commit(self, position: int, part: Lease | None) -> None:
        self.end_at(position, last_page(part), brought=self.brings(position))
        self.abort()

    def abort(self) -> None:
        super().abort()
        self._source = None

    # -- the session

    def truncate(self, position: int, part: Lease | None) -> None:
        self.end_at(position, last_page(part))

    def check_floors(self, position: int, part: Lease | None) -> None:
        self.check_tail(last_page(part), position)


def last_page(window: Lease | None) -> int:
    """Returns the last page of a kept `window`, or `NO_PAGE`."""
    return window.units[-1] if window is not None and len(window) else NO_PAGE
