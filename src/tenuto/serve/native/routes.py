"""The native interface: sessions as resources, turns as transactions on them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from tenuto.base.checks import MAX_COUNT
from tenuto.base.errors import IllegalTransition, InvalidRequest, TenutoError
from tenuto.base.messages import (
    AbortTurn,
    Draft,
    Fork,
    GetSession,
    ListSessions,
    ListTurns,
    OpenSession,
    Rewind,
    StartTurn,
    Trim,
)
from tenuto.base.options import Policy, turn_params
from tenuto.base.turns import Message, TurnInput, TurnKind, check_keep
from tenuto.base.views import SessionInfo, StateFilter
from tenuto.serve.native import schemas as native_schemas
from tenuto.serve.native.schemas import (
    REFUSALS,
    STREAMED,
    Abort,
    IdempotencyKey,
    IfMatch,
    NewAppend,
    NewDraft,
    NewFork,
    NewSession,
    NewTrim,
    NewTurn,
    Position,
    RecordList,
    Session,
    SessionId,
    SessionList,
    Turn,
    TurnId,
    Usage,
)
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf, Failure, digest_of
from tenuto.serve.shared.schemas import logprob_body, options_of, random_seed
from tenuto.serve.shared.settings import Tenant, new_session_id
from tenuto.serve.shared.sse import EventStream, event, while_connected
from tenuto.serve.shared.turns import LiveTurn

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

# -- sessions


@router.post("", status_code=201, responses=REFUSALS)
async def open_session(edge: EdgeOf, tenant: Caller, body: NewSession, response: Response) -> Session:
    """Open a session."""
    view = await edge.link.call(
        OpenSession(
            session=body.id or new_session_id(),
            policy=Policy(
                body.priority,
                edge.settings.ttl(body.ttl, named=body.id is not None),
                body.max_tokens,
                tenant=tenant.name,
                metadata=tuple(body.metadata.items()),
            ),
            system=body.system,
            limits=tenant.limits,
        )
    )
    response.headers["location"] = f"/v1/sessions/{view.session_id}"
    return _session(edge, tenant, view, response)


@router.get("", responses=REFUSALS)
async def list_sessions(
    edge: EdgeOf,
    tenant: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(pattern=r"^[A-Za-z0-9._:-]{0,64}$", description="List those behind this id.")] = "",
    state: Annotated[
        StateFilter | None,
        Query(description="Of the session, or of its open turn."),
    ] = None,
) -> SessionList:
    """Your sessions, by id."""
    page = await edge.link.call(ListSessions(tenant=tenant.name, after=after, limit=limit, state=state))
    following = page.sessions[-1].session_id if page.more else None
    return SessionList(data=[_session(edge, tenant, view) for view in page.sessions], next=following)


@router.get("/{session_id}", responses=REFUSALS)
async def get_session(edge: EdgeOf, tenant: Caller, session_id: SessionId, response: Response) -> Session:
    """A session as it is now."""
    view = await edge.link.call(GetSession(tenant=tenant.name, session=session_id))
    return _session(edge, tenant, view, response)


@router.delete("/{session_id}", status_code=204, responses=REFUSALS)
async def close_session(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    finish: Annotated[bool, Query(description="Let its open turn end first; else that is aborted.")] = False,
    if_match: IfMatch = None,
) -> Response:
    """Close a session."""
    version = _version(if_match)
    await edge.desk.close_session((tenant.name, session_id), finish=finish, version=version)
    return Response(status_code=204)


@router.get("/{session_id}/turns", responses=REFUSALS)
async def list_turns(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    first: Annotated[int, Query(ge=1, description="Number of the first; 1 is the oldest.")] = 1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> RecordList:
    """Its committed turns, with their tokens and texts."""
    page = await edge.link.call(ListTurns(tenant=tenant.name, session=session_id, first=first, limit=limit))
    return RecordList(data=page.records, next=first + len(page.records) if page.more else None)


@router.post("/{session_id}/fork", status_code=201, responses=REFUSALS)
async def fork(
    edge: EdgeOf, tenant: Caller, session_id: SessionId, body: NewFork, response: Response, if_match: IfMatch = None
) -> Session:
    """A new session with the same beginning; memory is shared. While a turn is open, it sees the last commit."""
    view = await edge.link.call(
        Fork(
            tenant=tenant.name,
            session=session_id,
            child=body.id or new_session_id(),
            turn=body.turn,
            position=body.position,
            version=_version(if_match),
            limits=tenant.limits,
        )
    )
    return _session(edge, tenant, view, response)


@router.post("/{session_id}/rewind", responses=REFUSALS)
async def rewind(
    edge: EdgeOf, tenant: Caller, session_id: SessionId, body: Position, response: Response, if_match: IfMatch = None
) -> Session:
    """Cut the history back. Refused while a turn is open."""
    request = Rewind(
        tenant=tenant.name, session=session_id, turn=body.turn, position=body.position, version=_version(if_match)
    )
    return _session(edge, tenant, await edge.link.call(request), response)


@router.post("/{session_id}/trim", status_code=201, responses=REFUSALS)
async def trim(
    edge: EdgeOf, tenant: Caller, session_id: SessionId, body: NewTrim, response: Response, if_match: IfMatch = None
) -> Session:
    """A new session with some turns of this one. Those at its start are shared, others are computed when needed."""
    view = await edge.link.call(
        Trim(
            tenant=tenant.name,
            session=session_id,
            child=body.id or new_session_id(),
            turns=body.turns,
            version=_version(if_match),
            limits=tenant.limits,
        )
    )
    return _session(edge, tenant, view, response)


# -- turns


@router.post("/{session_id}/turns", response_model=None, responses=REFUSALS | STREAMED)
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
    start = _start(tenant, session_id, "turn", body, if_match)
    return await _run(edge, tenant, request, start, body, idempotency_key)


@router.post("/{session_id}/regenerate", response_model=None, responses=REFUSALS | STREAMED)
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
    start = _start(tenant, session_id, "regenerate", body, if_match)
    return await _run(edge, tenant, request, start, body, idempotency_key)


@router.post("/{session_id}/append", responses=REFUSALS)
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
    start = StartTurn(
        kind="append",
        tenant=tenant.name,
        session=session_id,
        input=_input(body.input),
        params=turn_params(options_of(body)),
        version=_version(if_match),
        limits=tenant.limits,
    )
    running = await _begin(edge, tenant, request, start, idempotency_key, queue=body.if_busy == "queue")
    return await _whole(edge, request, running)


@router.put("/{session_id}/draft", responses=REFUSALS)
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
        input=_input(body.input),
        version=_version(if_match),
        limits=tenant.limits,
        name=f"draft-{secrets.token_hex(12)}",
    )
    try:
        view = await while_connected(request, edge.link.call(draft))
    except ClientDisconnect:
        edge.spawn(edge.desk.withdraw(draft.name))
        raise
    return _session(edge, tenant, view, response)


@router.post("/{session_id}/abort", responses=REFUSALS)
async def abort(edge: EdgeOf, tenant: Caller, session_id: SessionId, body: Abort) -> Turn | None:
    """End the open turn. Its session is as before, or, with `keep`, has what was said so far. `null`: it was a
    draft."""
    keep = check_keep(None if body.keep == "none" else body.keep)
    if body.turn_id is not None:
        turn = edge.desk.find(tenant.name, session_id, body.turn_id)
        if turn.ended:
            raise IllegalTransition(f"turn {turn.id} has ended: it is {turn.state}")
    else:
        found = edge.desk.open_turn((tenant.name, session_id))
        if found is None:
            await edge.link.call(AbortTurn(tenant=tenant.name, session=session_id))
            return None
        turn = found
    await edge.desk.abort(turn, keep)
    return turn_body(turn)


@router.get("/{session_id}/turns/{turn_id}", responses=REFUSALS)
async def get_turn(edge: EdgeOf, tenant: Caller, session_id: SessionId, turn_id: TurnId) -> Turn:
    """A turn that is open or ended not long ago."""
    return turn_body(edge.desk.find(tenant.name, session_id, turn_id))


@router.get("/{session_id}/turns/{turn_id}/events", response_class=Response, responses=REFUSALS | STREAMED)
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
    turn = edge.desk.find(tenant.name, session_id, turn_id)
    position = last_event_id or 0
    if position > len(turn.updates):
        raise InvalidRequest(f"last-event-id is {position}; allowed: at most {len(turn.updates)}, the last there is")
    await while_connected(request, turn.answered.wait())
    return _stream(edge, turn, position)


# -- from requests to turns, and from turns to answers


def _start(tenant: Tenant, session_id: str, kind: TurnKind, body: NewTurn, if_match: str | None) -> StartTurn:
    options = options_of(body)
    if options.get("temperature"):
        options.setdefault("seed", random_seed())
    return StartTurn(
        kind=kind,
        tenant=tenant.name,
        session=session_id,
        input=_input(body.input),
        params=turn_params(options),
        version=_version(if_match),
        limits=tenant.limits,
    )


async def _run(
    edge: Edge, tenant: Tenant, request: Request, start: StartTurn, body: NewTurn, key: str | None
) -> Response:
    turn = await _begin(
        edge, tenant, request, start, key, queue=body.if_busy == "queue", continues=body.on_disconnect == "continue"
    )
    if body.stream:
        return _stream(edge, turn, 0)
    whole = await _whole(edge, request, turn)
    return JSONResponse(whole.model_dump(), headers={"etag": _etag(whole.version)} if whole.version else None)


async def _begin(
    edge: Edge,
    tenant: Tenant,
    request: Request,
    start: StartTurn,
    key: str | None,
    *,
    queue: bool,
    continues: bool = False,
) -> LiveTurn:
    body = await digest_of(request) if key is not None else b""
    starting = edge.start(tenant, start, queue=queue, continues=continues, key=key, body=body)
    return await while_connected(request, starting)


async def _whole(edge: Edge, request: Request, turn: LiveTurn) -> Turn:
    """The turn when it has ended."""
    try:
        await while_connected(request, turn.finished())
    finally:
        edge.desk.abandon(turn)
    return turn_body(turn)


def _stream(edge: Edge, turn: LiveTurn, position: int) -> Response:
    return EventStream(_events(turn, position), lambda: edge.desk.abandon(turn), {"x-turn-id": turn.id})


async def _events(turn: LiveTurn, position: int) -> AsyncIterator[bytes]:
    ticket = turn.ticket
    assert ticket is not None
    if position == 0:
        yield event(
            "started",
            {
                "turn_id": turn.id,
                "session_id": ticket.session,
                "prompt_tokens": ticket.prompt_tokens,
                "max_new_tokens": ticket.max_new_tokens,
                "version": ticket.version,
            },
        )
    try:
        async with aclosing(turn.follow(position)) as news:
            async for reached, updates in news:
                for number, update in enumerate(updates, reached - len(updates) + 1):
                    if update.tokens or update.text:
                        delta: dict[str, Any] = {
                            "text": update.text,
                            "tokens": update.tokens,
                            "delivered": update.delivered,
                        }
                        if update.logprobs:
                            delta["logprobs"] = [logprob_body(entry) for entry in update.logprobs]
                        yield event("delta", delta, number)
                    if update.result is not None:
                        whole = turn_body(turn).model_dump(exclude={"text", "tokens", "logprobs"}, exclude_none=True)
                        yield event("committed" if update.result.committed else "aborted", whole, number)
    except TenutoError as error:
        yield event("error", Failure.of(error).body)


def turn_body(turn: LiveTurn) -> Turn:
    """A turn as it is now."""
    reply, result, request = turn.reply(), turn.result, turn.request
    body = Turn(
        id=turn.id,
        session_id=request.session or "",
        state=turn.state,
        text=reply.text,
        tokens=list(reply.tokens),
        logprobs=[logprob_body(entry) for entry in reply.logprobs] or None,
        input_logprobs=[logprob_body(entry) if entry is not None else None for entry in reply.input_logprobs] or None,
    )
    if turn.ticket is not None:
        body.max_new_tokens = turn.ticket.max_new_tokens
    if result is not None:
        body.reason, body.committed = result.reason.value, result.committed
        body.kept, body.stop = result.kept, result.stop
        body.version, body.context_left = result.version, result.context_left
        body.usage = Usage(
            prompt_tokens=result.usage.prompt,
            cached_tokens=result.usage.cached,
            completion_tokens=result.usage.generated,
            computed_tokens=result.usage.computed,
        )
    return body


def _session(edge: Edge, tenant: Tenant, view: SessionInfo, response: Response | None = None) -> Session:
    if response is not None:
        response.headers["etag"] = _etag(view.version)
    turn = edge.desk.open_turn((tenant.name, view.session_id))
    return Session(
        id=view.session_id,
        state=view.state,
        turn=view.turn,
        turn_id=turn.id if turn is not None else None,
        version=view.version,
        turns=view.turns,
        tokens=view.tokens,
        computed=view.computed,
        context_left=view.context_left,
        max_tokens=view.limit,
        priority=view.priority,
        ttl=view.ttl,
        idle_seconds=round(view.idle_seconds, 3),
        memory=dict(view.memory),
        metadata=dict(view.metadata),
    )


def _etag(version: int | None) -> str:
    return f'"{version}"'


def _version(if_match: str | None) -> int | None:
    """The version that an `If-Match` header names; any for `*`."""
    if if_match is None or if_match.strip() == "*":
        return None
    bare = if_match.strip().strip('"')
    if not (bare.isascii() and bare.isdigit() and len(bare) < 16):
        raise InvalidRequest(f"if-match is {if_match[:40]!r}; allowed: a version, as in the session's ETag")
    return int(bare)


def _input(given: str | list[int] | list[native_schemas.Message]) -> TurnInput:
    if isinstance(given, str):
        return given
    return [Message(part.role, part.content) if isinstance(part, native_schemas.Message) else part for part in given]
