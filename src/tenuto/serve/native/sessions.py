"""Routes of sessions: open, list, fork, rewind, close."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response
from fastapi import Request as HttpRequest

from tenuto.base.compaction import Span
from tenuto.base.errors import InvalidRequest
from tenuto.base.views import StateFilter
from tenuto.base.wire.bodies import body_of
from tenuto.base.wire.document import SessionDocument
from tenuto.base.wire.messages import (
    Expect,
    ExportSession,
    Fork,
    GetSession,
    ImportSession,
    ListSessions,
    ListTurns,
    Rewind,
    Trim,
)
from tenuto.serve.native.answer_schemas import Compaction, ErasedSession, RecordList, Session, SessionList, etag
from tenuto.serve.native.answers import listed_body, session_body, shown
from tenuto.serve.native.schemas import (
    Expectation,
    IfMatch,
    NewCompaction,
    NewFork,
    NewSession,
    NewTrim,
    Position,
    SessionFile,
    SessionId,
    version_of,
)
from tenuto.serve.native.state_files import STATE_ANSWER, STATE_BODY, document_of, spool, spooled, streamed
from tenuto.serve.shared.bodies import JsonRoute, in_parser
from tenuto.serve.shared.compaction import compact as compacted
from tenuto.serve.shared.edge import Caller, EdgeOf, open_message
from tenuto.serve.shared.listing import merged
from tenuto.serve.shared.schemas import REFUSALS, Id
from tenuto.serve.shared.settings import new_session_id
from tenuto.serve.shared.sse import while_connected

router = APIRouter(route_class=JsonRoute, prefix="/v1/sessions", tags=["sessions"], responses=REFUSALS)
IMPORT_STATE = "/v1/sessions/import/state"


@router.post("", status_code=201)
async def open_session(edge: EdgeOf, tenant: Caller, body: NewSession, response: Response) -> Session:
    """Opens a session."""
    request = open_message(
        tenant,
        body.id or new_session_id(),
        ttl=edge.settings.ttl(body.ttl, named=body.id is not None),
        adapter=body.adapter,
        system=body.system,
        priority=body.priority,
        max_tokens=body.max_tokens,
        metadata=tuple(body.metadata.items()),
        pinned=body.pinned,
    )
    response.headers["location"] = f"/v1/sessions/{request.session}"
    return await shown(edge, tenant, request, response)


@router.get("")
async def list_sessions(
    edge: EdgeOf,
    tenant: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(pattern=r"^[A-Za-z0-9._:-]{0,64}$", description="List sessions after this id.")] = "",
    state: Annotated[
        StateFilter | None,
        Query(description="The state of the session, or of its open turn."),
    ] = None,
) -> SessionList:
    """Lists the caller's sessions by id. In a fleet, those of all replicas; one that moves from one to another
    meanwhile may be missing."""
    asked = ListSessions(tenant=tenant.name, after=after, limit=limit, state=state)
    found = merged([await edge.listed(asked), *await edge.listed_elsewhere(asked)], limit)
    next_id = found.sessions[-1].session_id if found.more else None
    return SessionList(data=[listed_body(info, found.turns) for info in found.sessions], next=next_id)


@router.post("/import", status_code=201)
async def import_session(
    edge: EdgeOf,
    tenant: Caller,
    body: SessionFile,
    response: Response,
    new_id: Annotated[Id | None, Query(alias="id", description="Replaces the id in the file.")] = None,
) -> Session:
    """Opens a session from a file that this server, or another with the same model, exported. Files of other models or
    formats, and altered files, are refused. A file without a TTL gets the server's."""
    without = {"adapter"} - body.model_fields_set
    document = msgspec.convert(body.model_dump(exclude=without), SessionDocument)
    policy = replace(document.policy(tenant.name), ttl=edge.settings.ttl(document.ttl, named=True))
    request = ImportSession(session=new_id or document.id, policy=policy, document=document, limits=tenant.limits)
    response.headers["location"] = f"/v1/sessions/{request.session}"
    return await shown(edge, tenant, request, response)


@router.post(IMPORT_STATE.removeprefix(router.prefix), status_code=201, openapi_extra=STATE_BODY)
async def import_state(
    edge: EdgeOf,
    tenant: Caller,
    request: HttpRequest,
    response: Response,
    new_id: Annotated[Id | None, Query(alias="id", description="Replaces the id in the file.")] = None,
) -> Session:
    """Opens a session from a file with its state, so that its next turn recomputes nothing. Files of other models,
    weights or formats, and altered files, are refused."""
    async with spooled(request) as path:
        document = await in_parser(partial(document_of, path, edge.model.context_length))
        policy = replace(document.policy(tenant.name), ttl=edge.settings.ttl(document.ttl, named=True))
        opening = ImportSession(
            session=new_id or document.id, policy=policy, document=document, limits=tenant.limits, state=str(path)
        )
        response.headers["location"] = f"/v1/sessions/{opening.session}"
        return await shown(edge, tenant, opening, response)


@router.get("/{session_id}/export/state", response_class=Response, responses=STATE_ANSWER)
async def export_state(edge: EdgeOf, tenant: Caller, session_id: SessionId) -> Response:
    """Returns the session as a safetensors file, with the part of its state that is in memory or a tier. Refused while
    a turn is open."""
    with spool() as path:
        await edge.link.call(ExportSession(tenant=tenant.name, session=session_id, state=str(path)))
        return streamed(path)


