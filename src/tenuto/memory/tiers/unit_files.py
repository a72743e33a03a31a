"""The disk tier: copies of units in files, which are used only if their names and checksums match."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import sys
import threading
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tenuto.base.errors import ConfigError
from tenuto.base.plan import Bytes
from tenuto.base.private import make_private_directory, open_private, open_regular
from tenuto.memory.tiers.contents import Content, NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, UnitFile, Watcher
from tenuto.memory.tiers.file_writes import DirectWriter, Parts, write_all
from tenuto.memory.tiers.state_index import StateIndex

FORMAT = "tenuto units"
VERSION = "2"
SUFFIX = ".units"
INDEX = "sessions.sqlite"
LOCK = "tenuto.lock"
READERS = 2
"""The number of threads that read and verify units."""
PIECE = 2**22
"""The number of bytes that a thread reads at once."""
READ_AHEAD = 2**30
"""The most bytes that are read ahead at the start."""
MOST_AHEAD = 4096
"""The most files that are read ahead: to open each takes time."""
MAX_HEADER = 100_000_000
"""The most bytes of a header that the format allows."""
_LENGTH = 8
_UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError, RuntimeError)
"""The exceptions that reading a file with arbitrary contents may raise."""


class UnitReader:
    """Reads units from the files of a directory; see `UnitFiles`."""

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._readable = {identity}  # identities of files that may be read
        self._readers = ThreadPoolExecutor(READERS, "tenuto-disk")

    def close(self) -> None:
        """Ends its threads."""
        self._readers.shutdown()

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[NamedUnit]]:
        path = self._directory / file.name
        try:
            with open_regular(path) as opened:
                header, begin = _header(opened)
                metadata = header["__metadata__"]
                if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                    raise DiskFailed("read", f"{path} is of another format or version")
                if metadata.get("identity") not in self._readable:
                    raise DiskFailed("foreign", f"{path} has units of another model")
                sums, names = json.loads(metadata["checksums"]), json.loads(metadata["contents"])
                found: dict[int, list[NamedUnit]] = {}
                for group, wanted in rows.items():
                    name = _tensor(group)
                    expected = [(Content.named(names[name][row]), int(sums[name][row])) for row in wanted]
                    start, size = begin + int(header[name]["data_offsets"][0]), int(header[name]["shape"][1])
                    if len(wanted) * size > file.size:
                        raise ValueError("its units are larger than those that were written")
                    found[group] = self._units(opened.fileno(), start, size, wanted, expected)
                return found
        except _UNREADABLE as error:
            raise DiskFailed("read", f"{path} could not be read: {error}") from error

    def _units(
        self, file: int, start: int, size: int, rows: Sequence[int], expected: Sequence[tuple[Content, int]]
    ) -> list[NamedUnit]:
        """Returns the units in `rows` of a tensor that begins at byte `start`, each of `size` bytes, which should have
        the expected contents and checksums. Some are read while others are verified. Raises `DiskFailed` if one is
        damaged."""
        if min([start, *rows]) < 0 or start + (max(rows, default=-1) + 1) * size > os.fstat(file).st_size:
            raise ValueError("it ends before its units do")
        units = np.empty((len(rows), size), np.uint8)

        def take(first: int) -> bool:
            """Reads `PIECE` bytes of units from unit `first` on, but at least one unit. Returns False if a unit is
            damaged."""
            piece = slice(first, min(first + step, len(rows)))
            for begin, end in _consecutive(rows, piece.start, piece.stop):
                if os.preadv(file, [units[begin:end].data], start + rows[begin] * size) < (end - begin) * size:
                    raise ValueError(f"it has no unit {rows[end - 1]}")
            pairs = zip(units[piece], expected[piece], strict=True)
            return all(_checksum(content, unit) == checksum for unit, (content, checksum) in pairs)

        step = max(1, PIECE // max(1, size))
        if not all(self._readers.map(take, range(0, len(rows), step))):
            raise DiskFailed("checksum", "a file of units is damaged")
        return [NamedUnit(content, unit) for (content, _), unit in zip(expected, units, strict=True)]


class UnitFiles(UnitReader):
    """A `Disk` in a directory that one process uses at a time, for at most `budget` bytes of units.

    A file has a tensor `group N`, uint8 [units, bytes per unit], for each group, in the safetensors format. Its
    metadata has the format, the version, the `identity` of the units, the content of each (`Content.name`) and a CRC-32
    of each unit with its content. Files never change, except that an erasure overwrites units to which nobody
    refers, and file names are never used twice, so an old index refers to the units for which it was written, or to
    missing files.
    """

    def __init__(self, directory: Path, budget: int, identity: str = "", watcher: Watcher | None = None) -> None:
        """Files that another process has left stay until `take_over`. `watcher`: is notified of changes. Raises
        `ConfigError`."""
        super().__init__(directory, identity)
        self._watcher = watcher
        self.budget = budget
        self._identity = identity
        self._used = 0
        self._counting = threading.Lock()  # guards `_used`, since one thread writes while another removes
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
        self._leaving: deque[Path] = deque()  # files to be removed, usually in another thread than the engine's
        self._removing = threading.Lock()  # held while they are removed
        self._direct = DirectWriter()
        self.index = StateIndex(directory / INDEX, watcher)

    def become(self, identity: str, *, keep: bool = False) -> None:
        self._identity = identity
        self._readable = {identity, *(self._readable if keep else ())}

    def write(self, units: Mapping[int, Sequence[NamedUnit]], *, cached: bool = True) -> UnitFile:
        size = sum(unit.data.nbytes for group in units.values() for unit in group)
        with self._counting:
            if self._used + size > self.budget:
                raise DiskFailed("full", f"{size} bytes do not fit beside {self._used} of {self.budget}")
            self._used += size
        path = self._directory / f"{secrets.token_hex(12)}{SUFFIX}"
        present = {_tensor(group): same for group, same in units.items() if same}
        rows = list(chain(*present.values()))
        try:
            self._remove_leaving()  # so that their room can be used
            with open_private(path) as file:
                parts: Parts = [_header_of(present, self._identity), *(row.data.data for row in rows)]
                (write_all if cached else self._direct.write_all)(file.fileno(), parts)
        except (OSError, MemoryError) as error:
            self._unlink(path)
            self._gave_back(size)
            cause = "full" if self._lacks(size) else "write"
            raise DiskFailed(cause, f"{path} could not be written: {error}") from error
        return UnitFile(path.name, size, len(rows), len(rows))

    def _lacks(self, size: int) -> bool:
        """Whether the file system has no room for `size` bytes."""
        with suppress(OSError):
            return shutil.disk_usage(self._directory).free < size
        return False

    def overwrite(self, file: UnitFile, kept: Collection[tuple[int, int]]) -> int:
        path = self._directory / file.name
        try:
            with open_regular(path, writable=True) as opened:
                file.units, file.overwritten = _overwrite(opened, kept)
        except _UNREADABLE as error:
            raise DiskFailed("write", f"{path} could not be overwritten: {error}") from error
        finally:
            if self._watcher is not None:
                self._watcher.overwritten(file.name)
        return file.overwritten

    def remove(self, file: UnitFile) -> None:
        self._gave_back(file.size)
        self._leaving.append(self._directory / file.name)
        self._readers.submit(self._remove_leaving)

    def _remove_leaving(self) -> None:
        with self._removing, suppress(IndexError):
            while True:
                self._unlink(self._leaving.popleft())

    @staticmethod
    def _unlink(path: Path) -> None:
        """Removes a file if that is possible; otherwise `take_over` of another process removes it later."""
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _gave_back(self, size: int) -> None:
        with self._counting:
            self._used -= size

    def files(self) -> set[str]:
        self._remove_leaving()
        return {entry.name for entry in self._entries() if entry.is_file(follow_symlinks=False)}

    def _entries(self, prefix: str = "", suffix: str = SUFFIX) -> list[os.DirEntry[str]]:
        with os.scandir(self._directory) as found:
            return [entry for entry in found if entry.name.startswith(prefix) and entry.name.endswith(suffix)]

    def take_over(self, files: Iterable[UnitFile]) -> None:
        taken = {file.name: file.size for file in files}
        self._used += sum(taken.values())
        self._remove({entry.name for entry in self._entries()} - taken.keys())
        self._readers.submit(self._read_ahead, taken)

    def _read_ahead(self, sizes: dict[str, int]) -> None:
        """Lets the system read the last of these files, those of the sessions used last, into its cache."""
        if sys.platform != "linux":
            return
        rest = READ_AHEAD
        for name, size in islice(reversed(sizes.items()), MOST_AHEAD):
            rest -= size
            if rest < 0:
                return
            with suppress(OSError), open_regular(self._directory / name) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._unlink(self._directory / name)

    def close(self, *, keep: bool = False) -> None:
        self.index.close()
        super().close()
        if not keep:
            self._remove(entry.name for entry in (*self._entries(), *self._entries(INDEX, "")))
        os.close(self._lock)


def _tensor(group: int) -> str:
    return f"group {group}"


def _group(tensor: str) -> int:
    return int(tensor.removeprefix("group "))


def _consecutive(rows: Sequence[int], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges [begin, stop) of [first, end) in which each row follows the one before."""
    begin = first
    for at in range(first + 1, end + 1):
        if at == end or rows[at] != rows[at - 1] + 1:
            yield begin, at
            begin = at


