"""The time after which a thread that runs Python hands the global interpreter lock (GIL) to a waiting thread."""

from __future__ import annotations

import sys

SECONDS = 0.0005
"""Python's default, 5 ms, is as long as a step. While another thread computes, one that sends to sixteen sockets would
wait that long sixteen times."""


def switch_often() -> None:
    """Shortens the time to `SECONDS`; for processes that run only Tenuto."""
    sys.setswitchinterval(SECONDS)
