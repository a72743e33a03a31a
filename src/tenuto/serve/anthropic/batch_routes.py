"""Routes of batches of messages."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError

from tenuto.base.errors import (
    Draining,
    EngineStopped,
    InvalidRequest,
    LimitReached,
    Misdirected,
    NotAcknowledged,
    Overloaded,
    TenutoError,
)
from tenuto.base.options import MAX_PRIORITY
from tenuto.serve.anthropic import threads
from tenuto.serve.anthropic.batch import Batch, BatchBody
from tenuto.serve.anthropic.batches import AT_ONCE, Batches, Result, Work, new_name
from tenuto.serve.anthropic.errors import FORM
from tenuto.serve.anthropic.routes import begin
from tenuto.serve.anthropic.schemas import MessagesBody
from tenuto.serve.anthropic.threads import KeptTools, ThreadTools, kept_tools
from tenuto.serve.shared.bodies import JsonRoute, in_parser, parsed
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.errors import BROKEN, Failure
from tenuto.serve.shared.invalid import refusal_of
from tenuto.serve.shared.pages import Cursor, Limit, page
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.settings import Tenant

log = structlog.get_logger("tenuto.batches")

router = APIRouter(route_class=JsonRoute, prefix="/v1/messages/batches", tags=["anthropic"], responses=REFUSALS)

RETRY_SECONDS = 0.25
"""Time between attempts to start a turn for which there is no place."""
LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "One result per line", "content": {"application/x-jsonl": {"schema": {"type": "string"}}}}
}


def _batches_of(edge: Edge, tenant: Tenant) -> Batches:
    return edge.part(Batches, edge.objects(tenant, Batches.KIND), tenant=tenant.name)


async def _batches(edge: EdgeOf, tenant: Caller) -> Batches:
    return _batches_of(edge, tenant)


BatchesOf = Annotated[Batches, Depends(_batches)]


@router.post("")
async def create(
    edge: EdgeOf, tenant: Caller, body: BatchBody, request: Request, batches: BatchesOf, kept: ThreadTools
) -> dict[str, Any]:
    """Answers many requests in the background, at the lowest priority. A batch ends with the server; in a fleet,
    another replica goes on with it."""
    edge.require_engine()
    name = new_name()
    running = partial(_work, edge, tenant, kept, batches.run, name)
    try:
        batch = await batches.open(name, await in_parser(body.encoded))
    except NotAcknowledged:  # it may be open
        edge.spawn(running())
        raise
    edge.spawn(running())
    return _view(batch, request)


async def resume(edge: Edge, tenant: str, name: str) -> None:
    """Goes on with a batch of a fleet whose worker is gone, unless another replica does."""
    owner = edge.settings.tenants.named(tenant)
    if owner is not None and edge.healthy:
        edge.spawn(_work(edge, owner, kept_tools(edge, owner), _batches_of(edge, owner).resume, name))


async def _work(edge: Edge, tenant: Tenant, kept: KeptTools, work: Work, name: str) -> None:
    """Works on a batch."""
    most = AT_ONCE if tenant.limits.turns is None else max(1, tenant.limits.turns // 2)
    try:
        await work(name, partial(_answer_to, edge, tenant, kept, name), most)
    except EngineStopped:
        pass  # in a fleet, another replica goes on
    except TenutoError as error:
        log.warning("cannot be worked on", batch=name, reason=str(error))


@router.get("")
async def list_batches(
    batches: BatchesOf, request: Request, after_id: Cursor = None, before_id: Cursor = None, limit: Limit = 20
) -> dict[str, Any]:
    """Lists batches, the newest first."""
    return page([_view(batch, request) for batch in await batches.newest()], after_id, before_id, limit)


@router.get("/{batch_id}")
async def read(batches: BatchesOf, request: Request, batch_id: str) -> dict[str, Any]:
    """Returns a batch without its results."""
    return _view(await batches.find(batch_id), request)


@router.post("/{batch_id}/cancel")
async def cancel(batches: BatchesOf, request: Request, batch_id: str) -> dict[str, Any]:
    """Cancels the requests of a batch that are not done."""
    return _view(await batches.cancel(batch_id), request)


@router.delete("/{batch_id}")
async def delete(batches: BatchesOf, batch_id: str) -> dict[str, Any]:
    """Deletes a batch that has ended, with its results."""
    await batches.delete(batch_id)
    return {"id": batch_id, "type": "message_batch_deleted"}


@router.get("/{batch_id}/results", response_model=None, responses=LINES)
async def results(batches: BatchesOf, batch_id: str) -> Response:
    """Returns the results of a batch that has ended, in the order in which they were ready."""
    return Response(await batches.results(batch_id), media_type="application/x-jsonl")


def _view(batch: Batch, request: Request) -> dict[str, Any]:
    return batch.view(f"{str(request.base_url).rstrip('/')}{router.prefix}")


async def _answer_to(edge: Edge, tenant: Tenant, kept: KeptTools, batch_id: str, params: bytes) -> Result | None:
    """Returns the result of one request. Its errors are results, too, except those of a replica that ends."""
    if not edge.healthy:
        return None
    try:
        return {"type": "succeeded", "message": await _message(edge, tenant, kept, batch_id, params)}
    except TenutoError as error:
        if edge.in_fleet and isinstance(error, Draining | EngineStopped | NotAcknowledged | Misdirected):
            return None
        failure = Failure.of(error)
    except Exception:
        log.exception("failed", batch=batch_id)
        failure = Failure(500, "internal_error", BROKEN)
    return {"type": "errored", "error": FORM.body(failure, batch_id)}


async def _message(edge: Edge, tenant: Tenant, kept: KeptTools, batch_id: str, params: bytes) -> Any:
    """Returns the answer to one request. Waits while there is no place for its turn."""
    given = parsed(params)
    try:
        body = MessagesBody.model_validate(given)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise refusal_of(found, given, "application/json") from None
    if body.stream:
        raise InvalidRequest("stream is true; allowed in a batch: false", param="stream")
    if body.thread is not None and (session := threads.session_of(body.thread.previous_message_id)) is not None:
        await edge.bring((tenant.name, session))
    while True:
        try:
            answer = await begin(edge, tenant, body.model_copy(), kept, batch_id, -MAX_PRIORITY)  # which it changes
            break
        except (LimitReached, Overloaded):
            await asyncio.sleep(RETRY_SECONDS)
    try:
        return await answer.whole()
    finally:
        answer.leave()
