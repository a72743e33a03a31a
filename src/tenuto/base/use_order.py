"""The order in which things make room for others: by when they are used next, as far as one can tell."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class UseOrder(Generic[T]):
    """Items in the order in which they make room. An item without an expectation is expected to rest as long as it has
    rested already. One that is expected at some time rests until then; if the time has passed, as long as it is late.
    The item that is expected to rest longest comes first. Without expectations this is the least recently used.

    Invariant: `_used` has the items without an expectation, in the order of their last use; `_expected` has the others,
    sorted by the time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._used: dict[T, float] = {}
        self._expected: list[tuple[float, int, T]] = []
        self._places: dict[T, tuple[float, int]] = {}  # the beginnings of the entries in `_expected`
        self._entries = count()

    def __len__(self) -> int:
        return len(self._used) + len(self._expected)

    def __contains__(self, item: object) -> bool:
        return item in self._used or item in self._places

    def __iter__(self) -> Iterator[T]:
        """Yields all items, in any order."""
        yield from self._used
        yield from self._places

    def add(self, item: T, expected: float | None = None) -> None:
        """Adds an item that is used now, or moves it. `expected`: the time at which it is used next."""
        self.discard(item)
        if expected is None:
            self._used[item] = self._now()
            return
        place = self._places[item] = expected, next(self._entries)
        insort(self._expected, (*place, item))

    def discard(self, item: T) -> None:
        """Removes an item, if it is there."""
        place = self._places.pop(item, None)
        if place is not None:
            del self._expected[bisect_left(self._expected, place)]  # entries begin with their place
        else:
            self._used.pop(item, None)

    def longest_first(self, least: float = 0.0) -> Iterator[T]:
        """Yields the items that are expected to rest for at least `least` seconds, in their order. They must not change
        while this is read."""
        now, used = self._now(), iter(self._used.items())
        oldest = next(used, None)
        low, high = 0, len(self._expected)
        while oldest is not None or low < high:
            age = now - oldest[1] if oldest is not None else -1.0
            late = now - self._expected[low][0] if low < high else -1.0
            early = self._expected[high - 1][0] - now if low < high else -1.0
            if max(age, late, early) < least:
                return
            if oldest is not None and age >= max(late, early):
                yield oldest[0]
                oldest = next(used, None)
            elif late > early:
                yield self._expected[low][2]
                low += 1
            else:
                high -= 1
                yield self._expected[high][2]
