"""Sliding attention: the pages of the last window. A position is resumable while its window's pages are held."""

from __future__ import annotations

from array import array

from tenuto.base.errors import InvariantError
from tenuto.memory.paged import NO_PAGE, PagedTable, pages_for
from tenuto.memory.pool import Holder, Lease, Pool


class SlidingTable(PagedTable):
    """A sequence's pages in a sliding group. What the session keeps is in its checkpoints, one window each.

    The token at position p attends to positions p - window + 1 .. p, so resuming at p needs p - window + 1 .. p - 1.
    """

    def __init__(self, pool: Pool, page_size: int, window: int) -> None:
        super().__init__(pool, page_size)
        self.window = window
        self._source: Lease | None = None  # of the checkpoint the turn resumed from; entries up to `_source_end`
        self._source_end = 0

    def first_entry(self, position: int) -> int:
        """The first table entry that resuming at `position` needs."""
        return min(max(0, position - self.window + 1) // self.page_size, pages_for(position, self.page_size))

    def span(self, position: int) -> int:
        """How many entries resuming at `position` needs."""
        return pages_for(position, self.page_size) - self.first_entry(position)

    # -- the open turn

    def begin(self, holder: Holder, start: int, source: Lease | None, *, at_end: bool) -> None:
        """Open a turn at `start`, reading the window in `source` (a lease of the turn's own checkpoint)."""
        self.open(holder, start, in_place=at_end and self.has_tail(last_page(source), start))
        self._read_through(source, start)

    def resume_from(self, source: Lease, position: int) -> None:
        """Cut the turn back to a checkpoint of its own: it goes on in the pages it had filled up to `position`."""
        self.opened.truncate(0)
        self.first, self.released, self._copy_slots = pages_for(position, self.page_size), 0, 0
        self._read_through(source, position)

    def restart(self) -> None:
        """Cut the turn to where it began, or was resumed last: not even the copy may have been made that comes before
        its first token."""
        self.opened.truncate(0)
        self.released = 0

    def _read_through(self, source: Lease | None, position: int) -> None:
        self._source, self._source_end = source, pages_for(position, self.page_size)
        if source is not None and len(source) != self.span(position):
            raise InvariantError(f"{self.pool.name}: a checkpoint at {position} holds {len(source)} pages")

    def kept_page(self, index: int) -> int:
        if self._source is None:
            raise InvariantError(f"{self.pool.name}: entry {index} is not kept")
        return self._source.units[index - self._source_end]

    def view(self) -> tuple[int, array[int]]:
        """What the turn reads, as (first entry, pages)."""
        if self._source is None or self.released:
            return self.first + self.released, self.opened.units[:]
        begin = self._source_end - len(self._source)
        return begin, self._source.units[: self.first - begin] + self.opened.units

    def slide(self, computed: int) -> None:
        """Give back own pages that no position from `computed` on needs."""
        expired = self.first_entry(computed) - self.first - self.released
        if expired > 0:
            count = min(expired, len(self.opened))
            self.opened.drop_front(count)
            self.released += count

    def live(self, position: int) -> bool:
        """Whether the pages the turn reads or owns still cover the window of `position`."""
        begin, pages = self.view()
        return begin <= self.first_entry(position) and pages_for(position, self.page_size) <= begin + len(pages)

    def keep(self, position: int, holder: Holder) -> Lease:
        """A second lease, for a checkpoint, on the window of `position`."""
        lease = Lease(self.pool, array("i"), holder)
        low, high = self.first_entry(position), pages_for(position, self.page_size)
        if self._source is not None and low < self.first:
            offset = self._source_end - len(self._source)
            lease.absorb(self._source.share(low - offset, min(high, self.first) - offset, holder))
        own_from = self.first + self.released
        if high > self.first:
            lease.absorb(self.opened.share(max(low, self.first) - own_from, high - own_from, holder))
        return lease

    def truncate_turn(self, position: int) -> None:
        """Cut the turn's own pages back to slots below the live `position`."""
        self.opened.truncate(max(0, pages_for(position, self.page_size) - self.first - self.released))

    def commit(self, position: int, window: Lease | None) -> None:
        """The turn commits with `position` tokens computed, more than where it began; a checkpoint keeps that
        `window`."""
        self.end_at(position, last_page(window), brought=self.brings(position))
        self.abort()

    def abort(self) -> None:
        """The turn gives back what it acquired."""
        self.opened.release()
        self.own = None
        self._source = None

    def truncate(self, position: int, window: Lease | None) -> None:
        """The session now ends at `position`, whose `window` a checkpoint keeps."""
        self.end_at(position, last_page(window))


def last_page(window: Lease | None) -> int:
    """The page that the position of a kept `window` lies in, unless it is the first of the next."""
    return window.units[-1] if window is not None and len(window) else NO_PAGE
