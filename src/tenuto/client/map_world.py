"""The map of a server as its feed's events add up: sessions, and what each unit of each pool is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from tenuto.base.map_feed import KINDS, About, Change, OwnHead, Picture, PoolAbout, Ranges, ShownSession, WholeHead
from tenuto.client.wire import valid_answer

Numbers = npt.NDArray[np.int32]

CHECKPOINTS = (KINDS.index("checkpoint"), KINDS.index("cached"))
CLOSED = KINDS.index("prefix")
TURN = KINDS.index("turn")


class What(IntEnum):
    """A unit is `OTHER` if none of the sessions shown holds it, and `SHARED` if several do."""

    FREE = 0
    LIMBO = 1
    OTHER = 2
    SHARED = 3
    CHECKPOINT = 4
    CLOSED = 5
    TURN = 6
    SESSION = 7


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of a pool: what most of its units are that are not free, the number of the session that holds those (0:
    none, or more than one), and the share of units that are not free."""

    what: What
    session: int
    share: float


def expanded(ranges: Ranges) -> Numbers:
    """Returns the units in `ranges`."""
    first, counts = np.array(ranges[::2], np.int32), np.array(ranges[1::2], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    return np.repeat(first - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)


def count_of(ranges: Ranges) -> int:
    """Returns the number of units in `ranges`."""
    return sum(ranges[1::2])


class PoolWorld:
    """A pool. For every unit it has the number of sessions that hold it, the exclusive or of their numbers, and the sum
    of the kinds of their leases. Where one session holds a unit, the last two are its number and its kind."""

    def __init__(self, about: PoolAbout) -> None:
        self.about = about
        self.free = about.capacity
        self.limbo: Ranges = []
        self.other: Ranges = []
        self._sessions = np.zeros(about.capacity, np.int32)
        self._mix = np.zeros(about.capacity, np.int32)
        self._kinds = np.zeros(about.capacity, np.int32)

    def add(self, units: Numbers, session: int, kind: int, sign: int) -> None:
        """Adds a session's lease (`sign` 1), or takes it away (-1)."""
        self._sessions[units] += sign
        self._mix[units] ^= session
        self._kinds[units] += sign * kind

    def whats(self) -> npt.NDArray[np.int8]:
        """Returns what every unit is, as numbers of `What`."""
        kinds = np.full(len(KINDS), What.CHECKPOINT, np.int8)
        kinds[[TURN, KINDS.index("session"), CLOSED]] = What.TURN, What.SESSION, What.CLOSED
        found = np.where(self._sessions == 1, kinds[np.clip(self._kinds, 0, len(KINDS) - 1)], What.FREE).astype(np.int8)
        other = expanded(self.other)
        found[other[self._sessions[other] == 0]] = What.OTHER
        found[self._sessions > 1] = What.SHARED
        found[expanded(self.limbo)] = What.LIMBO
        return found

    def sum(self) -> dict[What, int]:
        """Returns the number of units by what they are. They add up to the capacity."""
        counts = np.bincount(self.whats(), minlength=len(What))
        return {what: int(counts[what]) for what in What}

    def cells(self, number: int) -> list[Cell]:
        """Returns the pool in at most `number` parts of about the same size."""
        capacity = self.about.capacity
        number, what = min(number, capacity), self.whats()
        place = np.arange(capacity, dtype=np.int64) * number // capacity
        sizes = np.bincount(place, minlength=number)
        held = np.flatnonzero(what)
        shares = (np.bincount(place[held], minlength=number) / sizes).tolist()
        owner = np.where((self._sessions == 1) & (what > What.SHARED), self._mix, 0).astype(np.int64)
        pairs, counts = np.unique(np.stack([place, owner * len(What) + what])[:, held], axis=1, return_counts=True)
        most = np.lexsort((counts, pairs[0]))  # the last of each place is that of the most units
        of = dict(zip(pairs[0][most].tolist(), pairs[1][most].tolist(), strict=True))
        return [
            Cell(What(of[each] % len(What)), of[each] // len(What), share) if share else Cell(What.FREE, 0, 0.0)
            for each, share in enumerate(shares)
        ]

    def alone(self, units: Numbers) -> int:
        """Returns how many of the units one session has."""
        return int(np.count_nonzero(self._sessions[units] == 1))


class World:
    """The state of the map. `units`: the number of units that each session holds. `whole`: the totals, if the viewer
    is an admin. `now`: the engine's clock at the last event."""

    def __init__(self, picture: Picture) -> None:
        self.about: About = picture.about
        self.pools = [PoolWorld(pool) for pool in picture.about.pools]
        self.sessions: dict[int, ShownSession] = {}
        self.units: dict[int, int] = {}
        self.whole: WholeHead | None = None
        self.now = 0.0
        self.more = False
        self.apply(picture)

    def apply(self, change: Change) -> None:
        """Adds the next event of the feed."""
        for number in change.gone:
            self._add(self.sessions.pop(number, None), -1)
            self.units.pop(number, None)
        for session in change.sessions:
            before = self.sessions.get(session.n)
            if before is None or before.held != session.held:
                self._add(before, -1)
                self._add(session, 1)
                self.units[session.n] = sum(count_of(ranges) for _, _, ranges in session.held)
            self.sessions[session.n] = session
        with valid_answer():
            head = msgspec.json.decode(change.head, type=WholeHead if self.about.admin else OwnHead)
        self.now, self.more = head.t, head.more
        if isinstance(head, WholeHead):
            self.whole = head
            for pool, shown in zip(self.pools, head.pools, strict=True):
                pool.free, pool.limbo, pool.other = shown.free, shown.limbo, shown.other

    def _add(self, session: ShownSession | None, sign: int) -> None:
        if session is not None:
            for pool, kind, ranges in session.held:
                self.pools[pool].add(expanded(ranges), session.n, kind, sign)

    def shared(self, session: ShownSession) -> int:
        """Returns how many of a session's units others have, too."""
        alone = sum(self.pools[pool].alone(expanded(ranges)) for pool, _, ranges in session.held)
        return self.units[session.n] - alone

    def in_use(self) -> float:
        """Returns the share of the memory that is leased, from 0 to 1, or nan if the viewer is not an admin."""
        if self.whole is None:
            return float("nan")
        weights = [pool.about.unit_bytes or 1 for pool in self.pools]
        capacity = sum(pool.about.capacity * weight for pool, weight in zip(self.pools, weights, strict=True))
        leased = [pool.about.capacity - pool.free - count_of(pool.limbo) for pool in self.pools]
        used = sum(count * weight for count, weight in zip(leased, weights, strict=True))
        return used / capacity if capacity else 0.0
