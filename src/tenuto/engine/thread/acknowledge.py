"""Acknowledgement: reports that show changes of sessions are held back until these are durable, and sent in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tenuto.base.errors import InvariantError, NotAcknowledged, TenutoError
from tenuto.base.wire.replies import Stopped
from tenuto.session.changes import Change
from tenuto.session.registry import LOST
from tenuto.session.session import Session

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

    def take_lost(self) -> Sequence[Session]:
        """Returns the sessions whose changes were refused since the last call, because other replicas own them. These
        changes count among those that `acknowledge` returns, but have not happened."""


class AtOnce:
    """An `Acknowledger` for which every change is durable at once."""

    def __init__(self) -> None:
        self._changes = 0

    def acknowledge(self, changes: Sequence[Change]) -> int:
        self._changes += len(changes)
        return self._changes

    def take_lost(self) -> Sequence[Session]:
        return ()


@dataclass(slots=True)
class _Report:
    """A report that is held back. `changes`: how many were made before it. `session`: see `Announcer.hold`. `refusal`:
    sent in its place."""

    changes: int
    session: Session | None
    tell: Tell
    refusal: TenutoError | None = None


class Announcer:
    """Holds back reports that show a change until the change is acknowledged, and sends all reports in order.

    While changes cannot be acknowledged, `NotAcknowledged` is sent in place of reports that show one: the change is in
    memory, but may not last. The same is sent in place of reports that may show a refused change of a session that
    another replica owns. `on_lost` is called with such a session before the next command is carried out.
    """

    def __init__(self, acknowledger: Acknowledger, on_lost: Callable[[Session], None] = lambda _: None) -> None:
        self.failure: NotAcknowledged | None = None  # the reason why changes cannot be acknowledged now
        self._acknowledger = acknowledger
        self._new: list[Change] = []  # changes not yet given to the acknowledger
        self._changes = 0
        self._acknowledged = 0
        self._held: deque[_Report] = deque()
        self._on_lost = on_lost

    def changed(self, change: Change) -> None:
        """Adds a change; changes are added in the order in which they happen."""
        self._new.append(change)
        self._changes += 1

    def hold(self, tell: Tell, session: Session | None = None) -> None:
        """Holds a report: calls `tell` once all changes so far are acknowledged and all earlier reports are sent.
        `session`: the only one that it shows."""
        self._held.append(_Report(self._changes, session, tell))

    def advance(self) -> None:
        """Sends the reports whose changes are acknowledged by now."""
        if self._acknowledged < self._changes:
            self._ask()
        while self._held and (self._held[0].changes <= self._acknowledged or self.failure is not None):
            report = self._held.popleft()
            late = report.changes > self._acknowledged
            report.tell(NotAcknowledged(str(self.failure)) if late else report.refusal)

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
        lost = self._acknowledger.take_lost()
        for report in self._held if lost else ():
            if report.session is None or report.session in lost:
                report.refusal = NotAcknowledged(LOST)
        for session in lost:
            self._on_lost(session)

    def stop(self, stopped: Stopped) -> None:
        """Sends an error in place of all held reports, because the engine has stopped."""
        while self._held:
            self._held.popleft().tell(stopped.interrupted())
