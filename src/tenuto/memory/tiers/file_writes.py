"""Writing new files, through the system's cache or past it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from mmap import mmap

import numpy as np

PARTS = 256
"""The number of parts of a file that are written in one call; systems allow 1,024 or more."""
STAGED = 2**20
"""The number of bytes that are written past the cache in one call: few enough to stay in a processor's own cache."""
BLOCK = 4096
"""The bytes to whose multiples addresses and lengths are aligned; file systems ask for this or less."""
_DIRECT = getattr(os, "O_DIRECT", 0)

Parts = Sequence[bytes | memoryview]


def write_all(file: int, parts: Parts) -> None:
    """Writes the parts in few calls: between two of them the thread waits for the engine's. Raises `OSError`."""
    for first in range(0, len(parts), PARTS):
        left = [memoryview(part).cast("B") for part in parts[first : first + PARTS]]
        while left:
            written = os.writev(file, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]


class DirectWriter:
    """Writes files past the system's cache (`O_DIRECT`): what nobody will read soon takes no room there, and no time
    to be copied there and written back. Where that is impossible, it writes through the cache."""

    def __init__(self) -> None:
        self._room = np.frombuffer(mmap(-1, STAGED), np.uint8)  # aligned, and its memory is mapped only once
        self._writing = threading.Lock()  # held while the room is in use

    def write_all(self, file: int, parts: Parts) -> None:
        """Writes the parts to an empty file. Raises `OSError`."""
        with self._writing:
            _set_direct(file, on=True)
            filled = 0
            for part in parts:
                left = np.frombuffer(part, np.uint8)
                while len(left):
                    taken = min(len(left), STAGED - filled)
                    self._room[filled : filled + taken] = left[:taken]  # other threads run meanwhile
                    left, filled = left[taken:], filled + taken
                    if filled == STAGED:
                        self._write(file, 0, filled)
                        filled = 0
            whole = filled // BLOCK * BLOCK
            self._write(file, 0, whole)
            _set_direct(file, on=False)
            self._write(file, whole, filled)

    def _write(self, file: int, begin: int, end: int) -> None:
        """Writes bytes [begin, end) of the room."""
        while begin < end:
            try:
                begin += os.write(file, self._room[begin:end].data)
            except OSError as error:
                if error.errno != errno.EINVAL or not _set_direct(file, on=False):
                    raise


def _set_direct(file: int, *, on: bool) -> bool:
    """Lets writes to a file go past the cache or not. Returns whether that changed anything."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if bool(flags & _DIRECT) == on or not _DIRECT:
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags ^ _DIRECT)
    except OSError:  # the file system does not support it
        return False
    return True
