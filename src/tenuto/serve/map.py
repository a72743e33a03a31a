"""Routes of the map: its feed, what operators can do from it, and traces."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from tenuto.base.errors import Forbidden, TenutoError
from tenuto.base.views import SessionKey
from tenuto.base.wire.messages import AbortTurn, BeginTrace, EndTrace, ExportSession, ParkSession
from tenuto.serve.map_feed import FeedStream, MapFeed
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Admin, Caller, Edge, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS, Object
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import EVENTS, streamed, while_connected
from tenuto.serve.trace import chrome_trace

MAX_TRACE_SECONDS = 60.0
SessionName = Annotated[str, Query(min_length=1, max_length=128, description="The session's id.")]
TenantName = Annotated[
    str | None, Query(max_length=128, description="Its tenant; others than the caller's need an admin key.")
]

router = APIRouter(route_class=JsonRoute, tags=["operations"], responses=REFUSALS)


class MapAction(Object):
    """An operation on a session. `abort` rolls its open turn back, `park` moves it off the device, `close` closes it.
    `tenant`: the caller's if it is not given; others need an admin key."""

    action: Literal["abort", "park", "close"]
    session: Annotated[str, Field(min_length=1, max_length=128)]
    tenant: Annotated[str | None, Field(max_length=128)] = None


@router.get("/map/feed", response_class=Response, responses=streamed("The map"))
async def feed(edge: EdgeOf, tenant: Caller, request: Request) -> Response:
    """Returns who holds which units of memory, and what the open turns do; never any text. To clients that accept
    `text/event-stream`, it then streams what changes, at most four times a second. Callers without an admin key see
    only their own sessions."""
    edge.require_engine()
    found = edge.part(MapFeed, edge)
    if EVENTS in request.headers.get("accept", ""):
        return FeedStream(found, tenant)
    whole = await while_connected(request, found.whole(tenant))
    return Response(whole, media_type="application/json", headers={"cache-control": "no-store"})


@router.post("/map/action", status_code=204)
async def act(edge: EdgeOf, tenant: Caller, body: MapAction) -> Response:
    """Aborts the open turn of a session, parks the session, or closes it."""
    key = _key(tenant, body.tenant, body.session)
    match body.action:
        case "abort":
            await _abort(edge, key)
        case "park":
            await edge.link.call(ParkSession(tenant=key[0], session=key[1]))
        case "close":
            await edge.turns.close_session(key)
    return Response(status_code=204)


async def _abort(edge: Edge, key: SessionKey) -> None:
    turn = edge.turns.queues.open_turn(key)
    if turn is not None:
        await edge.turns.abort(turn)
    else:
        await edge.link.call(AbortTurn(tenant=key[0], session=key[1]))


@router.get("/map/export", response_class=Response, responses={200: {"content": {"application/json": {"schema": {}}}}})
async def export(edge: EdgeOf, tenant: Caller, session: SessionName, of: TenantName = None) -> Response:
    """Returns a session as a file, as `/v1/sessions/ID/export` does."""
    name, session_id = _key(tenant, of, session)
    document = await edge.link.call(ExportSession(tenant=name, session=session_id))
    return Response(msgspec.json.encode(document), media_type="application/json")


def _key(caller: Tenant, tenant: str | None, session: str) -> SessionKey:
    """Returns the key of the session that a caller names. Raises `Forbidden`."""
    name = caller.name if tenant is None else tenant
    if name != caller.name and not caller.admin:
        raise Forbidden("sessions of other tenants need an admin key")
    return name, session


@router.get("/trace", response_class=Response, responses={200: {"content": {"application/json": {"schema": {}}}}})
async def trace(
    edge: EdgeOf,
    _: Admin,
    request: Request,
    seconds: Annotated[float, Query(gt=0, le=MAX_TRACE_SECONDS, description="How long to record.")] = 5.0,
) -> Response:
    """Records the engine's steps and turns for some seconds, and returns them in the Trace Event Format, which Perfetto
    and Chrome show. One trace is made at a time."""
    found = await while_connected(request, _trace(edge, seconds))
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _trace(edge: Edge, seconds: float) -> dict[str, Any]:
    await edge.link.call(BeginTrace())
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        edge.spawn(_end_trace(edge))
        raise
    return chrome_trace(await edge.link.call(EndTrace()), edge.served_name)


async def _end_trace(edge: Edge) -> None:
    with suppress(TenutoError):
        await edge.link.call(EndTrace())
