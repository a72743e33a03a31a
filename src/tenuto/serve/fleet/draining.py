"""Draining: a replica that is to end takes nothing new, and its sessions move to others while it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

import structlog

from tenuto.base.errors import Draining, EngineStopped, NotFound, SessionBusy, TenutoError
from tenuto.base.fleet_views import FleetView, OwnedSession, ReplicaView
from tenuto.base.wire.fleet_messages import GetFleet, GiveUpSession, ListOwned
from tenuto.serve.fleet.moving import Moving
from tenuto.serve.shared.edge import Edge

log = structlog.get_logger("tenuto.fleet")

AT_ONCE = 8
"""How many sessions move at the same time."""
PAUSE_SECONDS = 0.1


class Drain:
    """Empties this replica once `begin` was called. It then opens no session and lets none move here: what is new goes
    to another replica. Sessions with open turns move first, to the replicas with most room. An idle session without
    state, or without room elsewhere, is given up once its state is saved, if there is a disk tier. The next replica
    that gets a request for it claims it. After `hurry`, all idle ones are given up.

    Sessions are owned here until they have moved, and their turns go on. Turns without a session that lasts, of single
    requests, end here.
    """

    def __init__(self, edge: Edge, moving: Moving) -> None:
        self._edge = edge
        self._moving = moving
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.Task[None] | None = None
        self._forwarded = {False: 0, True: 0}  # requests that other replicas are answering; True: begun after `begin`

    @property
    def begun(self) -> bool:
        """Whether this replica is to become empty."""
        return self._task is not None

    @property
    def waited_for(self) -> int:
        """The number of turns and forwarded requests that clients of this replica wait for."""
        return len(self._edge.turns.open_turns()) + sum(self._forwarded.values())

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Counts a request of a client here that another replica answers."""
        late = self.begun
        self._forwarded[late] += 1
        try:
            yield
        finally:
            self._forwarded[late] -= 1

    def begin(self, view: FleetView) -> None:
        """Begins to empty this replica, unless that was begun before. Raises `Draining` if no other replica could take
        its sessions."""
        if self._task is None:
            if not others(view):
                raise Draining("no other replica takes sessions; allowed: to drain a replica while another one lives")
            self._edge.leaving = True
            self._task = asyncio.ensure_future(self._run())

    def hurry(self) -> None:
        """Gives idle sessions up from now on, so that the next request for one finds another owner at once."""
        if self._task is not None and not self._task.done() and self._late is None:
            self._late = asyncio.ensure_future(self._give_up_on())

    def close(self) -> None:
        """Ends all this."""
        for task in (self._task, self._late):
            if task is not None:
                task.cancel()

    async def leave(self) -> None:
        """Waits until all sessions have left, and clients have their answers to what they had asked before `begin`.
        Later requests do not prolong this: clients may send one after the other."""
        if self._task is not None:
            await asyncio.shield(self._task)
        await self._until(lambda: not self.waited_for - self._forwarded[True])

    async def wait(self) -> None:
        """Waits until no client waits for anything."""
        await self._until(lambda: not self.waited_for)

    async def _until(self, over: Callable[[], bool]) -> None:
        while not (over() or self._edge.hurried):
            await asyncio.sleep(PAUSE_SECONDS / 5)

    async def _run(self) -> None:
        refused: set[tuple[str, str]] = set()  # sessions that nobody had room for
        while not self._edge.hurried:
            try:
                owned = await self._edge.link.call(ListOwned())
                if not owned:
                    return
                await self._empty(owned, refused)
            except EngineStopped:
                return
            except TenutoError as error:
                log.warning("the replica cannot be emptied yet", reason=str(error))
            await asyncio.sleep(PAUSE_SECONDS)

    async def _give_up_on(self) -> None:
        while self._edge.link.stopped is None:
            with suppress(TenutoError):
                for each in await self._edge.link.call(ListOwned()):
                    if each.idle:
                        with suppress(TenutoError):  # it moves, or its next turn has begun
                            await self._give_up(each, unsaved=True)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _give_up(self, each: OwnedSession, *, unsaved: bool = False) -> None:
        await self._edge.link.call(GiveUpSession(tenant=each.tenant, session=each.session, unsaved=unsaved))

    async def _empty(self, owned: Sequence[OwnedSession], refused: set[tuple[str, str]]) -> None:
        places, turn = asyncio.Semaphore(AT_ONCE), count()

        async def leave(each: OwnedSession) -> None:
            async with places:
                key = each.tenant, each.session
                try:
                    targets = by_room(others(await self._edge.link.call(GetFleet())))  # one may be draining by now
                    url = targets[next(turn) % len(targets)].url if targets else None
                    if each.idle and (not each.units or key in refused or url is None):
                        with suppress(SessionBusy):  # its state is not saved yet, or its next turn has begun
                            await self._give_up(each)
                    elif url is not None:
                        await self._moving.move(key, url)
                except NotFound:
                    pass
                except TenutoError as error:
                    log.warning("a session has not left", session=each.session, reason=str(error))
                    refused.add(key)

        busy_first = sorted(owned, key=lambda each: each.idle)
        await asyncio.gather(*(leave(each) for each in busy_first))


def others(view: FleetView) -> list[ReplicaView]:
    """Returns the other replicas that take sessions."""
    return [each for each in view.replicas if each.live and not each.draining and each.replica != view.replica]


def by_room(replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Returns the replicas with most room first."""
    return sorted(replicas, key=lambda each: (each.used, each.running + each.waiting, each.sessions))
