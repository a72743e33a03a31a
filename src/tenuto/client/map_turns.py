"""Lanes of turns, put together from the feed of the map."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tenuto.base.map_feed import Change, ShownSession, WholeHead
from tenuto.base.map_views import Phase
from tenuto.client.map_world import World

WINDOW = 60.0
"""Seconds of the past that lanes have."""
UNSEEN = 0.5
"""Seconds before the first event of a turn in which it is taken to have done the same."""
NEW = 0.35
"""The weight of the last measurement in a smoothed rate."""


@dataclass(slots=True)
class Segment:
    """A stretch of time, on the engine's clock, in which a turn did one thing."""

    phase: Phase
    turn: int
    began: float
    ended: float


@dataclass(slots=True)
class Lane:
    """The turns of a session in the last minute. `open`: it has a turn. `rate`: tokens a second of that turn, `None`
    until two events had it."""

    session: int
    id: str
    segments: deque[Segment] = field(default_factory=deque)
    open: bool = True
    rate: float | None = None
    _turn: int = 0
    _output: int = 0
    _at: float = 0.0

    def take(self, session: ShownSession, now: float) -> None:
        """Adds what the session's turn does now."""
        turn, last = session.turn, self.segments[-1] if self.segments else None
        if turn is None:
            self.open, self.rate, self._turn = False, None, 0
            return
        same = last is not None and self.open and last.turn == turn.n
        if last is not None and same and last.phase == turn.phase:
            last.ended = now
        else:
            began = (
                last.ended
                if last is not None and same
                else max(turn.arrived, now - UNSEEN, last.ended if last else 0.0)
            )
            self.segments.append(Segment(turn.phase, turn.n, began, now))
        if self._turn != turn.n:
            self.rate = None
        elif now > self._at:
            rate = (turn.output - self._output) / (now - self._at)
            self.rate = rate if self.rate is None else self.rate + NEW * (rate - self.rate)
        self.open, self._turn, self._output, self._at = True, turn.n, turn.output, now

    def at(self, moment: float) -> Phase | None:
        """Returns what a turn of the session did at a moment."""
        for segment in reversed(self.segments):
            if segment.began <= moment:
                return segment.phase if moment <= segment.ended else None
        return None


class Turns:
    """The lanes of sessions whose turns ran in the last `WINDOW` seconds, by number. `rate`: tokens a second of all
    together. `step_seconds`: the duration of a step, 0 until one was measured."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.rate = 0.0
        self.step_seconds = 0.0
        self._before: WholeHead | None = None

    def take(self, world: World, change: Change) -> None:
        """Adds an event of the feed, which the world has taken already."""
        now = world.now
        for session in change.sessions:
            if session.turn is not None and session.n not in self.lanes:
                self.lanes[session.n] = Lane(session.n, session.id)
            if session.n in self.lanes:
                self.lanes[session.n].take(session, now)
        for number in change.gone:
            if number in self.lanes:
                self.lanes[number].open = False
        for number, lane in list(self.lanes.items()):
            if lane.open:
                lane.segments[-1].ended = now
            while lane.segments and lane.segments[0].ended < now - WINDOW:
                lane.segments.popleft()
            if not lane.segments:
                del self.lanes[number]
        self._measure(world.whole)

    def shown(self) -> list[Lane]:
        """Returns the lanes, first those with open turns in the order of their sessions."""
        return sorted(
            self.lanes.values(),
            key=lambda lane: (not lane.open, lane.session if lane.open else -lane.segments[-1].ended),
        )

    def _measure(self, head: WholeHead | None) -> None:
        before, self._before = self._before, head
        if head is None:
            self.rate = sum(lane.rate or 0.0 for lane in self.lanes.values())
        elif before is not None and head.t > before.t:
            rate = (head.generated - before.generated) / (head.t - before.t)
            self.rate += NEW * (rate - self.rate)
            if (steps := head.steps - before.steps) > 0:
                self.step_seconds = (head.busy - before.busy) / steps
