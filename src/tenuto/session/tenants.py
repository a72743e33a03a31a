"""Counters of one tenant, and indexes of its sessions by id, by the state of their turn, and by last use."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from tenuto.base.views import StateFilter
from tenuto.session.session import Session

FEW = 16
"""The most ids that are inserted one by one; more are sorted."""
MANY = 1000
"""The number of ids from which on new ones wait for the next look."""
LastUse = tuple[float, str]
"""Sort key of idle sessions: the time of the last use, and the session's id, which makes it unique."""


class Ids:
    """Ids in order. Adding many before the next look, as a restart does, costs one sort.

    Invariant: `_new` has the ids that are not in `_sorted` yet."""

    def __init__(self) -> None:
        self._sorted: list[str] = []
        self._new: list[str] = []

    def add(self, session_id: str) -> None:
        if len(self._sorted) < MANY:
            insort(self._sorted, session_id)
        else:
            self._new.append(session_id)

    def remove(self, session_id: str) -> None:
        ids = self._settled()
        del ids[bisect_left(ids, session_id)]

    def after(self, session_id: str) -> Iterator[str]:
        """Yields the ids after one, in order. Ids must not change while this is read."""
        ids = self._settled()
        return (ids[i] for i in range(bisect_right(ids, session_id), len(ids)))

    def _settled(self) -> list[str]:
        if len(self._new) > FEW:
            self._sorted += self._new
            self._sorted.sort()
        else:
            for session_id in self._new:
                insort(self._sorted, session_id)
        self._new.clear()
        return self._sorted


class Tenant:
    """Counts a tenant's open sessions, the `pinned` ones among them, their committed tokens, the units that they keep
    on the device, and their bytes in a journal. Shared tokens and units count for each session that has them. Written
    by the registry.

    Invariant: `_ids` has the ids of the sessions that can be listed, and `_by_turn` the same ids, by whether the
    session has no open turn, a draft or a submitted turn. `_resting` has the sessions without an open turn that keep
    units, except pinned ones, and `resting_units` is the number of their units.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self.pinned = 0
        self.tokens = 0
        self.units = 0
        self.journal_bytes = 0
        self.resting_units = 0
        self._ids = Ids()
        self._by_turn = {"idle": Ids(), "drafting": Ids(), "submitted": Ids()}
        self._turns: dict[str, str] = {}  # the key of each id in `_by_turn`
        self._resting: list[tuple[float, str, Session]] = []  # sorted by last use
        self._places: dict[Session, tuple[LastUse, int]] = {}  # last use and kept units of each resting session

    # -- in the order of ids

    def listed(self, after: str, state: StateFilter | None) -> Iterator[str]:
        """Yields the ids after `after` of sessions that may be in `state`, in order: all ids, or only those of sessions
        with the same kind of turn if `state` is about turns. Sessions must not change while this is read."""
        submitted = self._by_turn["submitted"]
        ids = self._ids if state is None or state == "open" else self._by_turn.get(state, submitted)
        return ids.after(after)

    # -- in the order of their last use

    def resting(self) -> Iterator[Session]:
        """Yields the sessions without an open turn whose units may leave the device, least recently used first.
        Sessions must not change while this is read."""
        return (session for _, _, session in self._resting)

    def resting_units_of(self, session: Session | None) -> int:
        """Returns the number of units that the session keeps on the device; 0 if it is not in `resting()`."""
        return self._places[session][1] if session in self._places else 0

    # -- changes

    def add(self, session: Session) -> None:
        """Adds a session that has just been opened."""
        self.sessions += 1
        self.pinned += session.policy.pinned
        if not (session.policy.ephemeral or session.policy.hidden):
            self._ids.add(session.id)
            self._by_turn["idle"].add(session.id)
            self._turns[session.id] = "idle"

    def remove(self, session: Session) -> None:
        """Removes a closed session."""
        self.sessions -= 1
        self.pinned -= session.policy.pinned
        self.tokens -= session.counted
        self.units -= session.counted_units
        self.journal_bytes -= session.counted_bytes
        self._move(session, None)
        if session.id in self._turns:
            self._ids.remove(session.id)
            self._by_turn[self._turns.pop(session.id)].remove(session.id)

    def place(self, session: Session) -> None:
        """Updates the indexes for a session whose open turn, kept units or last use may have changed."""
        turn = session.turn
        rests = turn is None and session.counted_units > 0 and not session.policy.pinned
        self._move(session, (session.last_turn_end, session.id) if rests else None)
        kind = "idle" if turn is None else "drafting" if turn.drafting else "submitted"
        before = self._turns.get(session.id, kind)
        if before != kind:
            self._by_turn[before].remove(session.id)
            self._by_turn[kind].add(session.id)
            self._turns[session.id] = kind

    def _move(self, session: Session, place: LastUse | None) -> None:
        """Moves the session to `place` among the resting ones, or removes it from them (`None`)."""
        old, units = self._places.pop(session, (None, 0))
        self.resting_units -= units
        if old is not None and old != place:
            del self._resting[bisect_left(self._resting, old)]  # entries begin with their place
        if place is not None:
            self._places[session] = place, session.counted_units
            self.resting_units += session.counted_units
            if old != place:
                insort(self._resting, (*place, session))
