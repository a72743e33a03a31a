"""How often Python looks for garbage in cycles."""

from __future__ import annotations

import gc

ALLOCATIONS = 10_000
"""Objects that have come and not gone since the last look. Python's default, 700, is reached every few steps by events
that are kept for their readers, and no cycles are found."""


def look_less_often() -> None:
    """For processes that are ours alone."""
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
