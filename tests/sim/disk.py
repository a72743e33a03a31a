"""A disk that fails now and then, and gives back what it should not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from tenuto.base.plan import Bytes
from tenuto.memory.unit_files import DiskFailed, UnitFile

FAILS = 0.1


class FaultyDisk:
    """A `Disk` in memory; every tenth write or read fails. What is kept serves the engine that comes next."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._files: dict[str, dict[int, list[Bytes]]] = {}
        self._written = 0
        self._index: bytes | None = None

    def become(self, identity: str) -> None:
        """Files of the simulation are of one identity."""

    def write(self, units: Mapping[int, Sequence[Bytes]]) -> UnitFile:
        if self._chance.random() < FAILS:
            raise DiskFailed(self._chance.choice(("full", "write")), "the disk was told to fail this write")
        self._written += 1
        file = UnitFile(f"file {self._written}", sum(row.nbytes for rows in units.values() for row in rows), 0)
        self._files[file.name] = {group: [row.copy() for row in rows] for group, rows in units.items()}
        return file

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Bytes]]:
        if self._chance.random() < FAILS:
            raise DiskFailed(self._chance.choice(("read", "checksum")), "the disk was told to fail this read")
        return {group: [self._files[file.name][group][row] for row in wanted] for group, wanted in rows.items()}

    def remove(self, file: UnitFile) -> None:
        del self._files[file.name]

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
        return {name: sum(row.nbytes for rows in units.values() for row in rows) for name, units in self._files.items()}

    def take_over(self, files: Iterable[UnitFile]) -> None:
        taken = {file.name for file in files}
        self._files = {name: units for name, units in self._files.items() if name in taken}

    def close(self, *, keep: bool = False) -> None:
        if not keep:
            self._files.clear()
