"""The fleet as this replica's edge sees it: where sessions are, and turns that are begun again."""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from contextlib import suppress
from itertools import chain

import msgspec

from tenuto.base.errors import Draining, TenutoError, Unauthorized
from tenuto.base.fleet_views import FleetView, Membership, Place, ReplicaView, TenantUse
from tenuto.base.views import Listing, SessionKey
from tenuto.base.wire.between import Fate, Forget, List, Move
from tenuto.base.wire.fleet_messages import Enter, GetFleet, ListAbandoned, ListUnowned, Locate, TellLoad
from tenuto.base.wire.messages import ListSessions, StartTurn
from tenuto.serve.fleet.asking import SECRET, Between
from tenuto.serve.fleet.draining import Drain, by_room, others
from tenuto.serve.fleet.moving import Moving
from tenuto.serve.fleet.peers import Broken, Peers, Reply
from tenuto.serve.fleet.rebalancing import Rebalancing
from tenuto.serve.fleet.relays import Relays
from tenuto.serve.shared.edge import SHUTTING_DOWN, Edge

TOLD = 5
"""How often in a lease the edge reports to the engine process."""
MAX_PLACES = 100_000
"""The most sessions of other replicas whose places are remembered."""


class Fleet:
    """The fleet as this replica's edge sees it.

    Invariant: a place in `_elsewhere` was right at some time. If it is outdated, the replica there refuses requests for
    the session, and the place is then looked up again.
    """

    def __init__(self, edge: Edge, membership: Membership, secret: str) -> None:
        """`secret`: known only to the fleet's replicas."""
        self.edge = edge
        self.peers = Peers(self._watch)
        self.lease = membership.lease
        self.secret = secret
        self.between = Between(self.peers, secret)
        self.relays = Relays(edge.turns, self.between, self.seek, self.lease)
        self.moving = Moving(edge, self.between, self.relays)
        self.drain = Drain(edge, self.moving)
        self.rebalancing = Rebalancing(edge, self.moving, self.lease)
        self._said: TellLoad | None = None
        self._limited = edge.settings.tenants.limited
        self._telling: asyncio.Task[None] | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._elsewhere: OrderedDict[SessionKey, str] = OrderedDict()
        self._asking: set[asyncio.Task[Place]] = set()

    @classmethod
    async def enter(cls, edge: Edge) -> Fleet:
        """Returns the fleet that the engine has joined. Its secret is that of the edge's settings, or the one in the
        database."""
        membership = await edge.link.call(Enter())
        fleet = cls(edge, membership, edge.settings.fleet_secret or membership.secret)
        edge.is_elsewhere = fleet.is_elsewhere
        edge.listed_elsewhere = fleet.listed
        edge.elsewhere_knows = fleet.knows
        edge.erase_elsewhere = fleet.erase
        edge.bring = fleet.bring
        edge.ask_objects, edge.replica = edge.link.call, membership.replica
        edge.in_fleet = True
        edge.turns.spared.after = fleet.lease
        fleet._telling = asyncio.ensure_future(fleet._tell_on())
        fleet._resuming = asyncio.ensure_future(fleet._resume_on())
        if edge.settings.fleet_rebalance:
            fleet.rebalancing.begin()
        return fleet

    async def close(self) -> None:
        """Ends the work that goes on beside requests."""
        for task in (self._telling, self._resuming):
            if task is not None:
                task.cancel()
        self.drain.close()
        self.rebalancing.close()
        await self.moving.close()
        self.peers.close()

    async def _tell_on(self) -> None:
        """Reports the state of the edge to the engine process, for its next heartbeat."""
        while self.edge.link.stopped is None:
            with suppress(TenutoError):
                await self.tell()
            await asyncio.sleep(self.lease / TOLD)

    async def _resume_on(self) -> None:
        """Continues the work of replicas that are gone."""
        while self.edge.link.stopped is None:
            await asyncio.sleep(self.lease)
            for kind, resume in self.edge.resumes.items():
                with suppress(TenutoError):
                    for each in await self.edge.link.call(ListAbandoned(kind=kind)):
                        await resume(each.tenant, each.name)

    async def tell(self) -> None:
        """Reports the state of the edge once, if it has changed, and learns the use of tenants at other replicas."""
        turns, draining = self.edge.turns, self.drain.begun
        tenants = {
            name: TenantUse(turns=self.edge.turns_of(name), queued=turns.queues.waiting[name]) for name in self._limited
        }
        waited_for, moves = self.drain.waited_for, self.moving.view
        told = TellLoad(open_turns=waited_for, draining=draining, moves=moves, tenants=tenants)
        if told != self._said or tenants:
            turns.queues.used_elsewhere = await self.edge.link.call(told)
            self._said = told

    async def instead(self) -> str:
        """Returns the address of the replica with most room, to take new sessions in place of this one. Raises
        `Draining`."""
        if not (found := by_room(others(await self.replicas()))):
            raise Draining(SHUTTING_DOWN)
        return found[0].url

    def is_forwarded(self, given: str | None) -> bool:
        """Whether a request with this value of the header `SECRET` was forwarded. Raises `Unauthorized` if that is not
        the fleet's secret."""
        if given is None:
            return False
        if not hmac.compare_digest(given.encode(), self.secret.encode()):
            raise Unauthorized(f"{SECRET} is not the secret of this fleet")
        return True

    async def place(self, key: SessionKey, *, anew: bool = False) -> str | None:
        """Returns the URL of the other replica that owns a session; `None` if this one owns it, or it does not exist.
        `anew`: without a place that is remembered."""
        if not anew and (known := self._elsewhere.get(key)) is not None:
            self._elsewhere.move_to_end(key)
            return known
        url = (await self.locate(key)).url
        if url is None:
            self._elsewhere.pop(key, None)
        else:
            self._elsewhere[key] = url
            if len(self._elsewhere) > MAX_PLACES:
                self._elsewhere.popitem(last=False)
        return url

    async def seek(self, key: SessionKey) -> str | None:
        """Calls `place`, without a place that is remembered."""
        return await self.place(key, anew=True)

    def arrived(self, key: SessionKey) -> None:
        """Records that a session has moved here."""
        self._elsewhere.pop(key, None)
        self.rebalancing.arrived(key)

    async def replicas(self) -> FleetView:
        """Returns the fleet as it is in the database. Raises `NotAcknowledged`."""
        return await self.edge.link.call(GetFleet())

    async def _watch(self, reply: Reply, url: str) -> None:
        """Breaks the connection to a silent replica once its lease has ended."""
        heard = reply.heard
        while True:
            await asyncio.sleep(self.lease)
            if reply.heard == heard:
                with suppress(TenutoError):  # the database cannot be asked
                    if not any(each.live and each.url == url for each in (await self.replicas()).replicas):
                        reply.fail(Broken("its lease has ended"))
                        return
            heard = reply.heard

    async def locate(self, key: SessionKey) -> Place:
        """Asks where a session is. If this replica takes it over, and its last owner had accepted a turn, the turn is
        begun again, even if the caller is cancelled meanwhile."""
        asking = asyncio.ensure_future(self._locate(key))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return await asyncio.shield(asking)

    async def _locate(self, key: SessionKey) -> Place:
        tenant, session = key
        place = await self.edge.link.call(Locate(tenant=tenant, session=session))
        if place.begun is not None:
            self.edge.turns.begin_again(msgspec.msgpack.decode(place.begun, type=StartTurn))
        return place

    async def listed(self, asked: ListSessions) -> list[Listing]:
        """Returns the sessions that the other replicas have, and those that no live replica owns. Raises `Unreachable`
        or `Disconnected` if a replica does not answer."""
        view = await self.replicas()
        others = [each.url for each in view.replicas if each.live and each.replica != view.replica]
        answers = await asyncio.gather(*(self.between.ask(url, List(asked=asked)) for url in others))
        found = [msgspec.msgpack.decode(answer, type=Listing) for answer in answers]
        if asked.state in (None, "open", "idle"):
            unowned = ListUnowned(tenant=asked.tenant, after=asked.after, limit=asked.limit)
            page = await self.edge.link.call(unowned)
            found.append(Listing(sessions=page.sessions, turns={}, more=page.more))
        return found

    async def bring(self, key: SessionKey) -> None:
        """Has a session move here, if another replica owns it. Raises the errors of `Between.ask`."""
        if (url := await self.seek(key)) is not None:
            view = await self.replicas()
            here = next(each.url for each in view.replicas if each.replica == view.replica)
            await self.between.ask(url, Move(tenant=key[0], session=key[1], url=here))
            self.arrived(key)

    async def erase(self, key: SessionKey) -> list[str]:
        """Has the other replicas overwrite what they have of a session that was erased here. Returns which parts could
        not be overwritten, and why."""
        try:
            view = await self.replicas()
        except TenutoError as error:
            return [f"the other replicas are not known: {error}"]
        others = [each for each in view.replicas if each.live and each.replica != view.replica]
        return list(chain.from_iterable(await asyncio.gather(*(self._erase_at(each, key) for each in others))))

    async def _erase_at(self, replica: ReplicaView, key: SessionKey) -> list[str]:
        try:
            answer = await self.between.ask(replica.url, Forget(tenant=key[0], session=key[1]))
        except TenutoError as error:
            return [f"replica {replica.replica} may have a part of the session: {error}"]
        return [f"replica {replica.replica}: {each}" for each in msgspec.msgpack.decode(answer, type=list[str])]

    async def knows(self, tenant: str, response: str) -> bytes | None:
        """Asks the replica that has a response's session for the response's output, in JSON. Returns `None` if this
        replica has the session, or it does not exist. Raises the errors of `Between.ask`."""
        url = await self.seek((tenant, response))
        return await self.between.ask(url, Fate(tenant=tenant, response=response)) if url is not None else None

    async def is_elsewhere(self, key: SessionKey) -> bool:
        """Whether another replica owns the session."""
        return await self.place(key, anew=True) is not None
