"""The map as the edge knows it: what the engine has told, put together and written as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tenuto.base.map_feed import (
    KINDS,
    Holding,
    OwnHead,
    PoolAbout,
    Ranges,
    ShownAudit,
    ShownPool,
    ShownSession,
    ShownTurn,
    WholeHead,
)
from tenuto.base.map_views import MapPart, MappedPool, MappedSession, MappedTurn, MappedUnits

Units = npt.NDArray[np.int32]

AGAIN = 64
"""The most sessions to ask about again after one look."""

_json = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Shown:
    """A session on the map: its tenant, its description as JSON, and the units that it has of each pool."""

    tenant: str
    text: bytes
    units: tuple[Units, ...]


@dataclass(frozen=True, slots=True)
class Head:
    """The totals of the map, as JSON: all of them, and those that tenants may see."""

    whole: bytes
    own: bytes


@dataclass(frozen=True, slots=True)
class News:
    """The changes of a look. `again`: numbers of sessions that seem to have given up units."""

    head: Head
    sessions: dict[int, Shown]
    gone: list[int]
    again: list[int]
    more: bool


@dataclass(frozen=True, slots=True)
class _Held:
    """The memory of a session: its leases as the engine listed them, as viewers get them, and its units by pool."""

    leases: list[MappedUnits]
    shown: list[Holding]
    units: tuple[Units, ...]

    @classmethod
    def of(cls, leases: list[MappedUnits], pools: int) -> _Held:
        shown: list[Holding] = []
        every: list[Units] = []
        for pool in range(pools):
            found = np.zeros(0, np.int32)
            for place, kind in enumerate(KINDS):
                mine = [each.units for each in leases if each.pool == pool and each.kind == kind]
                if not mine:
                    continue
                new = np.setdiff1d(np.frombuffer(b"".join(mine), np.int32), found)
                found = np.concatenate([found, new])
                if len(new):
                    shown.append((pool, place, ranges(new)))
            every.append(found)
        return cls(leases, shown, tuple(every))


def ranges(units: Units) -> Ranges:
    """Returns ascending units in pairs."""
    if not len(units):
        return []
    starts = np.flatnonzero(np.diff(units, prepend=units[0] - 2) != 1)
    lengths = np.diff(starts, append=len(units))
    pairs: Ranges = np.stack([units[starts], lengths], axis=1).ravel().tolist()
    return pairs


class MapState:
    """Puts looks together.

    A session's units are known from the last look that described it, and which units are leased from every look. Where
    the two differ, sessions have changed since they were described: units that are leased and that no session is known
    to have are shown as those of `other` holders, and sessions whose units are free are asked about again.

    `_claimed` counts, for every unit, the sessions that have it; `_owner` is one of them, or one that had it.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, Shown] = {}
        self.pools: list[PoolAbout] = []
        self._claimed: list[Units] = []
        self._owner: list[Units] = []
        self._units: dict[int, tuple[Units, ...]] = {}
        self._held: dict[int, _Held] = {}

    def read(self, part: MapPart) -> News:
        """Reads the next look. `sessions` is not changed, so that another thread may use it; see `take`."""
        if not self._claimed:
            self.pools = [
                PoolAbout(name=pool.name, capacity=pool.capacity, slots=pool.slots, unit_bytes=pool.unit_bytes)
                for pool in part.pools
            ]
            self._claimed = [np.zeros(pool.capacity, np.int32) for pool in part.pools]
            self._owner = [np.zeros(pool.capacity, np.int32) for pool in part.pools]
        shown = {session.number: self._shown(session) for session in part.sessions}
        for number, each in shown.items():
            self._claim(number, each.units)
        for number in part.gone:
            self._claim(number, ())
            self._held.pop(number, None)
        again: set[int] = set()
        pools = []
        for index, pool in enumerate(part.pools):
            leased = np.unpackbits(np.frombuffer(pool.leased, np.uint8), count=pool.capacity).astype(np.bool_)
            claimed = self._claimed[index] > 0
            again.update(self._owner[index][claimed & ~leased].tolist())
            pools.append(self._pool(pool, np.flatnonzero(leased & ~claimed).astype(np.int32)))
        head = self._head(part, pools)
        return News(head, shown, part.gone, sorted(again)[:AGAIN], part.more)

    def take(self, news: News) -> dict[int, Shown]:
        """Takes over what `read` returned. Returns the sessions whose descriptions have changed."""
        changed = {
            number: shown
            for number, shown in news.sessions.items()
            if number not in self.sessions or self.sessions[number].text != shown.text
        }
        self.sessions.update(news.sessions)
        return changed

    def _claim(self, number: int, units: tuple[Units, ...]) -> None:
        """Records the units that a session has now, instead of those that it had."""
        if units and self._units.get(number) is units:
            return
        for claimed, before in zip(self._claimed, self._units.pop(number, ()), strict=False):
            claimed[before] -= 1
        for claimed, owner, now in zip(self._claimed, self._owner, units, strict=False):
            claimed[now] += 1
            owner[now] = number
        if units:
            self._units[number] = units

    def _shown(self, session: MappedSession) -> Shown:
        before = self._held.get(session.number)
        if before is None or before.leases != session.held:
            before = self._held[session.number] = _Held.of(session.held, len(self.pools))
        return Shown(session.tenant, _json.encode(_session(session, before.shown)), before.units)

    @staticmethod
    def _pool(pool: MappedPool, other: Units) -> ShownPool:
        limbo = np.sort(np.frombuffer(pool.limbo, np.int32))
        return ShownPool(free=pool.free, limbo=ranges(limbo), other=ranges(other))

    @staticmethod
    def _head(part: MapPart, pools: list[ShownPool]) -> Head:
        own = OwnHead(t=round(part.now, 3), more=part.more)
        whole = WholeHead(
            t=own.t,
            more=own.more,
            steps=part.steps,
            open=part.open,
            running=part.running,
            rows=part.rows,
            queued=part.queued,
            computed=part.computed,
            generated=part.generated,
            busy=round(part.busy, 4),
            restored=part.restored,
            tiers=part.tiers,
            moves=part.tier_moves,
            pools=pools,
            audit=_audit(part),
        )
        return Head(_json.encode(whole), _json.encode(own))


