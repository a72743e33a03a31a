"""A cache of compiled grammars, bounded by their estimated memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from tenuto.base.tools.grammar import Grammar

T = TypeVar("T")

MAX_BYTES = 2**26
"""Bound on the estimated memory of all cached grammars."""
SOURCE_BYTES = 100
"""Bytes of a compiled grammar per character of its source; JSON schemas were measured at 50 to 95."""
LEAST_BYTES = 2**18
"""Memory of the smallest compiled grammar."""
GROWTH_BYTES_A_SECOND = 4e8
"""Upper bound on the growth of an automaton per second of thread time spent computing masks; 20 to 360 MB were
measured."""
MAX_GROWTH = 2**23
"""Growth, in bytes, after which a grammar is compiled anew, which takes a millisecond for most grammars."""


class Growth:
    """Estimated growth of the automaton of one compiled grammar. Thread-safe.

    The library extends the automaton, which all matchers of the grammar share, while it computes masks, and fails at
    250,000 states. It does not report the number of states or their memory, so we estimate the growth from the time
    spent. Invariant: `bytes` only grows; under `_lock`.
    """

    def __init__(self, compile_seconds: float = 0.0, outgrown: Callable[[], None] = lambda: None) -> None:
        """`compile_seconds`: the time compiling took; the longer it took, the further the automaton may grow.
        `outgrown`: called once, when the limit is exceeded."""
        self.bytes = 0.0
        self._tell = outgrown
        self._limit = min(max(MAX_GROWTH, compile_seconds * GROWTH_BYTES_A_SECOND), MAX_BYTES / 2)
        self._lock = threading.Lock()

    @property
    def outgrown(self) -> bool:
        """Whether the limit is exceeded, so that later turns should compile the grammar anew."""
        return self.bytes > self._limit

    def add(self, seconds: float) -> None:
        """Records that a thread spent `seconds` computing masks."""
        with self._lock:
            before = self.outgrown
            self.bytes += seconds * GROWTH_BYTES_A_SECOND
            after = self.outgrown
        if after and not before:
            self._tell()


class CompiledGrammars(Generic[T]):
    """A cache from grammars to their compiled form that evicts the least recently used. Thread-safe.

    Invariant: `_kept` is ordered by last use, the most recent at the end; under `_lock`.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Grammar, tuple[T, Growth]] = OrderedDict()
        self._lock = threading.RLock()

    def __contains__(self, grammar: Grammar) -> bool:
        with self._lock:
            return grammar in self._kept

    def find(self, grammar: Grammar) -> T | None:
        """Returns the compiled grammar, or None if it is not cached."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is None:
                return None
            self._kept.move_to_end(grammar)
            return found[0]

    def keep(self, grammar: Grammar, compiled: T, growth: Growth) -> None:
        """Caches a compiled grammar, evicting the least recently used ones if space is short."""
        with self._lock:
            self._kept.pop(grammar, None)
            self._kept[grammar] = compiled, growth
            self.trim()

    def trim(self) -> None:
        """Evicts grammars that have outgrown their limit, then the least recently used ones until all fit."""
        with self._lock:
            for grammar in [grammar for grammar, (_, growth) in self._kept.items() if growth.outgrown]:
                del self._kept[grammar]
            size = sum(_bytes_of(grammar, growth) for grammar, (_, growth) in self._kept.items())
            while size > MAX_BYTES and self._kept:
                oldest, (_, growth) = self._kept.popitem(last=False)
                size -= _bytes_of(oldest, growth)


def _bytes_of(grammar: Grammar, growth: Growth) -> float:
    return LEAST_BYTES + SOURCE_BYTES * len(grammar.source) + growth.bytes
