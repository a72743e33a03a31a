"""The thread that makes changes durable; one flush covers all waiting changes."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from tenuto.base.errors import NotAcknowledged
from tenuto.session.changes import Change
from tenuto.session.journal_mending import Damage
from tenuto.session.records import SavedSession
from tenuto.session.session import Session

log = logging.getLogger("tenuto.journal")

RETRY_SECONDS = 1.0
IDLE_SECONDS = 2.0
"""The time without changes after which all free space is given back."""


class AnyJournal(Protocol):
    """The interface of a journal in any database; see `Journal`."""

    @property
    def path(self) -> object: ...

    def close(self) -> None: ...

    def sessions(self) -> Iterator[SavedSession]: ...

    def mend(self) -> Damage | None: ...

    def write(self, changes: Iterable[Change]) -> Collection[Session]: ...

    def forget_erased(self) -> None: ...

    def tidy(self, *, whole: bool = False) -> bool: ...


class JournalWriter:
    """An `Acknowledger` that writes every change to a journal. While writing fails, no change is acknowledged, and
    unwritten changes are tried again every `RETRY_SECONDS`."""

    def __init__(self, journal: AnyJournal) -> None:
        self._journal = journal
        self._wake: Callable[[], None] = lambda: None  # set before the thread starts
        self._changed = threading.Condition()
        # All under the lock of `_changed`:
        self._waiting: list[Change] = []
        self._durable = 0
        self._lost: list[Session] = []
        self._failure: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tenuto-journal", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """Begins to write; `wake` is called when more changes are durable, or writing begins or ceases to fail."""
        self._wake = wake
        self._thread.start()

    def acknowledge(self, changes: Sequence[Change]) -> int:
        """Implements `Acknowledger.acknowledge`."""
        with self._changed:
            if changes:
                self._waiting.extend(changes)
                self._changed.notify()
            if self._failure is not None:
                raise NotAcknowledged(self._failure)
            return self._durable

    def take_lost(self) -> Sequence[Session]:
        """Implements `Acknowledger.take_lost`."""
        with self._changed:
            lost, self._lost = self._lost, []
            return lost

    def close(self) -> None:
        """Writes waiting changes, if possible, and closes the journal."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._journal.close()

    def _run(self) -> None:
        untidy = True  # an earlier process may have left free space
        while (changes := self._next(IDLE_SECONDS if untidy else None)) or not self._closed:
            if not changes:
                untidy = False
                self._tidy(whole=True)
                continue
            untidy = True
            if not (self._tried(lambda: self._write(changes)) and self._tried(self._journal.forget_erased)):
                return
            self._written(len(changes))
            self._tidy(whole=False)

    def _write(self, changes: Sequence[Change]) -> None:
        lost = self._journal.write(changes)
        with self._changed:
            self._lost += lost

    def _tried(self, work: Callable[[], None]) -> bool:
        """Repeats `work` until it succeeds. Returns False if it still fails when the writer is closed."""
        while True:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - any error is retried; nothing is acknowledged meanwhile
                if not self._failed(error):
                    return False
            else:
                return True

    def _tidy(self, *, whole: bool) -> None:
        """Gives free space back to the file system as long as no change waits."""
        try:
            while not (self._waiting or self._closed) and self._journal.tidy(whole=whole):
                pass
        except sqlite3.Error as error:  # no data is lost, and it is tried again after the next write
            log.warning("the journal %s could not be made smaller: %s", self._journal.path, error)

    def _next(self, seconds: float | None) -> list[Change]:
        """Waits for changes and returns them; the list is empty once the writer is closed, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, seconds)
            return self._waiting[:]

    def _written(self, count: int) -> None:
        with self._changed:
            del self._waiting[:count]
            self._durable += count
            if self._failure is not None:
                log.warning("the journal can be written again")
            self._failure = None
        self._wake()

    def _failed(self, error: Exception) -> bool:
        """Reports the failure and waits. Returns whether to try again."""
        reason = f"the journal {self._journal.path} cannot be written: {str(error) or type(error).__name__}"
        details = None if isinstance(error, sqlite3.Error) else error
        with self._changed:
            if self._failure is None:
                log.error("%s; no change is acknowledged until then", reason, exc_info=details)
            self._failure = reason
        self._wake()
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed, RETRY_SECONDS)
