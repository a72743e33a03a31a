"""Freed memory is returned to the system."""

from __future__ import annotations

import pytest

from tenuto.base import heap
from tenuto.base.heap import MUCH, HeapKeeper


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
