"""Returns freed memory to the system, if the C library can (glibc)."""

from __future__ import annotations

import ctypes
import resource
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

LARGE_BLOCK = 2**21
"""Blocks of at least this many bytes are mapped separately, so that freeing one returns it to the system. Smaller ones
can be used again, which is cheaper: each new page takes a microsecond or more, several times as long as copying it.
Messages with state of sessions that move are smaller."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8  # see mallopt(3)
MUCH = 2**23
"""Growth in bytes of freed memory, or of the whole process, after which freed memory is returned. Returning this much
takes about a millisecond; up to about twice as much is not returned."""
LOOK_SECONDS = 2.0
_PAGES, _PAGE_BYTES = Path("/proc/self/statm"), resource.getpagesize()


def give_back() -> None:
    """Makes the C library return the freed memory that it keeps for reuse. Takes some milliseconds for each 100 MB
    returned, during which other threads cannot allocate."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def return_large_blocks() -> None:
    """Makes the C library map blocks from `LARGE_BLOCK` on separately; for processes that run only Tenuto. By default
    it stops doing so for blocks of up to 32 MiB once one was freed, and cannot return those that lie between small
    blocks in use."""
    adjust = _function("mallopt")
    if adjust is not None:
        adjust(_MMAP_THRESHOLD, LARGE_BLOCK)
        adjust(_TRIM_THRESHOLD, MUCH)


def share_one_arena() -> None:
    """Makes all threads share one arena of the C library, for processes that run only Tenuto; called before threads
    start. A thread's own arena keeps freed memory at its end, which `give_back` does not reach."""
    adjust = _function("mallopt")
    if adjust is not None:
        adjust(_ARENA_MAX, 1)


class HeapKeeper:
    """Returns freed memory to the system some seconds after it was freed. Code that needs much memory calls `give_back`
    when it is done, but the engine may free its results much later. For processes that run only Tenuto."""

    def __init__(self) -> None:
        self._free, self._resident = free_bytes(), _resident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenuto-heap", daemon=True)

    def start(self) -> None:
        """Starts the thread that checks repeatedly."""
        self._thread.start()

    def look(self) -> bool:
        """Calls `give_back` if much memory was, or may have been, freed since the last time. Returns whether it did."""
        free, resident = free_bytes(), _resident()
        if free < self._free + MUCH and (free < MUCH or resident < self._resident + MUCH):
            self._free, self._resident = min(free, self._free), min(resident, self._resident)
            return False
        give_back()
        self._free, self._resident = free_bytes(), _resident()
        return True

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self.look()


class _Usage(ctypes.Structure):
    """See mallinfo2(3)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def free_bytes() -> int:
    """Returns the bytes that the C library counts as free, including those already returned; 0 if unknown."""
    usage = _function("mallinfo2")
    if usage is None:
        return 0
    usage.restype = _Usage
    return int(usage().fordblks)


def _resident() -> int:
    """Returns the resident memory of the process in bytes; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(_PAGES.read_text().split()[1]) * _PAGE_BYTES
    return 0


@cache
def _function(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return] # which a library's functions are
    except (OSError, AttributeError):
        return None
