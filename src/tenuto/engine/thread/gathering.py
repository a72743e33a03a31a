"""Turns that come together are computed together."""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.session.changes import Change
from tenuto.session.session import Session
from tenuto.session.turn import Turn

EXPECTED_SECONDS = 0.1
"""How long the next turn of a session is expected after it was opened or its last turn has committed."""
QUIET_SECONDS = 0.008
"""Nothing more is waited for when nothing has come for so long: several times what a server takes for a request."""
MOST_SECONDS = 0.05
"""The longest that a turn waits for others."""


class Gathering:
    """Decides whether a step that would only begin turns waits a moment for more of them.

    When the turns of several sessions end with the same step, as those of a batch of rollouts do, their next ones come
    within milliseconds, but one by one. If the first were computed by itself, all others would wait for it, and that
    session would be a step ahead of them from then on. So turns wait for each other while others are expected. A
    session alone expects nobody and never waits; at worst a turn waits `QUIET_SECONDS` for one that does not come.

    Invariant: `_expected` has since when a session's next turn is expected, in the order of these times."""

    def __init__(self) -> None:
        self._expected: dict[Session, float] = {}
        self._last = 0.0  # when something came, or a turn committed
        self._deadline: float | None = None  # of the turns that wait

    def note(self, changes: Iterable[Change], now: float) -> None:
        """What has just happened to sessions."""
        for change in changes:
            self._expected.pop(change.session, None)
            if change.kind in ("open", "commit"):
                self._expected[change.session] = self._last = now
        self._forget(now)

    def begin(self, turns: Iterable[Turn], now: float) -> None:
        """Turns that were just submitted."""
        for turn in turns:
            self._expected.pop(turn.session, None)
            self._last = now

    def seconds(self, now: float) -> float:
        """How long to wait for the next turn; 0 if the step is to be computed now."""
        self._forget(now)
        if self._deadline is None:
            self._deadline = now + MOST_SECONDS
        left = min(self._last + QUIET_SECONDS, self._deadline) - now if self._expected else 0.0
        if left <= 0:
            self._deadline = None
        return max(0.0, left)

    def _forget(self, now: float) -> None:
        """Those that have not come in time."""
        while self._expected:
            session = next(iter(self._expected))
            if now < self._expected[session] + EXPECTED_SECONDS:
                break
            del self._expected[session]
