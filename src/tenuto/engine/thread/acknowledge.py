"""Acknowledgement: reports that show changes of sessions are held back until these are durable, and sent in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tenuto.base.errors import InvariantError, NotAcknowledged, TenutoError
from tenuto.base.wire.messages import Stopped
from tenuto.session.changes import Change

Tell = Callable[[TenutoError | None], None]
"""Sends a report that was held back, or an error with the reason why it cannot be sent."""


class Acknowledger(Protocol):
    """Determines which changes are durable, so that they may be reported."""

    def acknowledge(self, changes: Sequence[Change]) -> int:
        """Takes new `changes`, in order, and returns the total number of changes, counted from the first ever, that are
        durable by now. The number never falls.

        Called in the engine's thread after commands and after every step, even without new changes; it must not block.
        Another thread that makes more changes durable later calls `EngineLoop.wake`.

        Raises `NotAcknowledged` while the remaining changes cannot become durable. `changes` are taken even then, and
        count once it returns again."""


class AtOnce:
    """An `Acknowledger` for which every change is durable at once."""

    def __init__(self) -> None:
        self._changes = 0

    def acknowledge(self, changes: Sequence[Change]) -> int:
        self._changes += len(changes)
        return self._changes


class Announcer:
    """Holds back reports that show a change until the change is acknowledged, and sends all reports in order.

    While changes cannot be acknowledged, `NotAcknowledged` is sent in place of reports that show one: the change is in
    memory, but may not last.
    """

    def __init__(self, acknowledger: Acknowledger) -> None:
        self.failure: NotAcknowledged | None = None  # the reason why changes cannot be acknowledged now
        self._acknowledger = acknowledger
        self._new: list[Change] = []  # changes not yet given to the acknowledger
        self._changes = 0
        self._acknowledged = 0
        self._held: deque[tuple[int, Tell]] = deque()  # reports, each with the number of changes before it

    def changed(self, change: Change) -> None:
        """Adds a change; changes are added in the order in which they happen."""
        self._new.append(change)
        self._changes += 1

    def hold(self, tell: Tell) -> None:
        """Holds a report: calls `tell` once all changes so far are acknowledged and all earlier reports are sent."""
        self._held.append((self._changes, tell))

    def advance(self) -> None:
        """Sends the reports whose changes are acknowledged by now."""
        if self._acknowledged < self._changes:
            self._ask()
        while self._held and (self._held[0][0] <= self._acknowledged or self.failure is not None):
            changes, tell = self._held.popleft()
            tell(NotAcknowledged(str(self.failure)) if changes > self._acknowledged else None)

    def _ask(self) -> None:
        new, self._new = self._new, []
        try:
            acknowledged = self._acknowledger.acknowledge(new)
        except NotAcknowledged as error:
            self.failure = error
            return
        if not self._acknowledged <= acknowledged <= self._changes:
            raise InvariantError(
                f"{acknowledged} changes are acknowledged; allowed: {self._acknowledged} to {self._changes}"
            )
        self._acknowledged, self.failure = acknowledged, None

    def stop(self, stopped: Stopped) -> None:
        """Sends an error in place of all held reports, because the engine has stopped."""
        while self._held:
            self._held.popleft()[1](stopped.interrupted())
