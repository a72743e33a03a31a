"""Snapshots: while the engine runs, the state of open sessions is written to disk, from which the next process takes it
over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tenuto.base.clock import Clock
from tenuto.base.config import EngineConfig
from tenuto.engine.parking import Parking
from tenuto.memory.tiers.disk import IndexUnusable
from tenuto.session.session import Session

PART = 2**22
"""The most bytes that one step copies and writes, or those of a single page."""
BURST_SECONDS = 0.25
"""The time whose bytes may be written at once after a pause."""
PAUSE = 0.1
"""The number of seconds after a commit in which a session's next turn may begin before its state is written."""
DELAY = 2.0
"""The number of seconds for which the state of a session waits if its next turn has begun, so that turns that follow
one right after another are written together."""
LOOKED_AT = 8
"""The number of waiting sessions that one step looks at."""
EXPIRES_SOON = 60.0
"""The number of seconds before the end of its TTL from which a session is no longer written."""


class Part(NamedTuple):
    """A part of a session's state on its way to disk, of `size` bytes; `last`: nothing of the session follows."""

    size: int
    last: bool


class Snapshots:
    """Writes the state of sessions to disk after each commit, in the order of commits and at most `checkpoint_rate`
    bytes a second, and finds it at the start of the next process. Each step copies at most one part, and a thread
    beside it writes, so no step and no commit waits for the disk. State that is found is verified: units must have the
    contents that a session's tokens demand. The rest is computed again.

    A session waits for `pause` seconds after a commit, or `delay` if its next turn begins meanwhile.

    `counts`: sessions by outcome: "saved" and "not saved" (no room, a failure, or no time) when the process ends, those
    of `Saves.recover`, and of a whole index: "damaged", "foreign" and "unreadable".
    """

    def __init__(self, parking: Parking, clock: Clock, config: EngineConfig) -> None:
        self._parking = parking
        self._saves = parking.saves
        self._clock = clock
        self._rate = config.checkpoint_rate
        self.pause, self.delay = PAUSE, DELAY
        self.counts = parking.saves.outcomes
        self._most = max(PART, self._rate * BURST_SECONDS)
        self._allowed: float = self._most  # bytes that may be written now
        self._refilled = clock.now()

    def step(self) -> None:
        """Begins to write the next part, if the disk is ready for it and the rate allows it."""
        if not self._parking.tiers.has_disk:
            return
        now = self._clock.now()
        if not self._saves.advance(now) or not self._parking.unsaved:
            return
        self._allowed = min(self._allowed + self._rate * (now - self._refilled), self._most)
        self._refilled = now
        while self._allowed > 0 and (session := self._next(now)) is not None:
            part = self._begin(session) if self._is_wanted(session, now) else None
            if part is None or part.last:
                self._parking.unsaved.pop(session, None)
            if part is not None:
                self._allowed -= part.size
                return

    def _next(self, now: float) -> Session | None:
        """Returns the session to write, or `None`. Those that have to wait go to the end of the list."""
        unsaved = self._parking.unsaved
        for _ in range(min(LOOKED_AT, len(unsaved))):
            session, since = next(iter(unsaved.items()))
            if now >= since + (self.pause if session.turn is None else self.delay):
                return session
            del unsaved[session]
            unsaved[session] = since
        return None

    def _is_wanted(self, session: Session, now: float) -> bool:
        ttl = session.policy.ttl
        return ttl is None or session.turn is not None or session.last_turn_end + ttl > now + EXPIRES_SOON

    def _begin(self, session: Session) -> Part | None:
        """Begins to write the next part of a session's state. Returns `None` if there is nothing to write, or nothing
        can be written now."""
        position, record = self._parking.savable(session), self._parking.saved(session)
        counts = [table.kept_units(position) for table in session.memory.tables]
        if not position or (record is not None and record.position >= position):
            return None
        if not self._parking.tiers.worth_saving(counts, position):
            return None
        last, target, ranges = self._saves.next_part(record, counts, position, PART)
        if (units := self._parking.copied(session, target, ranges)) is None:
            return None
        size = sum(unit.size for group in units for unit in group if unit.file is None)
        at = position if last else target if not self._parking.needs_whole else record.position if record else 0
        if not self._saves.begin(session.key, at, [first for first, _ in ranges], units):
            return None
        return Part(size, last)

    def save(self, sessions: Iterable[Session], seconds: float) -> None:
        """Writes the state of sessions without open turns, most recently used first, for at most `seconds`. Does
        nothing without a disk tier."""
        if not self._parking.tiers.has_disk:
            return
        began = self._clock.now()
        self._parking.finish()
        self._saves.settle(began)
        for session in sorted(sessions, key=lambda session: session.last_turn_end, reverse=True):
            wanted = self._parking.savable(session)
            while self._clock.now() <= began + seconds:
                part = self._begin(session)
                self._saves.settle(self._clock.now())
                if part is None or part.last:
                    break
            record = self._saves.record(session.key)
            if wanted:
                self.counts["saved" if record is not None and record.position >= wanted else "not saved"] += 1
            if record is not None:
                record.pinned = True  # it stays when sessions that were used less recently need room
        self._saves.settle(self._clock.now())

    def recover(self, sessions: Iterable[Session]) -> None:
        """Gives sessions, which have no memory, their saved state. Removes all other saved state."""
        longest = {
            session.key: max(0, len(session.history) - 1)
            for session in sorted(sessions, key=lambda session: session.last_turn_end)
        }
        try:
            self._saves.recover(longest, whole=self._parking.needs_whole)
        except IndexUnusable as error:
            self.counts[error.cause] += 1
