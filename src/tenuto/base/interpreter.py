"""Settings of Python's interpreter."""

from __future__ import annotations

import gc
import sys

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


def exempt_existing_objects() -> None:
    """Exempts all objects that exist now from collections, for processes that run only Tenuto, once they are ready. It
    would take 50 ms to look through modules, schemas and vocabulary, and meanwhile no thread runs Python."""
    gc.collect()
    gc.freeze()
