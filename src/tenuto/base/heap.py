"""Returns free memory to the system, if the C library can (glibc)."""

from __future__ import annotations

import ctypes
import resource
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

LARGE_BLOCK = 2**18
"""Bytes from which on a block is a mapping of its own, so that it goes back once it is free."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # see mallopt(3)
MUCH = 2**25
"""Bytes by which freed memory, or all memory, has to grow before it is given back."""
LOOK_SECONDS = 2.0
_PAGES, _PAGE_BYTES = Path("/proc/self/statm"), resource.getpagesize()


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


class HeapKeeper:
    """Gives freed memory back some seconds after it was freed, whatever freed it: work that needs much memory looks
    after that itself, but what it has made may be freed much later, by the engine. For processes that are ours alone.
    """

    def __init__(self) -> None:
        self._free, self._resident = free_bytes(), _resident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenuto-heap", daemon=True)

    def start(self) -> None:
        """Look again and again, in a thread."""
        self._thread.start()

    def look(self) -> bool:
        """Give memory back if much was freed since it was given back last, or may have been. Returns whether."""
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

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def free_bytes() -> int:
    """Memory that was freed and that the C library keeps; it may have been given back. 0 if that is not known."""
    usage = _function("mallinfo2")
    if usage is None:
        return 0
    usage.restype = _Usage
    return int(usage().fordblks)


def _resident() -> int:
    """The process's memory, in bytes. 0 if that is not known."""
    with suppress(OSError, ValueError, IndexError):
        return int(_PAGES.read_text().split()[1]) * _PAGE_BYTES
    return 0


@cache
def _function(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return] # which a library's functions are
    except (OSError, AttributeError):
        return None
