"""Gives memory that is free back to the system."""

from __future__ import annotations

import ctypes
from functools import cache


def give_back() -> None:
    """What the C library keeps of freed memory for later goes back to the system, where it can be asked to do so
    (glibc). Takes some milliseconds, during which other threads cannot allocate."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
