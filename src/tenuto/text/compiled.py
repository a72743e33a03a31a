"""Compiled grammars that are kept for later turns, by the memory they take."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from tenuto.base.grammar import Grammar

T = TypeVar("T")

MAX_BYTES = 2**26
"""Of all compiled grammars that are kept, as estimated."""
SOURCE_BYTES = 100
"""Memory that a character of a grammar's source takes when it is compiled: JSON schemas take 50 to 95."""
LEAST_BYTES = 2**18
"""Memory of the smallest compiled grammar."""
GROWTH_BYTES_A_SECOND = 4e8
"""How fast an automaton grows while masks are computed from it, at most: measured were 20 to 360 MB for every second of
a thread's time."""
MAX_GROWTH = 2**23
"""Bytes that an automaton grows before it is compiled anew, which takes a millisecond for most grammars."""


class Growth:
    """How much the automaton of one compiled grammar has grown. The library builds it while masks are computed, for all
    matchers of the grammar together, and gives up when it has 250,000 states. It does not say how many it has or how
    much memory they take, so the time is counted. For any thread.

    Invariant: `bytes` only grows; under `_lock`.
    """

    def __init__(self, compile_seconds: float = 0.0, outgrown: Callable[[], None] = lambda: None) -> None:
        """`compile_seconds`: a grammar that took longer to compile is kept longer. `outgrown`: called once it has
        outgrown its limit."""
        self.bytes = 0.0
        self._tell = outgrown
        self._limit = min(max(MAX_GROWTH, compile_seconds * GROWTH_BYTES_A_SECOND), MAX_BYTES / 2)
        self._lock = threading.Lock()

    @property
    def outgrown(self) -> bool:
        """Whether later turns should have the grammar compiled anew."""
        return self.bytes > self._limit

    def add(self, seconds: float) -> None:
        """A thread has computed masks for so long."""
        with self._lock:
            before = self.outgrown
            self.bytes += seconds * GROWTH_BYTES_A_SECOND
            after = self.outgrown
        if after and not before:
            self._tell()


class CompiledGrammars(Generic[T]):
    """The grammars used last, each with what was compiled of it. For any thread.

    Invariant: `_kept` has them in the order of their use, the latest at the end; under `_lock`.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Grammar, tuple[T, Growth]] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, grammar: Grammar) -> bool:
        with self._lock:
            return grammar in self._kept

    def find(self, grammar: Grammar) -> T | None:
        """The compiled grammar, if it is kept."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is None:
                return None
            self._kept.move_to_end(grammar)
            return found[0]

    def keep(self, grammar: Grammar, compiled: T, growth: Growth) -> None:
        """Keep it in place of those used longest ago."""
        with self._lock:
            self._kept.pop(grammar, None)
            self._kept[grammar] = compiled, growth
            self._trim()

    def trim(self) -> None:
        """Forget grammars that take too much memory by now."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        for grammar in [grammar for grammar, (_, growth) in self._kept.items() if growth.outgrown]:
            del self._kept[grammar]
        size = sum(_bytes_of(grammar, growth) for grammar, (_, growth) in self._kept.items())
        while size > MAX_BYTES and self._kept:
            oldest, (_, growth) = self._kept.popitem(last=False)
            size -= _bytes_of(oldest, growth)


def _bytes_of(grammar: Grammar, growth: Growth) -> float:
    return LEAST_BYTES + SOURCE_BYTES * len(grammar.source) + growth.bytes
