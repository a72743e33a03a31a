"""Text work beside the engine's thread. Long work does not hold up short work, and tenants do not hold up each
other."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from tenuto.base.heap import give_back

log = logging.getLogger("tenuto.runtime")

LONG = 2**15
"""Characters, or tokens, from which on work is long."""
LARGE = 2**18
"""After one piece of work on so much, free memory is returned to the system."""
MUCH = 2**22
"""Likewise after several on so much together."""


LARGE_GRAMMAR = 2**12
"""Characters of a grammar's source from which on compiling it may take seconds."""


class Work(NamedTuple):
    """`size`: in characters or tokens. `do` sees to its errors itself."""

    size: int
    do: Callable[[], None]


class Lane:
    """A thread that does one thing after the other: for tenants in turn, for one tenant in order.

    Invariant: `_waiting` has the tenants for which something waits, the next one first; under `_changed`.
    """

    def __init__(self, name: str) -> None:
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tenuto-text-{name}", daemon=True)
        self._thread.start()

    def put(self, size: int, do: Callable[[], None], tenant: str = "") -> None:
        """Have something done; see `Work`."""
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(Work(size, do))
            self._changed.notify()

    def close(self) -> None:
        """Do what is waiting, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        done = 0
        while (work := self._next()) is not None:
            size = work.size
            done += size
            try:
                work.do()
            except Exception:  # a mistake of ours; others wait
                log.exception("text work failed")
            del work  # the next may be long in coming
            if size >= LARGE or done >= MUCH:
                give_back()
                done = 0

    def _next(self) -> Work | None:
        """The next thing to do, or `None` at the end."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            tenant, works = self._waiting.popitem(last=False)
            work = works.popleft()
            if works:
                self._waiting[tenant] = works
            return work


class Lanes:
    """One for short work, one for long work, two for work with a grammar to be compiled, small or large, and one for
    files."""

    def __init__(self) -> None:
        self.short, self.long, self.files = Lane("short"), Lane("long"), Lane("files")
        self.grammars, self.large_grammars = Lane("grammars"), Lane("large-grammars")

    def of(self, size: int, grammar: int = 0) -> Lane:
        """The lane for work on `size` characters or tokens, and on a grammar of that many characters, if it has to be
        compiled."""
        if size >= LONG:
            return self.long
        if grammar:
            return self.large_grammars if grammar >= LARGE_GRAMMAR else self.grammars
        return self.short

    def close(self) -> None:
        for lane in (self.short, self.long, self.grammars, self.large_grammars, self.files):
            lane.close()
