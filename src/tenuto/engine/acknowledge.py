"""Between a commit and everyone who is told of it: acknowledgement, in the order of commits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tenuto.base.errors import InvariantError, NotAcknowledged, TenutoError
from tenuto.base.messages import Stopped
from tenuto.session.session import Turn

Tell = Callable[[TenutoError | None], None]
"""Tells what has been held back, or that it cannot be told, and why."""


class Acknowledger(Protocol):
    """Says which commits are safe, so that those who wait for them may be told."""

    def acknowledge(self, committed: Sequence[Turn]) -> int:
        """Take these turns, which have just committed, in this order, and return how many of all commits ever, counted
        from the first, are safe by now. The number never falls.

        Called in the engine's thread, also without new commits, after commands and after every step; it must not block.
        What makes more commits safe later, in another thread, calls `EngineLoop.wake`.

        Raises `NotAcknowledged` as long as the commits that are not safe yet cannot become so; `committed` has been
        taken all the same, and count when it returns again."""
        ...


class AtOnce:
    """Every commit is safe."""

    def __init__(self) -> None:
        self._commits = 0

    def acknowledge(self, committed: Sequence[Turn]) -> int:
        self._commits += len(committed)
        return self._commits


class Announcer:
    """Holds back what shows a commit until that is acknowledged, and tells it in the order in which it happened.

    While commits cannot be acknowledged, whatever shows one is refused with `NotAcknowledged`: it is in memory, and
    whether it will last is not known.
    """

    def __init__(self, acknowledger: Acknowledger) -> None:
        self.failure: NotAcknowledged | None = None  # why commits cannot be acknowledged now
        self._acknowledger = acknowledger
        self._new: list[Turn] = []  # committed, not yet given to the acknowledger
        self._commits = 0
        self._acknowledged = 0
        self._held: deque[tuple[int, Tell]] = deque()  # with how many commits precede it

    def committed(self, turn: Turn) -> None:
        """A turn has committed, after all others that have."""
        self._new.append(turn)
        self._commits += 1

    def hold(self, tell: Tell) -> None:
        """Call `tell` once every commit up to now is acknowledged, and what was held before has been told."""
        self._held.append((self._commits, tell))

    def advance(self) -> None:
        """Tell what may be told by now."""
        if self._acknowledged < self._commits:
            self._ask()
        while self._held and (self._held[0][0] <= self._acknowledged or self.failure is not None):
            commits, tell = self._held.popleft()
            tell(NotAcknowledged(str(self.failure)) if commits > self._acknowledged else None)

    def _ask(self) -> None:
        new, self._new = self._new, []
        try:
            acknowledged = self._acknowledger.acknowledge(new)
        except NotAcknowledged as error:
            self.failure = error
            return
        if not self._acknowledged <= acknowledged <= self._commits:
            raise InvariantError(
                f"{acknowledged} commits are acknowledged; there are {self._commits}, and {self._acknowledged} were"
            )
        self._acknowledged, self.failure = acknowledged, None

    def stop(self, stopped: Stopped) -> None:
        """Nothing more will be acknowledged: whoever waits is told that the engine has stopped."""
        while self._held:
            self._held.popleft()[1](stopped.error())
