"""The writes to disk that are under way, with the units that they write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter

from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import Disk
from tenuto.memory.tiers.moves import Carrier, Jobs, Lister, Write
from tenuto.memory.tiers.parked import StoredUnit

MAX_LEAVING = 2**29
"""The most bytes that may be on their way to disk, unless a single write has more."""
group_of = attrgetter("group")


def in_groups(units: Sequence[StoredUnit]) -> list[tuple[int, list[StoredUnit]]]:
    """Returns units that are in the order of their groups, by group."""
    return [(group, list(same)) for group, same in groupby(units, group_of)]


class WritesUnderWay(Jobs[Write]):
    """The writes under way.

    Invariant: their units are `leaving`, and each write has a reference to each of them. `size` is the number of their
    bytes, which do not count against the host tier's budget, and not yet as used on disk.
    """

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self._batches: dict[Write, Sequence[Sequence[StoredUnit]]] = {}
        self.size = 0

    def has_room(self, more: int) -> bool:
        """Whether a write of `more` bytes may begin before those under way have ended."""
        return not self.size or self.size + more <= MAX_LEAVING

    def begin(self, batches: Sequence[Sequence[StoredUnit]], disk: Disk, listed: Lister | None = None) -> Write:
        """Begins to write units of host memory, each batch, in the order of groups, to a new file. `listed`: see
        `Write`."""
        data = [
            {
                group: [NamedUnit(unit.content, unit.data) for unit in same if unit.data is not None]
                for group, same in in_groups(batch)
            }
            for batch in batches
        ]
        write = Write(self, data, disk, listed)
        self._batches[write] = batches
        for unit in chain(*batches):
            self.size += unit.size
            unit.leaving = True
            unit.references += 1
        self.carry(write)
        return write

    def take_batches(self) -> Iterator[tuple[Write, Sequence[Sequence[StoredUnit]]]]:
        """Yields each write that has ended since the last call, and its batches of units. They no longer leave; the
        caller ends the write's references to them."""
        for write in self.take_ended():
            batches = self._batches.pop(write)
            for unit in chain(*batches):
                self.size -= unit.size
                unit.leaving = False
            yield write, batches

    def units(self) -> Iterator[StoredUnit]:
        """Yields the units of all writes, once for each."""
        return (unit for batches in self._batches.values() for unit in chain(*batches))
