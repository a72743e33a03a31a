"""Routes about the fleet, for operators and load balancers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Response

from tenuto.base.wire.messages import CheckLease, FindOwner, GetFleet
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Admin, Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS

_REFUSALS: dict[int | str, dict[str, Any]] = {status: REFUSALS[status] for status in (400, 401, 403, 404, 500, 503)}
_UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The server does not accept requests, or has no lease"}
}
router = APIRouter(route_class=JsonRoute, tags=["operations"], responses=_REFUSALS)


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
