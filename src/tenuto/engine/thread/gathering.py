"""Gathering of turns that arrive almost together, so that they are computed together."""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.session.changes import Change
from tenuto.session.session import Session
from tenuto.session.turn import Turn

EXPECTED_SECONDS = 0.1
"""The time for which the next turn of a session is expected after it was opened or its last turn has committed."""
QUIET_SECONDS = 0.008
"""The time without new turns after which waiting ends; several times as long as a server takes for a request."""
MOST_SECONDS = 0.05
"""The longest time that a turn waits for others."""


class Gathering:
    """Decides whether a step that would only begin turns waits a moment for more of them.

    When the turns of several sessions end with the same step, as in a batch of rollouts, their next turns arrive within
    milliseconds, but one by one. If the first were computed alone, all others would wait for it, and its session would
    be a step ahead of them from then on. So turns wait while others are expected. The turn of a single session never
    waits. In the worst case a turn waits `QUIET_SECONDS` for one that does not come.

    Invariant: `_expected` has the times from which sessions' next turns are expected, in ascending order."""

    def __init__(self) -> None:
        self._expected: dict[Session, float] = {}
        self._last = 0.0  # the time of the last submitted turn, commit or opened session
        self._deadline: float | None = None  # the latest time at which the waiting turns begin

    def note(self, changes: Iterable[Change], now: float) -> None:
        """Records changes of sessions that have just happened."""
        for change in changes:
            self._expected.pop(change.session, None)
            if change.kind in ("open", "commit"):
                self._expected[change.session] = self._last = now
        self._forget(now)

    def begin(self, turns: Iterable[Turn], now: float) -> None:
        """Records turns that were just submitted."""
        for turn in turns:
            self._expected.pop(turn.session, None)
            self._last = now

    def seconds(self, now: float) -> float:
        """Returns how long to wait for the next turn; 0 if the step should be computed now."""
        self._forget(now)
        if self._deadline is None:
            self._deadline = now + MOST_SECONDS
        left = min(self._last + QUIET_SECONDS, self._deadline) - now if self._expected else 0.0
        if left <= 0:
            self._deadline = None
        return max(0.0, left)

    def _forget(self, now: float) -> None:
        """Removes sessions whose next turn has not come in time."""
        while self._expected:
            session = next(iter(self._expected))
            if now < self._expected[session] + EXPECTED_SECONDS:
                break
            del self._expected[session]
