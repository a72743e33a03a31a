"""Routes of turns: start one, follow its events, abort it."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from tenuto.base.checks import MAX_COUNT
from tenuto.base.errors import IllegalTransition, InvalidRequest
from tenuto.base.messages import AbortTurn, Draft, StartTurn
from tenuto.base.options import turn_params
from tenuto.base.turns import TurnKind, check_keep
from tenuto.serve.native.answers import session_body, turn_body, turn_events
from tenuto.serve.native.schemas import (
    STREAMED,
    Abort,
    IfMatch,
    NewAppend,
    NewDraft,
    NewTurn,
    Session,
    SessionId,
    Turn,
    TurnId,
    etag,
    turn_input,
    version_of,
)
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.idempotency import RequestKey
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.schemas import REFUSALS, IdempotencyKey, options_of, random_seed
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import EventStream, while_connected

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["sessions"])


@router.post("/turns", response_model=None, responses=REFUSALS | STREAMED)
async def start_turn(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    body: NewTurn,
    request: Request,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Start a turn: append the input and generate. A draft of the session becomes this turn."""
    start = _request(tenant, session_id, "turn", body, if_match)
    turn = await _start(edge, tenant, request, start, body, idempotency_key)
    return await _answer(edge, request, turn, body)


@router.post("/regenerate", response_model=None, responses=REFUSALS | STREAMED)
async def regenerate(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    body: NewTurn,
    request: Request,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Generate the last turn's output again. The old one stays until this turn commits."""
    if body.input:
        raise InvalidRequest("regenerate takes no input; the last turn's stays")
    start = _request(tenant, session_id, "regenerate", body, if_match)
    turn = await _start(edge, tenant, request, start, body, idempotency_key)
    return await _answer(edge, request, turn, body)


@router.post("/append", responses=REFUSALS)
async def append(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    body: NewAppend,
    request: Request,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Turn:
    """Append input without an answer; it is committed when it is computed."""
    start = _request(tenant, session_id, "append", body, if_match)
    turn = await _start(edge, tenant, request, start, body, idempotency_key)
    return await _ended(edge, request, turn)


@router.put("/draft", responses=REFUSALS)
async def draft(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    body: NewDraft,
    request: Request,
    response: Response,
    if_match: IfMatch = None,
) -> Session:
    """Give the whole text so far, again with every change: what stays the same is computed once. It is no history until
    a turn with it is started; a draft nobody changes is given up."""
    draft = Draft(
        tenant=tenant.name,
        session=session_id,
        input=turn_input(body.input),
        version=version_of(if_match),
        limits=tenant.limits,
        name=f"draft-{secrets.token_hex(12)}",
    )
    try:
        info = await while_connected(request, edge.link.call(draft))
    except ClientDisconnect:
        edge.spawn(edge.turns.withdraw(draft.name))
        raise
    response.headers["etag"] = etag(info.version)
    return session_body(edge, tenant, info)


@router.post("/abort", responses=REFUSALS)
async def abort(edge: EdgeOf, tenant: Caller, session_id: SessionId, body: Abort) -> Turn | None:
    """End the open turn. Its session is as before, or, with `keep`, has what was said so far. `null`: it was a
    draft."""
    keep = check_keep(None if body.keep == "none" else body.keep)
    if body.turn_id is not None:
        turn = edge.turns.find(tenant.name, session_id, body.turn_id)
        if turn.ended:
            raise IllegalTransition(f"turn {turn.id} has ended: it is {turn.state}")
    else:
        found = edge.turns.open_turn((tenant.name, session_id))
        if found is None:
            await edge.link.call(AbortTurn(tenant=tenant.name, session=session_id))
            return None
        turn = found
    await edge.turns.abort(turn, keep)
    return turn_body(turn)


@router.get("/turns/{turn_id}", responses=REFUSALS)
async def get_turn(edge: EdgeOf, tenant: Caller, session_id: SessionId, turn_id: TurnId) -> Turn:
    """A turn that is open or ended not long ago."""
    return turn_body(edge.turns.find(tenant.name, session_id, turn_id))


@router.get("/turns/{turn_id}/events", response_class=Response, responses=REFUSALS | STREAMED)
async def follow_turn(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    turn_id: TurnId,
    request: Request,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=MAX_COUNT, description="Send what came after this event.")
    ] = None,
) -> Response:
    """The events of a turn, from its beginning or from where a broken stream ended."""
    turn = edge.turns.find(tenant.name, session_id, turn_id)
    position = last_event_id or 0
    if position > len(turn.deltas):
        raise InvalidRequest(f"last-event-id is {position}; allowed: at most {len(turn.deltas)}, the last there is")
    await while_connected(request, turn.answered.wait())
    return _stream(edge, turn, position)


def _request(
    tenant: Tenant, session_id: str, kind: TurnKind, body: NewTurn | NewAppend, if_match: str | None
) -> StartTurn:
    options = options_of(body)
    if options.get("temperature"):
        options.setdefault("seed", random_seed())
    return StartTurn(
        kind=kind,
        tenant=tenant.name,
        session=session_id,
        input=turn_input(body.input),
        params=turn_params(options),
        version=version_of(if_match),
        limits=tenant.limits,
    )


async def _start(
    edge: Edge, tenant: Tenant, request: Request, start: StartTurn, body: NewTurn | NewAppend, key: str | None
) -> LiveTurn:
    starting = edge.start(
        tenant,
        start,
        queue=body.if_busy == "queue",
        continues=isinstance(body, NewTurn) and body.on_disconnect == "continue",
        request_key=await RequestKey.of(request, key),
    )
    return await while_connected(request, starting)


async def _answer(edge: Edge, request: Request, turn: LiveTurn, body: NewTurn) -> Response:
    if body.stream:
        return _stream(edge, turn, 0)
    ended = await _ended(edge, request, turn)
    return JSONResponse(ended.model_dump(), headers={"etag": etag(ended.version)} if ended.version else None)


async def _ended(edge: Edge, request: Request, turn: LiveTurn) -> Turn:
    """The turn once it has ended."""
    try:
        await while_connected(request, turn.finished())
    finally:
        edge.turns.abandon(turn)
    return turn_body(turn)


def _stream(edge: Edge, turn: LiveTurn, position: int) -> Response:
    return EventStream(turn_events(turn, position), lambda: edge.turns.abandon(turn), {"x-turn-id": turn.id})
