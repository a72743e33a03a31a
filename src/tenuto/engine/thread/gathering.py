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

OPENED = 0
"""Stands for the run of sessions that were opened and have had no turn since."""


class Gathering:
    """Decides whether a step that would only begin turns waits a moment for more of them.

    When the turns of several sessions end at about the same time, as in a batch of rollouts, their next turns arrive
    within milliseconds, but one by one. If the first were computed alone, all others would wait for it, and its session
    would be ahead of them from then on. So a turn waits for sessions whose last turns were computed together with that
    of its own session: in the same run of steps, which ends when no turn is left. The first turns of newly opened
    sessions wait for each other. No other turn waits, such as that of a fork, or of a session that goes on alone. In
    the worst case a turn waits `QUIET_SECONDS` for one that does not come.

    Invariant: `_expected` has the times from which sessions' next turns are expected, in ascending order."""

    def __init__(self) -> None:
        self._expected: dict[Session, tuple[float, int]] = {}  # with the run that its last turn was computed in
        self._awaited: set[int] = set()  # the runs of the sessions that waiting turns wait for
        self._run = OPENED  # the number of the current or last run of steps
        self._last = 0.0  # the time of the last submitted turn, commit or opened session
        self._deadline: float | None = None  # the latest time at which the waiting turns begin

    def note(self, changes: Iterable[Change], now: float) -> None:
        """Records changes of sessions that have just happened."""
        for change in changes:
            self._expected.pop(change.session, None)
            if change.kind in ("open", "commit"):
                self._expected[change.session] = now, OPENED if change.kind == "open" else self._run
                self._last = now
        self._forget(now)

    def begin(self, turns: Iterable[Turn], now: float) -> None:
        """Records turns that were just submitted."""
        for turn in turns:
            if (own := self._expected.pop(turn.session, None)) is not None:
                self._awaited.add(own[1])
            self._last = now

    def seconds(self, now: float, *, only_begins: bool) -> float:
        """Returns how long to wait for the next turn; 0 if the step should be computed now. `only_begins`: whether the
        step would only begin turns; else it does not wait."""
        self._forget(now)
        left = 0.0
        if only_begins and any(run in self._awaited for _, run in self._expected.values()):
            if self._deadline is None:
                self._deadline = now + MOST_SECONDS
            left = min(self._last + QUIET_SECONDS, self._deadline) - now
        if left <= 0:
            self._deadline = None
            self._awaited.clear()
            self._run += only_begins
        return max(0.0, left)

    def _forget(self, now: float) -> None:
        """Removes sessions whose next turn has not come in time."""
        while self._expected:
            session = next(iter(self._expected))
            if now < self._expected[session][0] + EXPECTED_SECONDS:
                break
            del self._expected[session]
