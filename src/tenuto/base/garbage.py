"""The cost of Python's cyclic garbage collection."""

from __future__ import annotations

import gc

ALLOCATIONS = 10_000
"""Allocations minus deallocations that start a collection. At Python's default, 700, events that wait for their readers
would start one every few steps, and it would find no cycles."""


def look_less_often() -> None:
    """Raises the collector's threshold to `ALLOCATIONS`; for processes that run only Tenuto."""
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])


def exempt_existing_objects() -> None:
    """Exempts all objects that exist now from collections, for processes that run only Tenuto, once they are ready. It
    would take 50 ms to look through modules, schemas and vocabulary, and meanwhile no thread runs Python."""
    gc.collect()
    gc.freeze()
