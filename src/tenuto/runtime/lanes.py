"""Text work beside the engine's thread: what is long does not hold up what is short."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from tenuto.base.heap import give_back

log = logging.getLogger("tenuto.runtime")

LONG = 2**15
"""Characters, or tokens, from which on work is long."""
LARGE = 2**18
"""After work on so much, free memory is returned to the system."""


class Lane:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[tuple[int, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tenuto-text-{name}", daemon=True)
        self._thread.start()

    def put(self, size: int, work: Callable[[], None]) -> None:
        """Have `work` done on `size` characters or tokens. It sees to its errors itself."""
        self._waiting.put((size, work))

    def close(self) -> None:
        """Do what is waiting, and end."""
        self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            size, work = waiting
            try:
                work()
            except Exception:  # a mistake of ours; others wait
                log.exception("text work failed")
            del waiting, work  # the next may be long in coming
            if size >= LARGE:
                give_back()


class Lanes:
    """One for what is short, one for what is long, one for what brings a grammar that is to be compiled, and one for
    files."""

    def __init__(self) -> None:
        self.short, self.long, self.grammars = Lane("short"), Lane("long"), Lane("grammars")
        self.files = Lane("files")

    def of(self, size: int, *, compiles: bool = False) -> Lane:
        """The lane for work on `size` characters or tokens."""
        if size >= LONG:
            return self.long
        return self.grammars if compiles else self.short

    def close(self) -> None:
        for lane in (self.short, self.long, self.grammars, self.files):
            lane.close()
