"""A disk that sometimes fails, fills up, or returns another file's contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from tenuto.base.views import SessionKey
from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, IndexUnusable, Listed, Listing, Run, UnitFile
from tenuto.memory.tiers.state_index import MEMORY, StateIndex

FAILS = 0.1
SWAPS = 0.15
"""The probability that a file is swapped with another before it is read."""
BUDGETS = (150, 600, 3000, 10**6)
"""In bytes: room for a session or two, for a few, or for all."""


class FaultyIndex(StateIndex):
    """An index in memory that fails as often as the disk."""

    def __init__(self, chance: Random) -> None:
        super().__init__(MEMORY)
        self._chance = chance

    def begin(self, identity: str) -> dict[SessionKey, Listed]:
        if self._chance.random() < FAILS:
            raise IndexUnusable("unreadable")
        return super().begin(identity)

    def runs(self, key: SessionKey) -> list[Run]:
        if self._chance.random() < FAILS:
            raise DiskFailed("read", "simulated read failure")
        return super().runs(key)

    def apply(self, changes: Sequence[Listing]) -> None:
        if self._chance.random() < FAILS:
            raise DiskFailed("write", "simulated write failure")
        super().apply(changes)


class FaultyDisk:
    """An in-memory `Disk` on which every tenth write or read fails and files are sometimes swapped. The next engine
    finds the files that were kept."""

    def __init__(self, chance: Random, *, fills_early: bool = True) -> None:
        """With `fills_early`, writes may fail as on a full disk although the budget has room."""
        self._chance = chance
        self.fills_early = fills_early
        self._failures = ("full", "write") if fills_early else ("write",)
        self.budget = chance.choice(BUDGETS)
        self._files: dict[str, dict[int, list[NamedUnit]]] = {}
        self._sizes: dict[str, int] = {}  # as the engine counts them
        self._written = 0
        self.index = FaultyIndex(chance)

    def become(self, identity: str) -> None:
        """Does nothing: all files of the simulation have the same identity."""

    def write(self, units: Mapping[int, Sequence[NamedUnit]]) -> UnitFile:
        size = _size(units)
        if sum(self._sizes.values()) + size > self.budget:
            raise AssertionError(f"{size} bytes are written to a disk without room for them")
        if self._chance.random() < FAILS:
            raise DiskFailed(self._chance.choice(self._failures), "simulated write failure")
        self._written += 1
        file = UnitFile(f"file {self._written}", size, 0)
        copies = {group: [NamedUnit(each.content, each.data.copy()) for each in rows] for group, rows in units.items()}
        self._files[file.name], self._sizes[file.name] = copies, size
        return file

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[NamedUnit]]:
        if self._chance.random() < FAILS:
            raise DiskFailed(self._chance.choice(("read", "checksum")), "simulated read failure")
        others = [name for name in self._files if name != file.name]
        if others and self._chance.random() < SWAPS:
            other = self._chance.choice(others)
            self._files[file.name], self._files[other] = self._files[other], self._files[file.name]
        there = self._files[file.name]
        if any(max(wanted) >= len(there.get(group, ())) for group, wanted in rows.items()):
            raise DiskFailed("read", "another file is in place of this one and has fewer units")
        return {group: [there[group][row] for row in wanted] for group, wanted in rows.items()}

    def remove(self, file: UnitFile) -> None:
        del self._files[file.name], self._sizes[file.name]

    def files(self) -> set[str]:
        return set(self._files)

    def take_over(self, files: Iterable[UnitFile]) -> None:
        self._sizes = {file.name: file.size for file in files}
        for name in self._files.keys() - self._sizes.keys():
            del self._files[name]

    def close(self, *, keep: bool = False) -> None:
        if not keep:
            self._files.clear()
            self._sizes.clear()
            self.index.clear("")


def _size(units: Mapping[int, Sequence[NamedUnit]]) -> int:
    return sum(unit.data.nbytes for rows in units.values() for unit in rows)
