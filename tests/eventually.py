"""A wait for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)
