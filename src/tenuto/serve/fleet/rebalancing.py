"""Rebalancing: a replica with much more to do than another moves sessions there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import structlog

from tenuto.base.errors import EngineStopped, TenutoError
from tenuto.base.fleet_views import FleetView, OwnedSession, ReplicaView
from tenuto.base.views import SessionKey
from tenuto.base.wire.fleet_messages import GetFleet, ListOwned
from tenuto.serve.fleet.balance import Shift, chosen, shifts
from tenuto.serve.fleet.moving import Moving
from tenuto.serve.shared.edge import Edge

log = structlog.get_logger("tenuto.fleet")

AT_ONCE = 4
"""How many sessions move at the same time."""
LOOKS = 3
"""In how many looks in a row a replica must find that it has too much."""
STAY_SECONDS = 30.0
"""How long a session stays that has just moved here, or could not move."""


class Rebalancing:
    """Moves sessions of this replica to others by the rule of `balance`, once `LOOKS` looks in a row have asked for
    that, which takes about a lease. After moves it looks again a lease later, when the heartbeats of all replicas count
    them.

    Heartbeats may be outdated. So the target of a move compares its load at that moment with that of the source, and
    refuses a session with which it would have more.
    """

    def __init__(self, edge: Edge, moving: Moving, lease: float) -> None:
        self._edge = edge
        self._moving = moving
        self._lease = lease
        self._stay: dict[SessionKey, float] = {}  # sessions that do not move again until then
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Goes on until `close`, the end of the engine, or this replica drains."""
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def arrived(self, key: SessionKey) -> None:
        """Records that a session has moved here: it stays for a while."""
        self._stay[key] = _now() + STAY_SECONDS

    async def _run(self) -> None:
        found = 0
        while not self._edge.leaving and self._edge.link.stopped is None:
            await asyncio.sleep(self._lease / 2)
            try:
                view = await self._edge.link.call(GetFleet())
                mine = [each for each in shifts(taking(view)) if each.source == view.replica]
                found = found + 1 if mine else 0
                if found == LOOKS:
                    found = 0
                    await self._carry_out(mine, {each.replica: each.url for each in view.replicas})
                    await asyncio.sleep(self._lease)
            except EngineStopped:
                return
            except TenutoError as error:
                found = 0
                log.warning("load cannot be spread now", reason=str(error))

    async def _carry_out(self, mine: Sequence[Shift], urls: dict[int, str]) -> None:
        now = _now()
        self._stay = {key: until for key, until in self._stay.items() if until > now}
        owned = await self._edge.link.call(ListOwned())
        places, moves = asyncio.Semaphore(AT_ONCE), list[Awaitable[None]]()
        for shift in mine:
            moving = chosen(owned, shift, self._stay.keys())
            owned = [each for each in owned if each not in moving]
            moves += [self._move(each, shift, urls[shift.target], places) for each in moving]
        if moves:
            log.info("load is spread", sessions=len(moves), surplus=mine[0].surplus)
        await asyncio.gather(*moves)

    async def _move(self, session: OwnedSession, shift: Shift, url: str, places: asyncio.Semaphore) -> None:
        async with places:
            if self._edge.leaving:
                return
            try:
                await self._moving.move(session.key, url, relieves=shift.surplus)
            except TenutoError:  # logged
                self._stay[session.key] = _now() + STAY_SECONDS


def taking(view: FleetView) -> list[ReplicaView]:
    """Returns the replicas that take sessions."""
    return [each for each in view.replicas if each.live and not each.draining]


def _now() -> float:
    return asyncio.get_running_loop().time()
