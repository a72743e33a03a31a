"""The frequency of Python's search for garbage in cycles."""

from __future__ import annotations

import gc

ALLOCATIONS = 10_000
"""Allocations less deallocations before the next search. Events kept for their readers reach Python's default, 700,
every few steps, and no cycles are found."""


def look_less_often() -> None:
    """Raises the threshold; for processes that run only Tenuto."""
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