@router.get("/{session_id}/export", response_model=SessionFile)
async def export_session(edge: EdgeOf, tenant: Caller, session_id: SessionId) -> Response:
    """Returns the session at its last commit as a file: the tokens of its turns, its system message and its policy."""
    document = await edge.link.call(ExportSession(tenant=tenant.name, session=session_id))
    return Response(msgspec.json.encode(document), media_type="application/json")


@router.get("/{session_id}")
async def get_session(edge: EdgeOf, tenant: Caller, session_id: SessionId, response: Response) -> Session:
    """Returns the current state of a session."""
    return await shown(edge, tenant, GetSession(tenant=tenant.name, session=session_id), response)


@router.delete("/{session_id}", status_code=204, responses={200: {"model": ErasedSession}})
async def close_session(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    finish: Annotated[bool, Query(description="Let the open turn end first instead of aborting it.")] = False,
    erase: Annotated[
        bool, Query(description="Overwrite all that is left of the session, and return a receipt.")
    ] = False,
    if_match: IfMatch = None,
) -> Response:
    """Closes a session. With `erase`, nothing of it is left in memory, tiers or the journal, and the answer is a
    receipt."""
    if erase and finish:
        raise InvalidRequest("erase and finish are both true; allowed: one of them", param="finish")
    if erase:
        key = tenant.name, session_id
        receipt = await edge.turns.erase_session(key, version=version_of(if_match))
        failed = [*receipt.failed, *await edge.erase_elsewhere(key)]
        receipt = msgspec.structs.replace(receipt, failed=failed)
        return Response(msgspec.json.encode(receipt), media_type="application/json")
    await edge.turns.close_session((tenant.name, session_id), finish=finish, version=version_of(if_match))
    return Response(status_code=204)


@router.get("/{session_id}/turns")
async def list_turns(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    first: Annotated[int, Query(ge=1, description="Number of the first turn to list; 1 is the oldest.")] = 1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> RecordList:
    """Lists the session's committed turns, with their tokens and texts."""
    page = await edge.link.call(ListTurns(tenant=tenant.name, session=session_id, first=first, limit=limit))
    return RecordList(data=page.records, next=first + len(page.records) if page.more else None)


@router.post("/{session_id}/fork", status_code=201)
async def fork(
    edge: EdgeOf, tenant: Caller, session_id: SessionId, body: NewFork, response: Response, if_match: IfMatch = None
) -> Session:
    """Opens a new session with the same beginning, sharing memory. It does not include an open turn."""
    request = Fork(
        tenant=tenant.name,
        session=session_id,
        child=body.id or new_session_id(),
        turn=body.turn,
        position=body.position,
        version=version_of(if_match),
        limits=tenant.limits,
    )
    return await shown(edge, tenant, request, response)


@router.post("/{session_id}/rewind")
async def rewind(
    edge: EdgeOf, tenant: Caller, session_id: SessionId, body: Position, response: Response, if_match: IfMatch = None
) -> Session:
    """Cuts the history back. Refused while a turn is open."""
    request = Rewind(
        tenant=tenant.name, session=session_id, turn=body.turn, position=body.position, version=version_of(if_match)
    )
    return await shown(edge, tenant, request, response)


@router.post("/{session_id}/expect")
async def expect(
    edge: EdgeOf, tenant: Caller, session_id: SessionId, body: Expectation, response: Response, if_match: IfMatch = None
) -> Session:
    """Says when the next turn is expected, such as when a tool will have ended. The session's state stays in memory, or
    comes back in time. Refused while a turn is open."""
    request = Expect(tenant=tenant.name, session=session_id, within=body.within, version=version_of(if_match))
    return await shown(edge, tenant, request, response)


@router.post("/{session_id}/trim", status_code=201)
async def trim(
    edge: EdgeOf, tenant: Caller, session_id: SessionId, body: NewTrim, response: Response, if_match: IfMatch = None
) -> Session:
    """Opens a new session with some turns of this one. Leading turns share memory; the others are computed when
    needed."""
    request = Trim(
        tenant=tenant.name,
        session=session_id,
        child=body.id or new_session_id(),
        turns=body.turns,
        version=version_of(if_match),
        limits=tenant.limits,
    )
    return await shown(edge, tenant, request, response)


@router.post("/{session_id}/compact")
async def compact(
    edge: EdgeOf,
    tenant: Caller,
    session_id: SessionId,
    body: NewCompaction,
    request: HttpRequest,
    response: Response,
    if_match: IfMatch = None,
) -> Compaction:
    """Replaces turns by one with a summary of them. The tokens behind the cut are computed before the session changes,
    with lower priority. Turns may run meanwhile, and follow the summary then."""
    habits, given = edge.model.habits.after("user"), body.turn()
    span = Span(body.first, body.last, version_of(if_match))
    with body.naming(edge.model.context_length):
        asking = body.start(tenant, [body.asked], habits)
        reading = body.tool_use.reading(habits, asking.params.grammar)
        work = compacted(edge, tenant, session_id, span, given, asking, reading)
        done = await while_connected(request, work)
    response.headers["etag"] = etag(done.info.version)
    view = session_body(edge, tenant, done.info)
    return Compaction.model_validate({**body_of(done), **view.model_dump()})
