"""The time a thread runs Python before it hands Python's lock to a waiting thread."""

from __future__ import annotations

import sys

SECONDS = 0.0005
"""Python's default, 5 ms, is as long as a step. A thread that sends to sixteen sockets would wait for the lock sixteen
times while another one computes."""


def switch_often() -> None:
    """Shortens that time; for processes that run only Tenuto."""
    sys.setswitchinterval(SECONDS)
