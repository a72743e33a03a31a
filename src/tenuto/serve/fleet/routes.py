"""Routes about the fleet, for operators and load balancers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from tenuto.base.errors import InvalidRequest, NotFound
from tenuto.base.wire.between import Empty, Move
from tenuto.base.wire.fleet_messages import CheckLease, FindOwner, GetFleet
from tenuto.base.wire.messages import GetSession
from tenuto.serve.fleet.fleet import Fleet
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Admin, Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS, Object

_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: REFUSALS[status] for status in (400, 401, 403, 404, 409, 500, 503, 507)
}
_UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The server does not accept requests, or has no lease"}
}
router = APIRouter(route_class=JsonRoute, tags=["operations"], responses=_REFUSALS)


class NewMove(Object):
    """A session to move. `to`: the number of a replica, or its address. `tenant`: that of the session, by default the
    caller's."""

    session: str = Field(min_length=1)
    tenant: str | None = None
    to: int | str


@router.post("/fleet/move")
async def move(edge: EdgeOf, admin: Admin, body: NewMove, request: Request) -> dict[str, Any]:
    """Moves a session, with its state and its open turn, to another replica. Answers once it is there; if it could not
    be moved, it stays where it was, and its turn goes on."""
    edge.require_engine()
    fleet = _fleet(request)
    key = body.tenant if body.tenant is not None else admin.name, body.session
    view = await fleet.replicas()
    ready = [
        each for each in view.replicas if each.live and not each.draining
    ]  # an ended one may have the same address
    target = next((each for each in ready if body.to in (each.replica, each.url, str(each.replica))), None)
    if target is None:
        allowed = [each.replica for each in ready]
        raise InvalidRequest(f"to is {body.to!r}; allowed: a replica that takes sessions: {allowed}", param="to")
    here = next(each for each in view.replicas if each.replica == view.replica)
    await edge.link.call(GetSession(tenant=key[0], session=key[1])) if (
        owner := await fleet.seek(key)
    ) is None else None
    source = owner or here.url
    if source == target.url:
        raise InvalidRequest(f"replica {target.replica} owns session {body.session} already", param="to")
    if owner is None:
        await fleet.moving.move(key, target.url)
    else:
        await fleet.between.ask(owner, Move(tenant=key[0], session=key[1], url=target.url))
    return {"session": body.session, "tenant": key[0], "from": source, "to": target.url}


class NewDrain(Object):
    """The number of the replica to empty; by default, the one that receives the request."""

    replica: int | None = None


@router.post("/fleet/drain", status_code=202)
async def drain(edge: EdgeOf, _: Admin, request: Request, body: NewDrain | None = None) -> dict[str, Any]:
    """Empties a replica: it takes nothing new, and its sessions move to others, with their open turns. Answers once
    that has begun; `GET /fleet` shows the replica as `draining`, and as `empty` in the end. It goes on to serve its
    clients, and does not end by itself."""
    edge.require_engine()
    fleet = _fleet(request)
    view = await fleet.replicas()
    number = body.replica if body is not None and body.replica is not None else view.replica
    target = next((each for each in view.replicas if each.replica == number and each.live), None)
    if target is None:
        allowed = [each.replica for each in view.replicas if each.live]
        raise InvalidRequest(f"replica is {number}; allowed: a replica that lives: {allowed}", param="replica")
    if number == view.replica:
        fleet.drain.begin(view)
        await fleet.tell()
    else:
        await fleet.between.ask(target.url, Empty())
    return {"replica": number, "url": target.url, "draining": True}


def _fleet(request: Request) -> Fleet:
    fleet: Fleet | None = request.app.state.fleet
    if fleet is None:
        raise NotFound("this server is not a replica of a fleet; see --fleet")
    return fleet


@router.get("/fleet")
async def fleet(edge: EdgeOf, _: Admin) -> dict[str, Any]:
    """Returns the replicas of this server's fleet: where each is, whether its lease has not ended, and how many
    sessions it owns. `replica`: the number of the one that answers."""
    view: dict[str, Any] = msgspec.to_builtins(await edge.link.call(GetFleet()))
    return view


@router.get("/fleet/sessions/{session_id}")
async def owner(session_id: str, edge: EdgeOf, tenant: Caller) -> dict[str, Any]:
    """Returns the `url` of the replica that owns a session, or `null` if its owner's lease has ended, or the session
    does not exist. A load balancer that asks saves its requests a hop."""
    view: dict[str, Any] = msgspec.to_builtins(await edge.link.call(FindOwner(tenant=tenant.name, session=session_id)))
    return view


@router.get("/fleet/ready", response_class=Response, responses=_UNREADY)
async def ready(edge: EdgeOf) -> Response:
    """Whether this replica accepts requests, and holds its lease. Needs no key."""
    return Response(status_code=200 if edge.healthy and await edge.link.call(CheckLease()) else 503)
