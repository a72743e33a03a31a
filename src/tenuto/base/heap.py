"""Returns free memory to the system, if the C library can (glibc)."""

from __future__ import annotations

import ctypes
from functools import cache

LARGE_BLOCK = 2**18
"""Bytes from which on a block is a mapping of its own, so that it goes back once it is free."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # see mallopt(3)


def give_back() -> None:
    """Have the C library return the freed memory that it keeps for later. Takes some milliseconds, during which other
    threads cannot allocate."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def return_large_blocks() -> None:
    """For processes that are ours alone and need large blocks now and then. By default the C library keeps blocks of up
    to 32 MiB as soon as one was freed, and finds nothing to give back where small ones that live on lie between."""
    adjust = _function("mallopt")
    if adjust is not None:
        adjust(_MMAP_THRESHOLD, LARGE_BLOCK)
        adjust(_TRIM_THRESHOLD, LARGE_BLOCK)


@cache
def _function(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return] # which a library's functions are
    except (OSError, AttributeError):
        return None
