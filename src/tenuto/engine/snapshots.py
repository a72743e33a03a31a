"""Snapshots: while the engine runs, the state of open sessions is written to disk, from which the next process takes it
over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from itertools import chain, islice

from tenuto.base.clock import Clock
from tenuto.base.config import EngineConfig
from tenuto.engine.parking import Parking
from tenuto.memory.tiers.disk import IndexUnusable
from tenuto.session.session import Session

PART = 2**22
"""The most bytes that one step copies and writes, or those of a single page, or the last ones of a single session."""
TOGETHER = 16
"""The most sessions in one write."""
BURST_SECONDS = 0.25
"""The time whose bytes may be written at once after a pause."""
PAUSE = 0.1
"""The number of seconds after a commit in which a session's next turn may begin before its state is written."""
DELAY = 2.0
"""The number of seconds for which the state of a session waits if its next turn has begun, so that turns that follow
one right after another are written together."""
LOOKED_AT = 8
"""The number of waiting sessions that one step looks at, beside those that it writes."""
EXPIRES_SOON = 60.0
"""The number of seconds before the end of its TTL from which a session is no longer written."""


class After(Enum):
    """The state of a waiting session after a look at it. `DONE`: it waits no longer; `MORE`: it has a part in the next
    write, and waits for the one after that; `LATER`: it waits until its memory is parked; `FULL`: the next write has no
    room for it."""

    DONE = "done"
    MORE = "more"
    LATER = "later"
    FULL = "full"


class Snapshots:
    """Writes the state of sessions to disk after each commit, in the order of commits and at most `checkpoint_rate`
    bytes a second, and finds it at the start of the next process. Each step copies at most one part, and a thread
    beside it writes, so no step and no commit waits for the disk. Sessions that wait while the disk is busy are written
    together: one for each step that has passed. State that is found is verified: units must have the
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
        self._busy = 0  # number of steps since the last write began

    def step(self) -> None:
        """Begins to write the next part, if the disk is ready for it and the rate allows it."""
        if not self._parking.tiers.has_disk:
            return
        self._busy += 1
        now = self._clock.now()
        if not self._saves.advance(now):
            return
        if self._parking.unsaved:
            self._allowed = min(self._allowed + self._rate * (now - self._refilled), self._most)
            self._refilled = now
            if self._allowed > 0:
                self._gather(now, min(self._busy, TOGETHER))
        self._allowed -= self._saves.begin()

    def _gather(self, now: float, most: int) -> None:
        """Adds up to `most` of the waiting sessions to the next write. Those that have to wait longer go to the end of
        the list."""
        unsaved = self._parking.unsaved
        for session, since in list(islice(unsaved.items(), LOOKED_AT + most)):
            after = After.LATER
            if not self._is_wanted(session, now):
                after = After.DONE
            elif now >= since + (self.pause if session.turn is None else self.delay):
                after = self._add(session)
            if after in (After.DONE, After.LATER):
                del unsaved[session]
            if after is After.LATER:
                unsaved[session] = since
            elif after is not After.DONE or self._saves.gathered[0] >= most:
                return

    def _is_wanted(self, session: Session, now: float) -> bool:
        ttl = session.policy.ttl
        return ttl is None or session.turn is not None or session.last_turn_end + ttl > now + EXPIRES_SOON

    def _add(self, session: Session) -> After:
        """Adds the next part of a session's state to the next write, if there is one and it can be written."""
        position, record = self._parking.savable(session), self._parking.saved(session)
        counts = [table.kept_units(position) for table in session.memory.tables]
        if not position or (record is not None and record.position >= position):
            return After.DONE
        if not self._parking.tiers.worth_saving(counts, position):
            return After.DONE
        last, target, ranges = self._saves.next_part(record, counts, position, PART)
        sessions, size = self._saves.gathered
        if sessions and (
            not last or size + self._parking.tiers.copies.bytes_of(end - first for first, end in ranges) > PART
        ):
            return After.FULL
        if (units := self._parking.copied(session, target, ranges)) is None:
            return After.DONE
        if any(unit.leaving for unit in chain(*units)):
            self._parking.tiers.copies.release(chain(*units))
            return After.LATER
        at = position if last else target if not self._parking.needs_whole else record.position if record else 0
        added = self._saves.add(session.key, at, [first for first, _ in ranges], units)
        return After.MORE if added and not last else After.DONE

    def is_saved(self, session: Session) -> bool:
        """Whether no state of the session waits to be written, or is being written."""
        return not self._parking.keeps or (
            session not in self._parking.unsaved and not self._saves.under_way(session.key)
        )

    def save(self, sessions: Iterable[Session], seconds: float) -> None:
        """Writes the state of sessions without open turns, most recently used first, for at most `seconds`. Does
        nothing without a disk tier."""
        if not self._parking.tiers.has_disk:
            return
        began = self._clock.now()
        self._parking.finish()
        self._saves.settle(began)
        waiting = deque(sorted(sessions, key=lambda session: session.last_turn_end, reverse=True))
        while waiting:
            together: list[tuple[Session, int]] = []  # with the tokens whose state is to be saved
            after = After.DONE
            while waiting and after is After.DONE and len(together) < TOGETHER:
                wanted = self._parking.savable(waiting[0])
                after = self._add(waiting[0]) if self._clock.now() <= began + seconds else After.DONE
                if after in (After.DONE, After.LATER):  # nothing is being written for long now
                    together.append((waiting.popleft(), wanted))
            self._saves.settle(self._clock.now())
            self._count(together)

    def _count(self, written: Iterable[tuple[Session, int]]) -> None:
        """Counts sessions as saved or not, by the number of tokens whose state should be, and pins their records, which
        stay when sessions that were used less recently need room."""
        for session, wanted in written:
            record = self._saves.record(session.key)
            if wanted:
                self.counts["saved" if record is not None and record.position >= wanted else "not saved"] += 1
            if record is not None:
                record.pinned = True

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
