"""A wait for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not become true"
        time.sleep(0.01)


def files_become(directory: Path, suffix: str, number: int) -> None:
    """Waits until the directory has this number of files with a suffix."""
    eventually(lambda: len(list(directory.glob(f"*{suffix}"))) == number)
