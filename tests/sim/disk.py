"""A disk that sometimes fails, fills up, or returns another file's contents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from random import Random

from tenuto.base.views import SessionKey
from tenuto.memory.tiers.contents import Content, NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, IndexUnusable, Listed, Listing, Run, UnitFile, Watcher
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
        self.log_holds = False  # whether sessions were removed since the log was emptied

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
        self.log_holds |= any(change.position is None for change in changes)

    def sessions(self) -> list[SessionKey]:
        """Returns the sessions that are listed."""
        if self._is_empty(self._connection("read")):
            return []
        return [(str(tenant), str(name)) for tenant, name in self._read("SELECT tenant, name FROM sessions")]

    def empty_log(self) -> None:
        if self._chance.random() < FAILS:
            raise DiskFailed("write", "simulated write failure")
        super().empty_log()
        self.log_holds = False


class FaultyDisk:
    """An in-memory `Disk` on which every tenth write or read fails and files are sometimes swapped. The next engine
    finds the files that were kept."""

    def __init__(self, chance: Random, *, fills_early: bool = True, swaps: bool = True) -> None:
        """With `fills_early`, writes may fail as on a full disk although the budget has room. With `swaps`, files are
        swapped."""
        self._chance = chance
        self._swaps = SWAPS if swaps else 0.0
        self.fills_early = fills_early
        self._failures = ("full", "write") if fills_early else ("write",)
        self.budget = chance.choice(BUDGETS)
        self._files: dict[str, dict[int, list[NamedUnit]]] = {}
        self._sizes: dict[str, int] = {}  # as the engine counts them
        self._written = 0
        self.index = FaultyIndex(chance)
        self._watcher: Watcher | None = None

    def watch(self, watcher: Watcher) -> None:
        """Tells somebody of changes from now on."""
        self._watcher = self.index._watcher = watcher

    def become(self, identity: str, *, keep: bool = False) -> None:
        """Does nothing: all files of the simulation have the same identity."""

    def write(self, units: Mapping[int, Sequence[NamedUnit]], *, cached: bool = True) -> UnitFile:
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
        if others and self._chance.random() < self._swaps:
            other = self._chance.choice(others)
            self._files[file.name], self._files[other] = self._files[other], self._files[file.name]
        there = self._files[file.name]
        if any(max(wanted) >= len(there.get(group, ())) for group, wanted in rows.items()):
            raise DiskFailed("read", "another file is in place of this one and has fewer units")
        return {group: [there[group][row] for row in wanted] for group, wanted in rows.items()}

    def overwrite(self, file: UnitFile, kept: Collection[tuple[int, int]]) -> int:
        if self._chance.random() < FAILS:
            raise DiskFailed("write", "simulated write failure")
        units, file.overwritten = self._files[file.name], 0
        file.units = sum(map(len, units.values()))
        for group, rows in units.items():
            for row, unit in enumerate(rows):
                if (group, row) not in kept:
                    unit.data.fill(0)
                    rows[row] = NamedUnit(Content(b"", b""), unit.data)
                    file.overwritten += 1
        if self._watcher is not None:
            self._watcher.overwritten(file.name)
        return file.overwritten

    def holding(self) -> Iterator[tuple[str, int, int]]:
        """Yields the file, group and row of every unit that was not overwritten."""
        for name, units in self._files.items():
            for group, rows in units.items():
                yield from ((name, group, row) for row, unit in enumerate(rows) if unit.content.before)

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
