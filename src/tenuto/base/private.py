"""Files with contents of sessions. Only their owner may read those created here, regardless of the umask."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

FILE, DIRECTORY = 0o600, 0o700


def open_private(path: Path) -> BinaryIO:
    """Opens a file for writing; an existing one is emptied and keeps its mode. Raises `OSError`."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE))


def open_regular(path: Path, *, writable: bool = False) -> BinaryIO:
    """Opens a regular file for unbuffered reading, or also for changing it. Raises `OSError`, also for a pipe or a
    device, which could block its reader forever."""
    file = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(file, "r+b" if writable else "rb", buffering=0)


def create_private(path: Path) -> None:
    """Creates an empty file, unless one exists, for other code to open. Raises `OSError`."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE))


def make_private_directory(path: Path) -> None:
    """Creates a directory if it does not exist. Raises `OSError`."""
    path.mkdir(DIRECTORY, parents=True, exist_ok=True)
