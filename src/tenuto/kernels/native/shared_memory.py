"""Memory for packed weights: private, or in a file that several processes map, so that they have one copy."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SUFFIX = ".weights"
_PART = ".part"


class WeightMemory(Protocol):
    """Where chunks of packed weights lie. `filled`: whether they have their contents already, and must not be
    written."""

    filled: bool

    def chunk(self, size: int) -> Bytes:
        """Returns the next chunk, uint8 [size], of zeros unless `filled`. Raises `OSError`."""
        ...


class PrivateMemory:
    """Memory of this process, in large pages where the system has them."""

    filled = False

    def chunk(self, size: int) -> Bytes:
        """See `WeightMemory.chunk`."""
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, np.uint8)


class SharedMemory:
    """Memory in a file; see `shared_memory`. Chunks are those that the process got which filled the file, if they are
    asked for in the same order.

    Invariant: a file without `_PART` in its name is complete, and nobody writes to it. Each process that maps it holds
    a shared lock on it.
    """

    def __init__(self, file: int, *, filled: bool) -> None:
        """`file`: its descriptor, which is closed with this object."""
        self.filled = filled
        self._file = file
        self._end = 0

    def __del__(self) -> None:
        os.close(self._file)

    def chunk(self, size: int) -> Bytes:
        """See `WeightMemory.chunk`."""
        start, self._end = self._end, self._end + size
        if self.filled:
            if os.fstat(self._file).st_size < self._end:
                raise OSError("a file of packed weights is shorter than it was")
            return np.frombuffer(mmap.mmap(self._file, size, prot=mmap.PROT_READ, offset=start), np.uint8)
        if hasattr(os, "posix_fallocate"):  # a write to a page without room on the disk would end the process
            os.posix_fallocate(self._file, start, size)
        else:
            os.ftruncate(self._file, self._end)
        return np.frombuffer(mmap.mmap(self._file, size, offset=start), np.uint8)


@contextmanager
def shared_memory(directory: Path, key: str) -> Iterator[SharedMemory]:
    """Gives memory in a file of `directory` that all processes with the same `key` map. The first one fills it within
    the block, while others wait; if the block fails, so that the next one does, the file is removed. Files of other
    keys that nobody maps are removed then, too. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{key}{SUFFIX}"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            file = os.open(path, os.O_RDONLY)
            fcntl.flock(file, fcntl.LOCK_SH)
            fcntl.flock(lock, fcntl.LOCK_UN)
            yield SharedMemory(file, filled=True)
            return
        _remove_unused(directory)
        part = path.with_suffix(_PART)
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        memory = SharedMemory(file, filled=False)
        try:
            yield memory
            os.fsync(file)  # after a crash of the machine, a file with the final name might otherwise be zeros
            part.rename(path)
        except BaseException:
            part.unlink()
            raise


def _remove_unused(directory: Path) -> None:
    """Removes files that no process maps; those that are not complete are of processes that have ended."""
    for path in [*directory.glob(f"*{SUFFIX}"), *directory.glob(f"*{_PART}")]:
        file = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except BlockingIOError:
            pass
        finally:
            os.close(file)
