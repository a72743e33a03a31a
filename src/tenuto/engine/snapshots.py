"""Snapshots: the memory of open sessions that one process leaves on disk, and the next one takes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tenuto.base.clock import Clock
from tenuto.engine.parking import Parking
from tenuto.memory.tiers.snapshots import SavedMemory, SnapshotUnusable
from tenuto.memory.tiers.unit_files import DiskFailed
from tenuto.session.session import Session

INDEX_SECONDS = 2.0
"""The interval at which the index is written while sessions are saved, so that a kill loses only the last of them."""


class Snapshots:
    """Writes the memory of sessions and an index of it to disk at the end of a process, and finds it at the start of
    the next. Found memory is verified: its tokens are compared with the session's history, and its units with their
    checksums. Memory that does not verify is computed again.

    `counts`: the number of sessions by outcome: "saved", "not saved" (no room, a failure, or no time), "restored",
    "partly" (the history differs from some point on), "stale", "missing"; and of whole snapshots: "damaged", "foreign",
    "unreadable" and "unwritten".
    """

    def __init__(self, parking: Parking, clock: Clock) -> None:
        self._parking = parking
        self._clock = clock
        self.counts: Counter[str] = Counter()

    def save(self, sessions: Iterable[Session], seconds: float) -> None:
        """Moves the memory of sessions without open turns to disk, most recently used first, for at most `seconds`, and
        writes the index. Does nothing without tiers."""
        if not self._parking.restores:
            return
        began = noted = self._clock.now()
        saved: list[tuple[Session, int]] = []
        for session in sorted(sessions, key=lambda session: session.last_turn_end, reverse=True):
            position = self._parking.save(session, late=self._clock.now() > began + seconds)
            if position:
                saved.append((session, position))
            elif session.memory.computed or self._parking.position(session):
                self.counts["not saved"] += 1
            if self._clock.now() > noted + INDEX_SECONDS:
                self._parking.write_index(saved)
                noted = self._clock.now()
        if self._parking.write_index(saved):
            self.counts["saved"] += len(saved)
        else:
            self.counts["unwritten"] += 1

    def recover(self, sessions: Iterable[Session]) -> None:
        """Parks sessions, which have no memory, with their saved memory. Removes all other saved memory."""
        try:
            found = self._parking.tiers.read_index()
        except SnapshotUnusable as error:
            self.counts[error.cause] += 1
            found = None
        except DiskFailed:
            self.counts["unreadable"] += 1
            found = None
        saved = {(each.tenant, each.session): each for each in found.sessions} if found is not None else {}
        wanted = [
            (session, of, position)
            for session in sorted(sessions, key=lambda session: session.last_turn_end)
            if (of := saved.get(session.key)) is not None and (position := self._position(session, of))
        ]
        there: list[tuple[Session, int]] = []
        for session, of, parked in self._parking.take_over(found, wanted):
            outcome = "missing" if parked is None else "restored" if 4 * parked == len(of.tokens) else "partly"
            self.counts[outcome] += 1
            if parked is None:
                session.memory.lost = "parked"
            else:
                there.append((session, parked))
        if self._parking.tiers.has_disk and not self._parking.write_index(there):  # without tokens of closed sessions
            self.counts["unwritten"] += 1

    def _position(self, session: Session, saved: SavedMemory) -> int:
        """Returns the number of tokens of the saved memory that match the session's history and can be resumed."""
        tokens, history = saved.history, session.history
        most = min(len(tokens), max(0, len(history) - 1))
        same = most if tokens[:most] == history[:most] else next(i for i in range(most) if tokens[i] != history[i])
        position = same if same == len(tokens) or not self._parking.needs_whole else 0
        if not position:
            self.counts["stale"] += 1
        return position
