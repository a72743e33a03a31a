"""Files with what was said in sessions: only their owner may read those that we create, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

FILE, DIRECTORY = 0o600, 0o700


def open_private(path: Path) -> BinaryIO:
    """Open a file to write it from its start. One that is there keeps its mode. Raises `OSError`."""
    return open(path, "wb", opener=_opener)


def create_private(path: Path) -> None:
    """See that there is such a file, for somebody else to open. Raises `OSError`."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE))


def make_private_directory(path: Path) -> None:
    """See that there is such a directory. Raises `OSError`."""
    path.mkdir(DIRECTORY, parents=True, exist_ok=True)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, FILE)