def _checksum(content: Content, data: Bytes) -> int:
    """Returns a checksum over a unit and its content, which detects a change of either."""
    return zlib.crc32(data.data, zlib.crc32(content.before + content.tokens))


def _header_of(units: Mapping[str, Sequence[NamedUnit]], identity: str) -> bytes:
    """Returns the header of a safetensors file with these units, by tensor, which follow in this order. The library's
    own writer takes whole tensors, into which all units would have to be copied."""
    names = {name: [row.content.name for row in rows] for name, rows in units.items()}
    sums = {name: [_checksum(*row) for row in rows] for name, rows in units.items()}
    metadata = {"format": FORMAT, "version": VERSION, "identity": identity}
    header: dict[str, Any] = {
        "__metadata__": {**metadata, "contents": json.dumps(names), "checksums": json.dumps(sums)}
    }
    end = 0
    for name, rows in units.items():
        begin, size = end, rows[0].data.nbytes
        end += len(rows) * size
        header[name] = {"dtype": "U8", "shape": [len(rows), size], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(_LENGTH, "little") + text


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file, and the offset of its tensors. Raises `ValueError`."""
    length = int.from_bytes(file.read(_LENGTH), "little")
    if length > min(MAX_HEADER, os.fstat(file.fileno()).st_size - _LENGTH):
        raise ValueError("its header is truncated or too long")
    return json.loads(file.read(length)), _LENGTH + length


def _overwrite(file: BinaryIO, kept: Collection[tuple[int, int]]) -> tuple[int, int]:
    """Overwrites the units of a file, with their names and checksums, that are not in `kept`, by group and row; the
    header keeps its length. Returns the number of all units and of those overwritten. Raises `OSError` and
    `ValueError`."""
    header, begin = _header(file)
    names, sums = (json.loads(header["__metadata__"][each]) for each in ("contents", "checksums"))
    count = overwritten = 0
    for tensor, about in header.items():
        if tensor == "__metadata__":
            continue
        group, (rows, size), start = _group(tensor), about["shape"], begin + int(about["data_offsets"][0])
        count += rows
        for row in range(rows):
            if (group, row) not in kept:
                names[tensor][row], sums[tensor][row] = "0" * len(names[tensor][row]), 0
                _write_all_at(file.fileno(), bytes(size), start + row * size)
                overwritten += 1
    header["__metadata__"] |= {"contents": json.dumps(names), "checksums": json.dumps(sums)}
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > begin - _LENGTH:
        raise ValueError("its header was not written by this program")
    _write_all_at(file.fileno(), text.ljust(begin - _LENGTH), _LENGTH)
    os.fsync(file.fileno())
    return count, overwritten


def _write_all_at(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