def _audit(part: MapPart) -> ShownAudit | None:
    report = part.audit
    if report is None:
        return None
    return ShownAudit(
        holders=report.holders,
        leases=report.leases,
        pools={pool.name: dict(pool.by_holder) for pool in report.pools},
        age=round(part.audited, 1),
    )


def _session(session: MappedSession, held: list[Holding]) -> ShownSession:
    return ShownSession(
        n=session.number,
        id=session.session,
        tenant=session.tenant,
        state=session.state,
        listed=session.listed,
        pinned=session.pinned,
        version=session.version,
        parent=session.parent,
        forked=session.forked,
        turns=session.turns,
        recent=session.recent,
        tokens=session.tokens,
        computed=session.computed,
        parked=session.parked,
        tier=session.tier,
        saved=session.saved,
        since=round(session.since, 2),
        arriving=session.arriving,
        held=held,
        turn=_turn(session.turn) if session.turn is not None else None,
    )


def _turn(turn: MappedTurn) -> ShownTurn:
    return ShownTurn(
        n=turn.number,
        phase=turn.phase,
        why=turn.why,
        prompt=turn.prompt,
        cached=turn.cached,
        computed=turn.computed,
        output=turn.output,
        limit=turn.limit,
        arrived=round(turn.arrived, 2),
    )


def visible(sessions: Iterable[tuple[int, Shown]], tenant: str | None) -> list[bytes]:
    """Returns the descriptions of those sessions that a tenant may see; `None`: all."""
    return [shown.text for _, shown in sessions if tenant is None or shown.tenant == tenant]
