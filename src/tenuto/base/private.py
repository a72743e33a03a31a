"""Files with what was said in sessions: only their owner may read those that we create, whatever the umask."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

FILE, DIRECTORY = 0o600, 0o700


def open_private(path: Path) -> BinaryIO:
    """Open a file to write it from its start. One that is there keeps its mode. Raises `OSError`."""
    return open(path, "wb", opener=_opener)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it, unbuffered. Raises `OSError`, also for a pipe or a device, which could keep its
    reader waiting for ever."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(file, "rb", buffering=0)


def create_private(path: Path) -> None:
    """See that there is such a file, for somebody else to open. Raises `OSError`."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE))


def make_private_directory(path: Path) -> None:
    """See that there is such a directory. Raises `OSError`."""
    path.mkdir(DIRECTORY, parents=True, exist_ok=True)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, FILE)
