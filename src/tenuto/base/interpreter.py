"""Settings of Python's interpreter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 10_000
"""Allocations minus deallocations that start a garbage collection. At Python's default, 700, events that wait for their
readers would start one every few steps, and it would find no cycles."""
SWITCH_SECONDS = 0.0005
"""The time after which a thread hands the global interpreter lock (GIL) to a waiting one. Python's default, 5 ms, is as
long as a step. While another thread computes, one that sends to sixteen sockets would wait that long sixteen times."""


def configure_interpreter() -> None:
    """Collects garbage less often, and switches threads more often; for processes that run only Tenuto."""
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
    sys.setswitchinterval(SWITCH_SECONDS)


def exempt_existing_objects(*, collect: bool = True) -> None:
    """Exempts all objects that exist now from collections, for processes that run only Tenuto, once they are ready. It
    would take 50 ms to look through modules, schemas and vocabulary, half a second with 100,000 sessions, and meanwhile
    no thread runs Python. `collect`: whether to collect the garbage among them first."""
    if collect:
        gc.collect()
    gc.freeze()


@contextmanager
def without_collections() -> Iterator[None]:
    """Collects garbage before the block and none during it, for code that makes many objects that all stay: each
    collection would look through all of them so far."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
