"""Threads for work on texts and files outside the engine's thread. Long work does not delay short work, and tenants do
not delay each other."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from tenuto.base.heap import give_back

log = logging.getLogger("tenuto.runtime")

LONG = 2**15
"""Work on at least this many characters or tokens is long."""
LARGE = 2**18
"""After work of at least this size, free heap memory is returned to the system."""
MUCH = 2**22
"""After several pieces of work of this total size, free memory is also returned."""


LARGE_GRAMMAR = 2**12
"""Compiling a grammar whose source has at least this many characters may take seconds."""


class Work(NamedTuple):
    """A piece of work. `size`: in characters or tokens. `do` must handle its errors."""

    size: int
    do: Callable[[], None]


class Lane:
    """A thread that does one piece of work after another. Tenants take turns, and each tenant's work is done in order.

    Invariant: `_waiting` has the tenants with waiting work, the next one first; `_changed` guards it.
    """

    def __init__(self, name: str) -> None:
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tenuto-text-{name}", daemon=True)
        self._thread.start()

    def put(self, size: int, do: Callable[[], None], tenant: str = "") -> None:
        """Queues work; see `Work`."""
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(Work(size, do))
            self._changed.notify()

    def close(self, *, wait: bool = True) -> None:
        """Lets the thread finish the waiting work and end. With `wait`, returns once it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        done = 0
        while (work := self._next()) is not None:
            size = work.size
            done += size
            try:
                work.do()
            except Exception:  # a bug of ours, which must not stop other work
                log.exception("text work failed")
            del work  # frees it now; the next one may come much later
            if size >= LARGE or done >= MUCH:
                give_back()
                done = 0

    def _next(self) -> Work | None:
        """Waits for the next piece of work and returns it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            tenant, works = self._waiting.popitem(last=False)
            work = works.popleft()
            if works:
                self._waiting[tenant] = works
            return work


class Lanes:
    """The lanes: one for short and one for long work, two for work that compiles a small or a large grammar, one for
    files, and one that waits for trainers, for which `close` does not wait."""

    def __init__(self) -> None:
        self.short, self.long, self.files = Lane("short"), Lane("long"), Lane("files")
        self.trainers = Lane("trainers")
        self.grammars, self.large_grammars = Lane("grammars"), Lane("large-grammars")

    def of(self, size: int, grammar: int = 0) -> Lane:
        """Returns the lane for work on `size` characters or tokens that compiles a grammar of `grammar` characters (0:
        none)."""
        if size >= LONG:
            return self.long
        if grammar:
            return self.large_grammars if grammar >= LARGE_GRAMMAR else self.grammars
        return self.short

    def close(self) -> None:
        for lane in (self.short, self.long, self.grammars, self.large_grammars, self.files):
            lane.close()
        self.trainers.close(wait=False)
