"""Routes about the fleet, for operators."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter

from tenuto.base.wire.messages import GetFleet
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Admin, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS

_REFUSALS: dict[int | str, dict[str, Any]] = {status: REFUSALS[status] for status in (400, 401, 403, 404, 500, 503)}
router = APIRouter(route_class=JsonRoute, tags=["operations"], responses=_REFUSALS)


@router.get("/fleet")
async def fleet(edge: EdgeOf, _: Admin) -> dict[str, Any]:
    """Returns the replicas of this server's fleet: where each is, whether its lease has not ended, and how many
    sessions it owns. `replica`: the number of the one that answers."""
    view: dict[str, Any] = msgspec.to_builtins(await edge.link.call(GetFleet()))
    return view
