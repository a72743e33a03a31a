"""Time limits of open turns."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import Enum
from itertools import count

from tenuto.base.views import SessionKey
from tenuto.session.registry import Registry
from tenuto.session.turn import Turn

MAX_IDLE_TIMERS = 1024
"""The number of timers of ended turns that may stay in the heap, in addition to a few per session."""


class Timer(Enum):
    """The time that a turn's timer limits."""

    DRAFT = 0  # time since the draft last changed
    QUEUE = 1  # time until it first runs
    TOTAL = 2  # time until it ends


class Timers:
    """Timers of open turns. Timers of ended turns are removed when the heap grows."""

    def __init__(self, sessions: Registry, draft_timeout: float) -> None:
        self._sessions = sessions
        self._draft_timeout = draft_timeout
        self._heap: list[tuple[float, int, Timer, SessionKey, int]] = []
        self._entries = count()

    def __len__(self) -> int:
        return len(self._heap)

    def submitted(self, turn: Turn) -> None:
        """Sets the timers of a submitted turn according to its options."""
        if turn.params.queue_timeout is not None:
            self._set(turn, turn.arrival + turn.params.queue_timeout, Timer.QUEUE)
        if turn.params.timeout is not None:
            self._set(turn, turn.arrival + turn.params.timeout, Timer.TOTAL)

    def drafted(self, turn: Turn) -> None:
        """Restarts a draft's timer after a change."""
        self._set(turn, turn.changed + self._draft_timeout, Timer.DRAFT)

    def due(self, now: float) -> Iterator[Turn]:
        """Removes expired timers, and yields the turns that they end; each is yielded before the next is removed."""
        while self._heap and self._heap[0][0] <= now:
            _, _, timer, key, number = heapq.heappop(self._heap)
            turn = self._open_turn(key)
            if turn is not None and turn.number == number and self._is_due(turn, timer, now):
                yield turn

    def _set(self, turn: Turn, when: float, timer: Timer) -> None:
        heapq.heappush(self._heap, (when, next(self._entries), timer, turn.session.key, turn.number))
        if len(self._heap) > MAX_IDLE_TIMERS + 8 * len(self._sessions):  # at most three per session are live
            self._heap = [entry for entry in self._heap if self._is_live(*entry)]
            heapq.heapify(self._heap)

    def _is_live(self, when: float, _: int, timer: Timer, key: SessionKey, number: int) -> bool:
        """Whether a timer can still end its turn: not if the turn has ended, or the draft has changed since."""
        turn = self._open_turn(key)
        return (
            turn is not None
            and turn.number == number
            and (timer is not Timer.DRAFT or when >= turn.changed + self._draft_timeout)
        )

    def _open_turn(self, key: SessionKey) -> Turn | None:
        tenant, session_id = key
        session = self._sessions.find(session_id, tenant)
        return session.turn if session is not None and not session.held else None

    def _is_due(self, turn: Turn, timer: Timer, now: float) -> bool:
        drafting = turn.drafting
        if timer is Timer.DRAFT:  # every change of the draft sets a new timer
            return drafting and turn.changed + self._draft_timeout <= now
        return timer is Timer.TOTAL or not turn.started
