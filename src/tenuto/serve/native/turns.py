"""Routes of turns: start a turn, follow its events, abort it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Header, Request, Response
from starlette.requests import ClientDisconnect

from tenuto.base.errors import IllegalTransition, InvalidRequest, SessionBusy
from tenuto.base.turns import TurnKind, check_keep, last_role
from tenuto.base.wire.messages import AbortTurn, Draft
from tenuto.serve.native.answer_schemas import STREAMED, Session, Turn, etag
from tenuto.serve.native.answers import MAX_POSITION, Position, TurnAnswer, shown, turn_body
from tenuto.serve.native.schemas import (
    Abort,
    IfMatch,
    NewAppend,
    NewDraft,
    NewTurn,
    SessionId,
    TurnId,
    turn_input,
    version_of,
)
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.idempotency import RequestKey
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.schemas import REFUSALS, IdempotencyKey
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import EventStream, respond, while_connected

router = APIRouter(route_class=JsonRoute, prefix="/v1/sessions/{session_id}", tags=["sessions"], responses=REFUSALS)


@dataclass(frozen=True, slots=True)
class TurnCall:
    """A request that starts a turn; shared by all routes that do."""

    edge: Edge
    tenant: Tenant
    session_id: str
    request: Request
    if_match: str | None
    idempotency_key: str | None

    async def start(self, kind: TurnKind, body: NewTurn | NewAppend) -> LiveTurn:
        """Starts a turn and returns it once the engine has accepted it."""
        given = turn_input(body.input)
        habits, use = self.edge.model.habits.after(last_role(given)), body.tool_use
        continues, reading = isinstance(body, NewTurn) and body.on_disconnect == "continue", None
        try:
            with body.naming(self.edge.model.context_length):
                more = {"kind": kind, "session": self.session_id, "version": version_of(self.if_match)}
                request = body.start(self.tenant, given, habits, **more)
                if use is not None and kind != "append":
                    reading = use.reading(habits, request.params.grammar)
                if continues:
                    request = msgspec.structs.replace(request, reading=reading)
                starting = self.edge.start(
                    self.tenant,
                    request,
                    queue=body.if_busy == "queue",
                    continues=continues,
                    request_key=await RequestKey.of(self.request, self.idempotency_key),
                )
                turn = await while_connected(self.request, starting)
        except SessionBusy as error:
            raise SessionBusy(f"{error}, or if_busy: queue", param=error.param) from None
        turn.reading = reading or turn.reading
        return turn

    async def answer(self, kind: TurnKind, body: NewTurn | NewAppend, *, stream: bool = False) -> Response:
        """Starts a turn and answers with its events or, without `stream`, the whole turn."""
        turn = await self.start(kind, body)
        response = await respond(self.request, TurnAnswer(self.edge, turn), stream=stream)
        if stream:
            response.headers["x-turn-id"] = turn.id
        elif kind != "append" and turn.result is not None and turn.result.version:
            response.headers["etag"] = etag(turn.result.version)
        return response


async def _turn_call(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    request: Request,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> TurnCall:
    return TurnCall(edge, tenant, session_id, request, if_match, idempotency_key)


CallOf = Annotated[TurnCall, Depends(_turn_call)]


@router.post("/turns", response_model=None, responses=STREAMED)
async def start_turn(call: CallOf, body: NewTurn) -> Response:
    """Starts a turn: appends the input and generates. A draft of the session becomes this turn."""
    return await call.answer("turn", body, stream=body.stream)


@router.post("/regenerate", response_model=None, responses=STREAMED)
async def regenerate(call: CallOf, body: NewTurn) -> Response:
    """Generates the last turn's output again. The old output stays until this turn commits."""
    if body.input:
        raise InvalidRequest("regenerate has input; allowed: no input, since the last turn's is used again")
    return await call.answer("regenerate", body, stream=body.stream)


@router.post("/append", response_model=None, responses={200: {"model": Turn}})
async def append(call: CallOf, body: NewAppend) -> Response:
    """Appends input without generating. The input is committed once it is computed."""
    return await call.answer("append", body)


@router.put("/draft")
async def draft(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    body: NewDraft,
    request: Request,
    response: Response,
    if_match: IfMatch = None,
) -> Session:
    """Computes input ahead of its turn. Send the whole text so far again with every change; text that stays the same is
    computed once. A draft is not part of the history until a turn starts with it, and is dropped if it does not change
    for some time."""
    draft = Draft(
        tenant=tenant.name,
        session=session_id,
        input=turn_input(body.input),
        version=version_of(if_match),
        limits=tenant.limits,
        name=f"draft-{secrets.token_hex(12)}",
    )
    try:
        return await while_connected(request, shown(edge, tenant, draft, response))
    except ClientDisconnect:
        edge.spawn(edge.turns.withdraw(draft.name))
        raise


@router.post("/abort")
async def abort(edge: EdgeOf, tenant: Caller, session_id: SessionId, body: Abort) -> Turn | None:
    """Ends the open turn. It is rolled back or, with `keep`, partly committed. The answer is `null` for a draft."""
    keep = check_keep(None if body.keep == "none" else body.keep)
    if body.turn_id is not None:
        turn = await edge.turns.recall(tenant.name, session_id, body.turn_id)
        if turn.ended:
            raise IllegalTransition(f"turn {turn.id} has ended: it is {turn.state}")
    else:
        found = edge.turns.queues.open_turn((tenant.name, session_id))
        if found is None:
            await edge.link.call(AbortTurn(tenant=tenant.name, session=session_id))
            return None
        turn = found
    await edge.turns.abort(turn, keep)
    return turn_body(turn)


@router.get("/turns/{turn_id}")
async def get_turn(edge: EdgeOf, tenant: Caller, session_id: SessionId, turn_id: TurnId) -> Turn:
    """Returns a turn that is open or ended recently."""
    return turn_body(await edge.turns.recall(tenant.name, session_id, turn_id))


@router.get("/turns/{turn_id}/events", response_class=Response, responses=STREAMED)
async def follow_turn(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    turn_id: TurnId,
    request: Request,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=MAX_POSITION, description="Send only the events after this one.")
    ] = None,
) -> Response:
    """Streams the events of a turn, from its beginning or from where a broken stream ended."""
    turn = await edge.turns.recall(tenant.name, session_id, turn_id)
    after, last = Position.of_id(last_event_id or 0), Position().after(turn.reply())
    if turn.ended and not after.within(last):
        raise InvalidRequest(f"last-event-id is {last_event_id}; allowed: at most {last.id}, the last event")
    await while_connected(request, turn.answered.wait())
    turn.require_accepted()
    stream = EventStream(TurnAnswer(edge, turn, after))
    stream.headers["x-turn-id"] = turn.id
    return stream
