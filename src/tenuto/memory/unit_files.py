"""The disk tier: copies of units in files, which nobody trusts before their checksums have been compared."""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tenuto.base.errors import ConfigError
from tenuto.base.plan import Bytes

FORMAT = "tenuto units"
VERSION = "1"
SUFFIX = ".units"
LOCK = "tenuto.lock"


class DiskFailed(Exception):
    """Units could not be written or read; `cause`: "full", "write", "read" or "checksum"."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(eq=False, slots=True)
class UnitFile:
    """A file with `size` bytes of units, of which `wanted` are still referred to."""

    name: str
    size: int
    wanted: int


class Disk(Protocol):
    """Where files of units are."""

    def write(self, units: Mapping[int, Sequence[Bytes]]) -> UnitFile:
        """Write units by group, each uint8 [bytes a unit]. Raises `DiskFailed`, having kept nothing."""
        ...

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Bytes]]:
        """Some units of a file, by group and their numbers in it. Raises `DiskFailed`."""
        ...

    def remove(self, file: UnitFile) -> None:
        """The file is not needed any more."""
        ...

    def close(self) -> None:
        """Remove all files."""
        ...


class UnitFiles:
    """A `Disk` in a directory that one process uses at a time, at most `budget` bytes of units.

    A file has for each group a tensor `group N`, uint8 [units, bytes a unit], in the safetensors format, whose metadata
    gives the format, its version and a CRC-32 of every unit.
    """

    def __init__(self, directory: Path, budget: int) -> None:
        """Takes over the directory; files that another process has left in it are removed. Raises `ConfigError`."""
        self._directory = directory
        self._budget = budget
        self._used = 0
        self._numbers = count(1)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise ConfigError(f"the disk tier {directory} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"the disk tier {directory} is in use by another process") from error
        for left in directory.glob(f"*{SUFFIX}"):
            left.unlink(missing_ok=True)

    def write(self, units: Mapping[int, Sequence[Bytes]]) -> UnitFile:
        """See `Disk.write`."""
        size = sum(unit.nbytes for group in units.values() for unit in group)
        if self._used + size > self._budget:
            raise DiskFailed("full", f"{size} bytes do not fit beside {self._used} of {self._budget}")
        path = self._directory / f"{next(self._numbers)}{SUFFIX}"
        tensors = {f"group {group}": np.stack(list(rows)) for group, rows in units.items() if rows}
        sums = {name: [zlib.crc32(row) for row in rows] for name, rows in tensors.items()}
        try:
            save_file(tensors, path, {"format": FORMAT, "version": VERSION, "checksums": json.dumps(sums)})
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise DiskFailed("write", f"{path} could not be written: {error}") from error
        self._used += size
        return UnitFile(path.name, size, sum(map(len, tensors.values())))

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Bytes]]:
        """See `Disk.read`."""
        path = self._directory / file.name
        try:
            with safe_open(path, framework="numpy") as opened:
                metadata = opened.metadata() or {}
                if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                    raise DiskFailed("read", f"{path} is of another format or version")
                sums = json.loads(metadata["checksums"])
                found = {
                    group: _checked(opened.get_tensor(f"group {group}"), wanted, sums[f"group {group}"])
                    for group, wanted in rows.items()
                }
        except (OSError, SafetensorError, KeyError, ValueError, IndexError) as error:
            raise DiskFailed("read", f"{path} could not be read: {error}") from error
        if any(units is None for units in found.values()):
            raise DiskFailed("checksum", f"{path} is damaged")
        return {group: units for group, units in found.items() if units is not None}

    def remove(self, file: UnitFile) -> None:
        """See `Disk.remove`."""
        self._used -= file.size
        (self._directory / file.name).unlink(missing_ok=True)

    def close(self) -> None:
        """See `Disk.close`."""
        for left in self._directory.glob(f"*{SUFFIX}"):
            left.unlink(missing_ok=True)
        os.close(self._lock)


def _checked(units: Bytes, rows: Sequence[int], sums: Sequence[int]) -> list[Bytes] | None:
    """The units numbered `rows`, unless one of them is damaged."""
    found = [units[row] for row in rows]
    sound = all(zlib.crc32(unit) == sums[row] for unit, row in zip(found, rows, strict=True))
    return found if sound else None
