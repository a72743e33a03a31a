"""The frequency of Python's cyclic garbage collection."""

from __future__ import annotations

import gc

ALLOCATIONS = 10_000
"""Allocations minus deallocations that start a collection. At Python's default, 700, events that wait for their readers
would start one every few steps, and it would find no cycles."""


def look_less_often() -> None:
    """Raises the collector's threshold to `ALLOCATIONS`; for processes that run only Tenuto."""
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
