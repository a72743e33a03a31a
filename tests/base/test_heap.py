"""Freed memory is returned to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tenuto.base import heap
from tenuto.base.heap import MUCH, HeapKeeper

THREADS = """
import ctypes, sys, threading
from tenuto.base.heap import share_one_arena
if sys.argv[1] == "shared":
    share_one_arena()
kept, at_once = [], threading.Barrier(4)
def take():
    at_once.wait()
    kept.append([bytes(1000) for _ in range(100)])
    at_once.wait()
threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""
"""Takes memory in four threads at once, and prints the C library's arenas."""


class Heap:
    """The heap as the keeper sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = self.resident = 10 * MUCH
        self.returned = 0
        monkeypatch.setattr(heap, "free_bytes", lambda: self.free)
        monkeypatch.setattr(heap, "_resident", lambda: self.resident)
        monkeypatch.setattr(heap, "give_back", self.give_back)

    def give_back(self) -> None:
        self.returned += 1


def test_memory_freed_long_after_its_work_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Heap(monkeypatch)
    keeper = HeapKeeper()
    seen.resident += 3 * MUCH  # taken
    seen.free -= 2 * MUCH
    keeper.look()
    before = seen.returned
    seen.free += 2 * MUCH  # freed, but still the process's
    assert keeper.look()
    seen.resident -= 3 * MUCH
    assert not keeper.look()
    assert seen.returned == before + 1


def test_nothing_is_returned_while_memory_stays_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Heap(monkeypatch)
    keeper = HeapKeeper()
    seen.free += MUCH - 1
    assert not keeper.look()
    seen.free -= MUCH
    assert not keeper.look()
    assert seen.returned == 0


def test_memory_taken_and_freed_between_two_looks_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Heap(monkeypatch)
    keeper = HeapKeeper()
    seen.resident += MUCH
    assert keeper.look()
    assert not keeper.look()


@pytest.mark.skipif(heap._function("malloc_info") is None, reason="the C library is not glibc")
def test_threads_can_share_one_arena() -> None:
    arenas = {}
    for how in ("shared", "apart"):
        command = [sys.executable, "-c", THREADS, how]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        arenas[how] = told.stdout.count("<heap nr=")
    assert arenas["shared"] == 1 < arenas["apart"]
