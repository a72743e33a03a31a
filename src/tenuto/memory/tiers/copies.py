"""Copies of units off the device, each kept once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes, Copier, CopyFailed
from tenuto.memory.pool import Pool
from tenuto.memory.tiers.contents import Content, Contents
from tenuto.memory.tiers.disk import Disk, UnitFile
from tenuto.memory.tiers.parked import ELSEWHERE, StoredUnit
from tenuto.memory.tiers.rates import Rates
from tenuto.memory.tiers.writes import in_groups

Place = tuple[UnitFile, int, int, Content]
"""A unit in a file: the file, group, row and the content that it must have."""


class Copies:
    """All stored units: those of the device's units are found again by unit and generation, those in files by row.

    Invariants: `host_used` is the size of all stored units with `data`. `disk_used` is the size of all files that are
    `wanted`, by stored units or by records that are still unread.
    """

    def __init__(
        self, pools: Sequence[Pool], copier: Copier, disk: Disk | None, timer: Callable[[], float], rates: Rates
    ) -> None:
        self._pools = pools
        self._copier = copier
        self._disk = disk
        self._timer = timer
        self._rates = rates
        self._last: dict[tuple[int, int], StoredUnit] = {}  # the last copy of each unit, by group and unit
        self._at: dict[tuple[UnitFile, int, int], StoredUnit] = {}  # units in files, by file, group and row
        self.host_used = 0
        self.disk_used = 0
        # Units by target: "host", "disk" or "device", or "nowhere" if they were discarded to make room:
        self.moved: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Failures by cause: "full" (no room on disk), "busy" (no room on disk while writes are under way), "copy", and
        the causes of `DiskFailed`."""

    def unit_bytes(self, group: int) -> int:
        """Returns the size of a unit of `group` in bytes."""
        return self._copier.unit_bytes(group)

    def bytes_of(self, counts: Iterable[int]) -> int:
        """Returns the size of `counts` units of each group in bytes."""
        return sum(self.unit_bytes(group) * count for group, count in enumerate(counts))

    # -- from the device

    def take(
        self, kept: Sequence[Sequence[int]], names: Contents, *, in_host: bool = False
    ) -> list[list[StoredUnit]] | None:
        """Returns copies of units by group, with a reference of the caller to each; those that are not on disk, or with
        `in_host` all, are in host memory, even beyond its budget. Returns `None` if copying failed."""
        copies: list[list[StoredUnit]] = []
        try:
            for group, (units, held) in enumerate(zip(kept, names, strict=True)):
                copies.append(self._stored(group, units, held, in_host=in_host))
        except CopyFailed:
            self.failures["copy"] += 1
            self.release(chain(*copies))
            return None
        return copies

    def _stored(self, group: int, units: Sequence[int], held: Sequence[Content], *, in_host: bool) -> list[StoredUnit]:
        pool = self._pools[group]
        found = [self._copy_of(group, unit, content) for unit, content in zip(units, held, strict=True)]
        missing = [i for i, copy in enumerate(found) if copy is None or (in_host and copy.data is None)]
        if missing:
            began = self._timer()
            data = self._copier.read_units(group, np.array([units[i] for i in missing], np.int32))
            self._rates.note("park", data.nbytes, self._timer() - began)
            for row, i in enumerate(missing):
                copy = found[i]
                if copy is None:
                    place = units[i], pool.generation[units[i]]
                    copy = StoredUnit(group, held[i], data[row].nbytes, None, place)
                    self._last[group, units[i]] = found[i] = copy
                copy.data = data[row]
                self.host_used += copy.size
            self.moved["host"] += len(missing)
        stored = [copy for copy in found if copy is not None]
        for copy in stored:
            copy.references += 1
        return stored

    def _copy_of(self, group: int, unit: int, content: Content) -> StoredUnit | None:
        """Returns an existing copy of the unit if it has all of `content`. It has only part of it if slots of the page
        were filled since. Raises `InvariantError` if it has anything else."""
        copy = self._last.get((group, unit))
        if copy is None or not copy.references or copy.place != (unit, self._pools[group].generation[unit]):
            return None
        if copy.content.covers(content):
            return copy
        if not content.covers(copy.content):
            raise InvariantError(f"unit {unit} of {self._pools[group].name} holds other tokens than its copy")
        return None

    def hold(self, groups: Sequence[Sequence[Bytes]], names: Contents) -> list[list[StoredUnit]]:
        """Returns stored units with the given data, by group, that were never on the device; `names` are their
        contents. The caller has a reference to each."""
        held = [
            [
                StoredUnit(group, content, data.nbytes, data, ELSEWHERE, references=1)
                for data, content in zip(units, contents, strict=True)
            ]
            for group, (units, contents) in enumerate(zip(groups, names, strict=True))
        ]
        self.host_used += sum(unit.size for unit in chain(*held))
        return held

    # -- on the device

    def on_device(self, unit: StoredUnit) -> int | None:
        """Returns the unit of the pool that still has the same contents, or will have them when a move has ended."""
        number, generation = unit.place
        pool = self._pools[unit.group]
        there = pool.counts[number] > 0 and pool.generation[number] == generation
        return number if there and (unit.move is None or unit.move.usable) else None

    def coming(self, unit: StoredUnit, number: int) -> None:
        """Records that a move fills unit `number` of the device with the copy."""
        unit.place = number, self._pools[unit.group].generation[number]
        unit.references += 1
        self._last[unit.group, number] = unit

    def not_there(self, unit: StoredUnit) -> None:
        """Records that a copy will not arrive on the device."""
        if self._last.get((unit.group, unit.place[0])) is unit:
            del self._last[unit.group, unit.place[0]]
        unit.place = ELSEWHERE

    # -- in files

    def arrived(self, units: Sequence[StoredUnit], file: UnitFile) -> None:
        """Records that the units, group by group, have been written to `file`."""
        file.wanted = len(units)
        self.disk_used += file.size
        for group, same in in_groups(units):
            for row, unit in enumerate(same):
                unit.file, unit.row = file, row
                self._at[file, group, row] = unit
                self.shed(unit)
        self.moved["disk"] += len(units)

    def shed(self, unit: StoredUnit) -> None:
        """Discards the copy in host memory of a unit on disk that nobody needs there."""
        if unit.file is not None and unit.data is not None and not unit.hosts and not unit.leaving:
            unit.data = None
            self.host_used -= unit.size

    def find(self, places: Sequence[Place]) -> list[StoredUnit] | None:
        """Returns the units in these places, with a reference of the caller to each. Returns `None`, having changed
        nothing, if one is known to have another content."""
        for file, group, row, content in places:
            known = self._at.get((file, group, row))
            if known is not None and not known.content.covers(content):
                return None
        found = []
        for file, group, row, content in places:
            place = file, group, row
            if place not in self._at:
                size = self.unit_bytes(group)
                self._at[place] = StoredUnit(group, content, size, None, ELSEWHERE, file=file, row=row)
                file.wanted += 1
            self._at[place].references += 1
            found.append(self._at[place])
        return found

    def rows(self, without: Collection[StoredUnit]) -> dict[UnitFile, set[tuple[int, int]]]:
        """Returns, for every file with known units, the groups and rows of those that are not in `without`."""
        found: dict[UnitFile, set[tuple[int, int]]] = {}
        for (file, group, row), unit in self._at.items():
            rows = found.setdefault(file, set())
            if unit not in without:
                rows.add((group, row))
        return found

    # -- references

    def release(self, units: Iterable[StoredUnit]) -> None:
        """Ends a reference to each of the units."""
        for unit in units:
            self._release(unit)

    def _release(self, unit: StoredUnit) -> None:
        unit.references -= 1
        if unit.references:
            self.shed(unit)
            return
        if self._last.get((unit.group, unit.place[0])) is unit:
            del self._last[unit.group, unit.place[0]]
        if unit.data is not None:
            self.host_used -= unit.size
            unit.data.fill(0)  # nobody reads it any more, and nobody is to find it in freed memory
            unit.data = None
        if unit.file is not None:
            del self._at[unit.file, unit.group, unit.row]
            self.unwanted(unit.file)
            unit.file = None

    def unwanted(self, file: UnitFile) -> None:
        """Ends a use of the file, which is removed after the last."""
        file.wanted -= 1
        if not file.wanted and self._disk is not None:
            self.disk_used -= file.size
            self._disk.remove(file)
