"""The writes to disk that are under way, with the units that they write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.moves import Carrier, Jobs, Write
from tenuto.memory.tiers.parked import StoredUnit, size_of
from tenuto.memory.tiers.unit_files import Disk

MAX_LEAVING = 2**29
"""The most bytes that may be on their way to disk, unless a single write has more."""
_group_of = attrgetter("group")


def in_groups(units: Sequence[StoredUnit]) -> list[tuple[int, list[StoredUnit]]]:
    """Returns units that are in the order of their groups, by group."""
    return [(group, list(same)) for group, same in groupby(units, _group_of)]


class WritesUnderWay(Jobs[Write]):
    """The writes under way.

    Invariant: their units are `leaving`, and each write has a reference to each of its own. `size` is the number of
    bytes of all of them, which count neither against the host tier's budget nor, yet, as used on disk.
    """

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self._units: dict[Write, list[StoredUnit]] = {}  # in the order in which the write has them
        self.size = 0

    def has_room(self, more: int) -> bool:
        """Whether a write of `more` bytes may begin before those under way have ended."""
        return not self.size or self.size + more <= MAX_LEAVING

    def begin(self, units: Sequence[StoredUnit], disk: Disk) -> None:
        """Begins to write units of host memory to a new file."""
        units = sorted(units, key=_group_of)
        data = {
            group: [NamedUnit(unit.content, unit.data) for unit in same if unit.data is not None]
            for group, same in in_groups(units)
        }
        write = Write(self, data, disk)
        self._units[write] = units
        self.size += size_of(units)
        for unit in units:
            unit.leaving = True
            unit.references += 1
        self.carry(write)

    def take_units(self) -> Iterator[tuple[Write, list[StoredUnit]]]:
        """Yields each write that has ended since the last call, and its units. They no longer leave; the caller ends
        the write's references to them."""
        for write in self.take_ended():
            units = self._units.pop(write)
            self.size -= size_of(units)
            for unit in units:
                unit.leaving = False
            yield write, units

    def units(self) -> Iterator[StoredUnit]:
        """Yields the units of all writes, once for each."""
        return (unit for units in self._units.values() for unit in units)
