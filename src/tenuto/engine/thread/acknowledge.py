"""Acknowledgement: what shows a session's changes is told only once they are durable, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tenuto.base.errors import InvariantError, NotAcknowledged, TenutoError
from tenuto.base.wire.messages import Stopped
from tenuto.session.changes import Change

Tell = Callable[[TenutoError | None], None]
"""Tells what has been held back, or that it cannot be told, and why."""


class Acknowledger(Protocol):
    """Says which changes are durable, so that those who wait for them may be told."""

    def acknowledge(self, changes: Sequence[Change]) -> int:
        """Take `changes`, which have just happened, in order, and return how many changes in all, counted from the
        first ever, are durable by now. The number never falls.

        Called in the engine's thread after commands and after every step, even without new changes; it must not block.
        Another thread that makes more changes durable later calls `EngineLoop.wake`.

        Raises `NotAcknowledged` while the remaining changes cannot become durable; `changes` are taken even then, and
        count once it returns again."""
        ...


class AtOnce:
    """Every change counts as durable at once."""

    def __init__(self) -> None:
        self._changes = 0

    def acknowledge(self, changes: Sequence[Change]) -> int:
        self._changes += len(changes)
        return self._changes


class Announcer:
    """Holds back what shows a change until the change is acknowledged, and tells everything in order.

    While changes cannot be acknowledged, whatever shows one is refused with `NotAcknowledged`: it is in memory, but may
    not last.
    """

    def __init__(self, acknowledger: Acknowledger) -> None:
        self.failure: NotAcknowledged | None = None  # why changes cannot be acknowledged now
        self._acknowledger = acknowledger
        self._new: list[Change] = []  # not yet given to the acknowledger
        self._changes = 0
        self._acknowledged = 0
        self._held: deque[tuple[int, Tell]] = deque()  # each with the number of changes before it

    def changed(self, change: Change) -> None:
        """A change has just happened, after all earlier calls'."""
        self._new.append(change)
        self._changes += 1

    def hold(self, tell: Tell) -> None:
        """Call `tell` once every change up to now is acknowledged, and what was held before has been told."""
        self._held.append((self._changes, tell))

    def advance(self) -> None:
        """Tell what may be told by now."""
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
                f"{acknowledged} changes are acknowledged; there are {self._changes}, and {self._acknowledged} were"
            )
        self._acknowledged, self.failure = acknowledged, None

    def stop(self, stopped: Stopped) -> None:
        """Nothing more will be acknowledged: whoever waits is told that the engine has stopped."""
        while self._held:
            self._held.popleft()[1](stopped.interrupted())
