"""The memory of a draft model: pages with what it has computed of sessions' tokens.

It only saves work, and none of it is ever needed. So it has its own pools, and turns and sessions never wait for it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np

from tenuto.base.errors import ConfigError
from tenuto.base.groups import MemorySpec
from tenuto.base.options import Scope
from tenuto.base.sampling import Sampling
from tenuto.memory.pool import HolderKind, Lease, Pool
from tenuto.session.session import Session

NO_ROW = -1
COMPARED = 16
"""The most tables of other sessions, those used last, whose tokens are compared with those of a session without one."""


class DraftTable:
    """The pages of one session.

    Invariant: page i of every lease holds, of the tokens [i * page_size, (i + 1) * page_size) of `tokens`, what the
    draft model has computed. There is no page beyond the last token, except while a step is computed. A step writes
    only slots from `len(tokens)` on, in pages that no other table lists. Only full pages are shared.
    """

    holder_kind: HolderKind = "draft model"

    def __init__(self, name: str, scope: Scope, pools: Sequence[Pool]) -> None:
        self.holder_name = f"draft model of {name}"
        self.scope = scope
        self.tokens = array("i")
        self.row = NO_ROW  # of the executor; written by `DraftTables`
        self.sent = 0  # leading pages that the executor has in this row; written by `DraftTables`, like the next
        self.sampling: Sampling | None = None  # the options that it has for this row
        self._pools = pools
        self._leases = tuple(Lease(pool, array("i"), self) for pool in pools)

    def leases(self) -> Iterable[Lease]:
        """Returns the leases on its pages, one for each pool."""
        return self._leases

    @property
    def pages(self) -> int:
        """The number of its pages in each pool."""
        return len(self._leases[0])

    def units(self, first: int) -> list[array[int]]:
        """Returns its pages from number `first` on, for each pool."""
        return [lease.units[first:] for lease in self._leases]

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that `tokens` tokens take."""
        return -(-tokens // self._pools[0].slots)

    def cut(self, length: int) -> None:
        """Keeps the first `length` tokens; fewer if another table reads the page that would be written next."""
        size, kept = self._pools[0].slots, self.pages_for(length)
        if length % size and any(lease.pool.counts[lease.units[kept - 1]] > 1 for lease in self._leases):
            length, kept = length - length % size, kept - 1
        for lease in self._leases:
            lease.truncate(kept)
            if length % size:
                lease.pool.take_alone(lease.units[kept - 1], length % size)
        self.sent = min(self.sent, kept)
        del self.tokens[length:]

    def share(self, other: DraftTable, tokens: int) -> None:
        """Takes second leases on the full pages that `other` has of its first `tokens` tokens; this table is empty."""
        size = self._pools[0].slots
        pages = tokens // size
        for mine, theirs in zip(self._leases, other.leases(), strict=True):
            mine.absorb(theirs.share(0, pages, self))
        self.tokens.extend(other.tokens[: pages * size])

    def grow(self, tokens: int) -> bool:
        """Acquires the pages of `tokens` more tokens. Returns False, changing nothing, if too few are free."""
        length, size = len(self.tokens), self._pools[0].slots
        more = self.pages_for(length + tokens) - self.pages
        if any(pool.free < more for pool in self._pools):
            return False
        for lease in self._leases:
            if length % size:
                lease.pool.write_on(lease.units[length // size], length % size)
            lease.grow(more)
        return True


class DraftTables:
    """The tables of all sessions, in the pools and the rows of a draft model's executor.

    Every table with pages is in `_used`, the one used last at its end. When pages are short, those used longest ago
    lose theirs. Tables of the step that needs them do not.
    """

    def __init__(self, spec: MemorySpec, pages: int, rows: int) -> None:
        """`pages`: of each pool. Raises `ConfigError` for a model with recurrent layers."""
        if not all(group.paged for group in spec.groups):
            raise ConfigError(
                "the draft model has recurrent layers, whose state cannot go back to an earlier token; allowed: models "
                "with attention only"
            )
        self.pools = tuple(
            Pool(f"draft model {group.kind.value}{i}", pages, spec.page_size) for i, group in enumerate(spec.groups)
        )
        self._of: WeakKeyDictionary[Session, DraftTable] = WeakKeyDictionary()
        self._used: OrderedDict[DraftTable, None] = OrderedDict()
        self._rows: OrderedDict[DraftTable, None] = OrderedDict()  # tables with a row, in the same order
        self._free_rows = list(range(rows))

    def __iter__(self) -> Iterator[DraftTable]:
        """Yields all holders of pages."""
        return iter(list(self._used))

    def of(self, session: Session, tokens: array[int]) -> DraftTable:
        """Returns the table of a session, cut to the tokens that it has in common with `tokens`. A session without one
        shares what another of its scope has of the same tokens."""
        table = self._of.get(session)
        if table is None:
            self._of[session] = table = DraftTable(session.id, session.scope, self.pools)
        if len(table.tokens):
            table.cut(common(table.tokens, tokens))
        if not len(table.tokens):
            self._share(table, tokens)
        return table

    def _share(self, table: DraftTable, tokens: array[int]) -> None:
        """Shares with an empty table what others have of `tokens`."""
        others = (each for each in reversed(self._used) if each.scope == table.scope)
        found = [(common(each.tokens, tokens), -number, each) for number, each in enumerate(islice(others, COMPARED))]
        if found and (best := max(found))[0] >= self.pools[0].slots:
            table.share(best[2], best[0])
            self._used[table] = None

    def take_room(self, wanted: Sequence[tuple[DraftTable, int]]) -> list[bool]:
        """Acquires rows, and the pages of so many more tokens, for the tables of a step, in this order. Returns, for
        each, whether there were enough; other tables have then lost theirs, as far as needed."""
        busy = dict.fromkeys(table for table, _ in wanted)
        for table in busy:
            self._used[table] = None
            self._used.move_to_end(table)
            self._take_row(table)
        return [table.grow(tokens) or self._grow(table, tokens, busy) for table, tokens in wanted]

    def _take_row(self, table: DraftTable) -> None:
        if table.row == NO_ROW:
            if not self._free_rows:
                self._leave_row(next(iter(self._rows)))  # a table of this step gets another one
            table.row, table.sent, table.sampling = self._free_rows.pop(), 0, None
            self._rows[table] = None
        self._rows.move_to_end(table)

    def _leave_row(self, table: DraftTable) -> None:
        if table.row != NO_ROW:
            del self._rows[table]
            self._free_rows.append(table.row)
            table.row = NO_ROW

    def _grow(self, table: DraftTable, tokens: int, busy: Collection[DraftTable]) -> bool:
        """Acquires pages that others than the `busy` tables, the last in use, give up, unless these would not be
        enough."""
        kept = {unit for each in busy for unit in each.units(0)[0]}
        more = table.pages_for(len(table.tokens) + tokens) - table.pages
        if len(kept) + more > self.pools[0].capacity:
            return False
        while not table.grow(tokens):
            self.drop(next(iter(self._used)))
        return True

    def drop(self, table: DraftTable) -> None:
        """Gives the table's pages and row back; its tokens are computed again if they are needed."""
        self._leave_row(table)
        table.cut(0)
        self._used.pop(table, None)

    def clear(self) -> None:
        """Drops all tables."""
        for table in self:
            self.drop(table)

    def rows_lost(self) -> None:
        """Has all rows sent to the executor again."""
        for table in self._rows:
            table.sent, table.sampling = 0, None


def common(first: array[int], second: array[int]) -> int:
    """Returns the number of leading tokens that are equal."""
    if not (count := min(len(first), len(second))):
        return 0
    differ = np.frombuffer(first, np.intc, count) != np.frombuffer(second, np.intc, count)
    return int(differ.argmax()) if differ.any() else count
