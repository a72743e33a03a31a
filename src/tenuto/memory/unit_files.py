"""The disk tier: copies of units in files, which nobody trusts before their checksums have been compared."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tenuto.base.errors import ConfigError
from tenuto.base.plan import Bytes
from tenuto.base.private import create_private, make_private_directory, open_private

FORMAT = "tenuto units"
VERSION = "1"
SUFFIX = ".units"
INDEX = "sessions.index"
LOCK = "tenuto.lock"
READERS = 2
"""Threads that read and check."""
PIECE = 2**22
"""Bytes that one of them reads at once."""
_LENGTH = 8


class DiskFailed(Exception):
    """Units could not be written or read; `cause`: "full", "write", "read", "foreign" or "checksum"."""

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
    """Where files of units are. Several threads may read and write at once."""

    def become(self, identity: str) -> None:
        """What is written from now on is of another `identity`; nothing older is read again."""
        ...

    def write(self, units: Mapping[int, Sequence[Bytes]]) -> UnitFile:
        """Write units by group, each uint8 [bytes a unit]. Raises `DiskFailed`, having kept nothing."""
        ...

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Bytes]]:
        """Some units of a file, by group and their numbers in it. Raises `DiskFailed`."""
        ...

    def remove(self, file: UnitFile) -> None:
        """The file is not needed any more."""
        ...

    def write_index(self, content: bytes) -> None:
        """Write down what the files hold, for the process that uses them next. Raises `DiskFailed`."""
        ...

    def read_index(self) -> bytes | None:
        """What was written down last, if anything was. Raises `DiskFailed`."""
        ...

    def files(self) -> dict[str, int]:
        """The sizes in bytes of all files of units that there are, by name."""
        ...

    def take_over(self, files: Iterable[UnitFile]) -> None:
        """Of the files that another process has left, go on with these, and remove all others."""
        ...

    def close(self, *, keep: bool = False) -> None:
        """Nothing is written or read any more. Unless told to `keep` them, remove all files."""
        ...


class UnitFiles:
    """A `Disk` in a directory that one process uses at a time, at most `budget` bytes of units.

    A file has for each group a tensor `group N`, uint8 [units, bytes a unit], in the safetensors format, whose metadata
    gives the format, its version, what the units are of (`identity`) and a CRC-32 of every unit. Files never change,
    and no name is used twice, so that an old index never leads to other units than those it was written for.
    """

    def __init__(self, directory: Path, budget: int, identity: str = "") -> None:
        """Files that another process has left stay until `take_over`. Raises `ConfigError`."""
        self._directory = directory
        self._budget = budget
        self._identity = identity
        self._used = 0
        self._counting = threading.Lock()  # of `_used`: one thread writes while another removes
        try:
            make_private_directory(directory)
            self._lock = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise ConfigError(f"the disk tier {directory} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"the disk tier {directory} is in use by another process") from error
        self._readers = ThreadPoolExecutor(READERS, "tenuto-disk")

    def become(self, identity: str) -> None:
        """See `Disk.become`."""
        self._identity = identity

    def write(self, units: Mapping[int, Sequence[Bytes]]) -> UnitFile:
        """See `Disk.write`."""
        size = sum(unit.nbytes for group in units.values() for unit in group)
        with self._counting:
            if self._used + size > self._budget:
                raise DiskFailed("full", f"{size} bytes do not fit beside {self._used} of {self._budget}")
            self._used += size
        path = self._directory / f"{secrets.token_hex(12)}{SUFFIX}"
        try:
            tensors = {f"group {group}": np.stack(list(rows)) for group, rows in units.items() if rows}
            sums = {name: [zlib.crc32(row) for row in rows] for name, rows in tensors.items()}
            create_private(path)  # not every version of safetensors does
            save_file(
                tensors,
                path,
                {"format": FORMAT, "version": VERSION, "identity": self._identity, "checksums": json.dumps(sums)},
            )
        except (OSError, SafetensorError, MemoryError) as error:
            self._unlink(path)
            self._gave_back(size)
            raise DiskFailed("write", f"{path} could not be written: {error}") from error
        return UnitFile(path.name, size, sum(map(len, tensors.values())))

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Bytes]]:
        """See `Disk.read`."""
        path = self._directory / file.name
        try:
            with path.open("rb", buffering=0) as opened:
                header, begin = _header(opened)
                metadata = header["__metadata__"]
                if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                    raise DiskFailed("read", f"{path} is of another format or version")
                if metadata.get("identity") != self._identity:
                    raise DiskFailed("foreign", f"{path} has units of another model")
                sums = json.loads(metadata["checksums"])
                return {
                    group: self._units(opened.fileno(), begin, header[f"group {group}"], wanted, sums[f"group {group}"])
                    for group, wanted in rows.items()
                }
        except (OSError, KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise DiskFailed("read", f"{path} could not be read: {error}") from error

    def _units(
        self, file: int, begin: int, tensor: dict[str, Any], rows: Sequence[int], sums: Sequence[int]
    ) -> list[Bytes]:
        """The units numbered `rows` of a tensor, uint8 [units, bytes]. Some are read while others are compared with
        their checksums. Raises `DiskFailed` if one is damaged."""
        size = int(tensor["shape"][1])
        start = begin + int(tensor["data_offsets"][0])
        if start + (max(rows, default=-1) + 1) * size > os.fstat(file).st_size:
            raise ValueError("it ends before the units that it should have")
        units = np.empty((len(rows), size), np.uint8)

        def take(first: int) -> bool:
            """Read the units from the `first` on of `PIECE` bytes, or one; False if one is damaged."""
            piece = slice(first, first + step)
            for unit, row in zip(units[piece], rows[piece], strict=True):
                if not 0 <= row < len(sums) or os.preadv(file, [unit.data], start + row * size) < size:
                    raise ValueError(f"it has no unit {row}")
            return all(zlib.crc32(unit) == sums[row] for unit, row in zip(units[piece], rows[piece], strict=True))

        step = max(1, PIECE // max(1, size))
        if not all(self._readers.map(take, range(0, len(rows), step))):
            raise DiskFailed("checksum", "a file of units is damaged")
        return list(units)

    def remove(self, file: UnitFile) -> None:
        """See `Disk.remove`."""
        self._gave_back(file.size)
        self._unlink(self._directory / file.name)

    @staticmethod
    def _unlink(path: Path) -> None:
        """What cannot be removed is, once that is possible, by `take_over` of another process."""
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _gave_back(self, size: int) -> None:
        with self._counting:
            self._used -= size

    def write_index(self, content: bytes) -> None:
        """See `Disk.write_index`. There is the old one or the new one, whole, whenever the process is killed."""
        path = self._directory / INDEX
        new = path.with_suffix(".new")
        try:
            with open_private(new) as file:
                file.write(content)
            new.replace(path)
        except OSError as error:
            raise DiskFailed("write", f"{path} could not be written: {error}") from error

    def read_index(self) -> bytes | None:
        """See `Disk.read_index`."""
        try:
            return (self._directory / INDEX).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DiskFailed("read", f"{self._directory / INDEX} could not be read: {error}") from error

    def files(self) -> dict[str, int]:
        """See `Disk.files`."""
        return {path.name: path.stat().st_size for path in self._directory.glob(f"*{SUFFIX}")}

    def take_over(self, files: Iterable[UnitFile]) -> None:
        """See `Disk.take_over`."""
        taken = {file.name: file.size for file in files}
        self._used += sum(taken.values())
        self._remove(self.files().keys() - taken.keys())

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._unlink(self._directory / name)

    def close(self, *, keep: bool = False) -> None:
        """See `Disk.close`."""
        if not keep:
            self._remove([*self.files(), INDEX])
        self._readers.shutdown()
        os.close(self._lock)


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors begin. Raises `ValueError`."""
    length = int.from_bytes(file.read(_LENGTH), "little")
    if length > os.fstat(file.fileno()).st_size - _LENGTH:
        raise ValueError("its header is truncated")
    return json.loads(file.read(length)), _LENGTH + length
