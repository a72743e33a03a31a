"""A disk that fails now and then, fills up, and gives back what it should not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from tenuto.memory.contents import NamedUnit
from tenuto.memory.unit_files import DiskFailed, UnitFile

FAILS = 0.1
SWAPS = 0.15
"""How often a file changes places with another before it is read."""
BUDGETS = (150, 600, 3000, 10**6)
"""Bytes: a session or two, a few, or all."""


class FaultyDisk:
    """A `Disk` in memory; every tenth write or read fails, and now and then files change places. The engine that comes
    next finds the files that were kept."""

    def __init__(self, chance: Random, *, fills_early: bool = True) -> None:
        """`fills_early`: writes may fail as on a full disk although the budget has room."""
        self._chance = chance
        self.fills_early = fills_early
        self._failures = ("full", "write") if fills_early else ("write",)
        self.budget = chance.choice(BUDGETS)
        self._files: dict[str, dict[int, list[NamedUnit]]] = {}
        self._sizes: dict[str, int] = {}  # as the engine knows them
        self._written = 0
        self._index: bytes | None = None

    def become(self, identity: str) -> None:
        """Files of the simulation are of one identity."""

    def write(self, units: Mapping[int, Sequence[NamedUnit]]) -> UnitFile:
        size = _size(units)
        if sum(self._sizes.values()) + size > self.budget:
            raise AssertionError(f"{size} bytes are written to a disk that has no room for them")
        if self._chance.random() < FAILS:
            raise DiskFailed(self._chance.choice(self._failures), "the disk was told to fail this write")
        self._written += 1
        file = UnitFile(f"file {self._written}", size, 0)
        copies = {group: [NamedUnit(each.content, each.data.copy()) for each in rows] for group, rows in units.items()}
        self._files[file.name], self._sizes[file.name] = copies, size
        return file

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[NamedUnit]]:
        if self._chance.random() < FAILS:
            raise DiskFailed(self._chance.choice(("read", "checksum")), "the disk was told to fail this read")
        others = [name for name in self._files if name != file.name]
        if others and self._chance.random() < SWAPS:
            other = self._chance.choice(others)
            self._files[file.name], self._files[other] = self._files[other], self._files[file.name]
        there = self._files[file.name]
        if any(max(wanted) >= len(there.get(group, ())) for group, wanted in rows.items()):
            raise DiskFailed("read", "another file is in the place of this one, and has fewer units")
        return {group: [there[group][row] for row in wanted] for group, wanted in rows.items()}

    def remove(self, file: UnitFile) -> None:
        del self._files[file.name], self._sizes[file.name]

    def write_index(self, content: bytes) -> None:
        if self._chance.random() < FAILS:
            raise DiskFailed("write", "the disk was told to fail this write")
        self._index = content

    def read_index(self) -> bytes | None:
        if self._chance.random() < FAILS:
            raise DiskFailed("read", "the disk was told to fail this read")
        if self._index is not None and self._chance.random() < FAILS:
            return self._index[:-3]
        return self._index

    def files(self) -> dict[str, int]:
        return {name: _size(units) for name, units in self._files.items()}

    def take_over(self, files: Iterable[UnitFile]) -> None:
        self._sizes = {file.name: file.size for file in files}
        for name in self._files.keys() - self._sizes.keys():
            del self._files[name]

    def close(self, *, keep: bool = False) -> None:
        if not keep:
            self._files.clear()
            self._sizes.clear()


def _size(units: Mapping[int, Sequence[NamedUnit]]) -> int:
    return sum(unit.data.nbytes for rows in units.values() for unit in rows)
