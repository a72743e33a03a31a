"""Conversion of parked memory to the index of a disk tier, and of an index that a process finds to parked memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from tenuto.base.errors import InvariantError
from tenuto.memory.tiers.contents import Content, Contents
from tenuto.memory.tiers.parked import ELSEWHERE, Parked, StoredUnit
from tenuto.memory.tiers.snapshots import Run, SavedFile, SavedMemory, Snapshot
from tenuto.memory.tiers.unit_files import UnitFile

_FileRow = tuple[int, int, int]
"""Group, file and row of a unit."""


def snapshot_of(
    identity: str, unit_bytes: list[int], page_size: int, saved: Sequence[tuple[str, str, bytes, Parked]]
) -> Snapshot:
    """Returns the index of `saved`: tenant, session, tokens (int32), and parked memory, all of which is on disk."""
    files: dict[UnitFile, int] = {}
    sessions = [
        SavedMemory(
            tenant=tenant, session=session, tokens=tokens, groups=[_runs(group, files) for group in parked.units]
        )
        for tenant, session, tokens, parked in saved
    ]
    return Snapshot(
        identity=identity,
        unit_bytes=unit_bytes,
        page_size=page_size,
        files=[SavedFile(file.name, file.size) for file in files],
        sessions=sessions,
    )


def _runs(units: Sequence[StoredUnit], files: dict[UnitFile, int]) -> list[Run]:
    """Returns the places of units on disk, and adds their files to `files`, which numbers them."""
    places = [
        (files.setdefault(unit.file, len(files)), unit.row - i) for i, unit in enumerate(units) if unit.file is not None
    ]
    if len(places) < len(units):
        raise InvariantError("a unit that is not on disk would be listed in the index")
    runs, start = [], 0
    for (file, shift), same in groupby(places):
        count = sum(1 for _ in same)
        runs.append(Run(file, shift + start, count))
        start += count
    return runs


class FoundUnits:
    """The units of a snapshot; parked sequences share them.

    Invariant: the content of a unit covers the content that each `Parked` listing it expects.
    """

    def __init__(self, snapshot: Snapshot | None, there: Mapping[str, int], unit_bytes: Sequence[int]) -> None:
        """`there`: the sizes of the existing files, by name."""
        listed = snapshot.files if snapshot is not None else []
        self._files = [
            UnitFile(file.name, min(file.size, there[file.name]), 0) if file.name in there else None for file in listed
        ]
        self._unit_bytes = unit_bytes
        self.units: dict[_FileRow, StoredUnit] = {}

    @property
    def files_in_use(self) -> list[UnitFile]:
        """The files that still have units in use."""
        return [file for file in self._files if file is not None and file.wanted]

    def parked(self, saved: SavedMemory, position: int, names: Contents) -> Parked | None:
        """Returns the memory of the first `position` tokens of `saved`, in units that have to hold `names`; `None` if a
        unit is missing, or other sequences expect different contents of it."""
        pairs: list[tuple[_FileRow, Content]] = []
        for group, (runs, held) in enumerate(zip(saved.groups, names, strict=True)):
            places = ((group, run.file, run.row + i) for run in runs for i in range(run.count))
            pairs += zip(places, held, strict=False)
        if len(pairs) < sum(map(len, names)) or any(self._files[file] is None for (_, file, _), _ in pairs):
            return None
        most: dict[_FileRow, Content] = {}
        for place, content in pairs:
            known = most.get(place) or (self.units[place].content if place in self.units else content)
            if not known.covers(content) and not content.covers(known):
                return None
            most[place] = known if known.covers(content) else content
        parked = Parked(position, [[] for _ in names])
        for place, _ in pairs:
            unit = self._unit(place, most[place])
            unit.content = most[place]
            unit.references += 1
            parked.units[unit.group].append(unit)
        return parked

    def _unit(self, place: _FileRow, content: Content) -> StoredUnit:
        group, number, row = place
        file = self._files[number]
        if place not in self.units and file is not None:
            self.units[place] = StoredUnit(group, content, self._unit_bytes[group], None, ELSEWHERE, file=file, row=row)
            file.wanted += 1
        return self.units[place]
