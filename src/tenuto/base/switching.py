"""How long a thread runs Python before it lets another one run that waits for Python's lock."""

from __future__ import annotations

import sys

SECONDS = 0.0005
"""Python's default, 5 ms, is as long as a step: a thread that sends to sixteen sockets waits for the lock sixteen times
while another one computes."""


def switch_often() -> None:
    """For processes that are ours alone."""
    sys.setswitchinterval(SECONDS)
