"""A disk that fails now and then, and gives back what it should not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from tenuto.base.plan import Bytes
from tenuto.memory.unit_files import DiskFailed, UnitFile

FAILS = 0.1


class FaultyDisk:
    """A `Disk` in memory; every tenth write or read fails."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._files: dict[UnitFile, dict[int, list[Bytes]]] = {}

    def write(self, units: Mapping[int, Sequence[Bytes]]) -> UnitFile:
        if self._chance.random() < FAILS:
            raise DiskFailed(self._chance.choice(("full", "write")), "the disk was told to fail this write")
        file = UnitFile(str(len(self._files)), sum(row.nbytes for rows in units.values() for row in rows), 0)
        self._files[file] = {group: [row.copy() for row in rows] for group, rows in units.items()}
        return file

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Bytes]]:
        if self._chance.random() < FAILS:
            raise DiskFailed(self._chance.choice(("read", "checksum")), "the disk was told to fail this read")
        return {group: [self._files[file][group][row] for row in wanted] for group, wanted in rows.items()}

    def remove(self, file: UnitFile) -> None:
        del self._files[file]

    def close(self) -> None:
        self._files.clear()
