"""A check that the files we leave are private."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def open_to_others(directory: Path) -> Iterator[str]:
    """Yields paths below a directory that anyone but the owner may read, write or enter."""
    for path in directory.rglob("*"):
        mode = path.lstat().st_mode & 0o777
        if mode & 0o077:
            yield f"{path.relative_to(directory)} {mode:o}"
