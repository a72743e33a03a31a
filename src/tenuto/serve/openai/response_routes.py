"""OpenAI's Responses. A stored response is a session of the same name, in the state after the response. A request that
continues it forks that session."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from tenuto.base.errors import InvalidRequest, NotFound
from tenuto.base.wire.messages import CloseSession
from tenuto.serve.openai.conversation_routes import After, ConversationsOf, Limit, Order
from tenuto.serve.openai.conversations import entry_of, page_of
from tenuto.serve.openai.found_responses import About, found, with_about, write
from tenuto.serve.openai.kept_responses import KeptOf, KeptResponses, Origin
from tenuto.serve.openai.response_answers import Form, ResponseAnswer, head_of
from tenuto.serve.openai.response_compactions import Compaction, compacted
from tenuto.serve.openai.response_schemas import Item, ResponseBody
from tenuto.serve.openai.response_sessions import start_response
from tenuto.serve.openai.tools import customs_of
from tenuto.serve.shared.bodies import JsonRoute, of_many
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.runs import run_names
from tenuto.serve.shared.schemas import ID_LENGTH, ID_PATTERN, REFUSALS
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import EventStream, respond, streamed, while_connected
from tenuto.serve.shared.undone import leave_undone

router = APIRouter(route_class=JsonRoute, prefix="/v1/responses", tags=["openai"], responses=REFUSALS)

READ: dict[int | str, dict[str, Any]] = {
    200: {"description": "The response", "content": {"application/json": {"schema": {"type": "object"}}}}
}
ResponseId = Annotated[str, Path(pattern=ID_PATTERN, max_length=ID_LENGTH, description="The response's id.")]

KEEPS = "keeps_responses"
"""In the state of a request: its response can be continued although the body says `store: false`. Its maker closes the
response's session."""


STREAMED = streamed("The response, or its events")


@router.post("", response_model=None, responses=STREAMED)
async def create(
    edge: EdgeOf, tenant: Caller, body: ResponseBody, request: Request, kept: KeptOf, conversations: ConversationsOf
) -> Response:
    """Answers input. With `previous_response_id`, send only the new items: the turn runs on a fork of that response's
    session. With `conversation`, the answer follows the conversation's items and is added to them."""
    adapter = edge.adapter(body.model)
    body.check()
    name, usual = f"resp_{secrets.token_hex(16)}", edge.model.habits
    habits = usual.with_variables(body.chat_template_kwargs or {}).after("tool" if body.answers_call else "")
    stores = body.store is not False or request.scope["state"].get(KEEPS, False)
    items = await _listed(body) if stores else b""
    with body.naming(edge.model.context_length):
        going_on = await conversations.go_on(body.conversation_id, body.items, name)
        try:
            head = head_of(edge.name_of(adapter), name, body.echoed())
            start = body.start(tenant, (), habits, adapter=adapter, variables=body.variables())
            reading = body.tool_use.reading(habits, start.params.grammar)
            run, earlier = run_names(request.headers, body.run_name()), going_on.earlier
            compaction = await while_connected(request, _compacted(edge, tenant, kept, body, earlier, adapter))
            first = (compaction.item,) if compaction is not None else ()
            form = Form(reading, customs_of(body.tools), start.params.scores_output, first)
            about = About(head, form, items, background=bool(body.background))
            start = with_about(edge, start, name, about if stores else None)
            starting = start_response(
                edge,
                tenant,
                compaction.body if compaction is not None else body,
                start,
                name,
                earlier if compaction is None else (),
                run,
                reading,
                stores=stores,
                whole=partial(kept.before, body),
            )
            turn = await while_connected(request, starting)
        except BaseException:
            await going_on.end()
            raise
    origin = Origin(turn.id, form, asyncio.Event() if body.background else None)

    def store(response: dict[str, Any]) -> None:
        if body.background:
            kept.end(name, msgspec.json.encode(response))
        elif stores:
            kept.begin(name, msgspec.json.encode(response), origin, items)

    async def keep(response: dict[str, Any]) -> None:
        await going_on.add(response["output"])
        store(response)

    def end() -> None:
        edge.spawn(going_on.leave() if edge.may_go_on_elsewhere(turn) else going_on.end())
        if turn.request.session == name and (not stores or not turn.committed):
            edge.spawn(edge.turns.close_if_open((tenant.name, name)))  # also aborts its turn

    answer = ResponseAnswer(edge, turn, head, form, keep, end)
    if origin.ended is None:
        return await respond(request, answer, stream=body.stream)
    kept.begin(name, msgspec.json.encode(answer.view("in_progress")), origin, items)
    edge.spawn(write(kept, name, turn, answer, origin))
    if body.stream:
        return EventStream(ResponseAnswer(edge, turn, head, form, partial(_once_ended, origin)))
    return Response(msgspec.json.encode(answer.view("queued")), media_type="application/json")


async def _once_ended(origin: Origin, _: dict[str, Any]) -> None:
    """Waits until a response in the background has ended, so that its conversation has it and is free."""
    assert origin.ended is not None
    await origin.ended.wait()


async def _compacted(
    edge: Edge, tenant: Tenant, kept: KeptResponses, body: ResponseBody, earlier: Sequence[Item], adapter: str | None
) -> Compaction | None:
    """Compacts the conversation if the request asks for that and it is long. A conversation whose responses are not all
    kept stays as it is."""
    if body.compact_threshold is None:
        return None
    before = kept.before(body) if body.previous_response_id is not None else earlier
    if before is None:
        leave_undone("context_management")
        return None
    return await compacted(edge, tenant, body, before, adapter)


async def _listed(body: ResponseBody) -> bytes:
    """Returns the input items as JSON, in the form of a list's entries."""
    items = body.items
    return await of_many(len(items), lambda: msgspec.json.encode([entry_of(item) for item in items]))


@router.get("/{response_id}", response_model=None, responses=READ)
async def read(
    edge: EdgeOf,
    tenant: Caller,
    kept: KeptOf,
    response_id: ResponseId,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, description="With `stream`, the events after this one.")] = None,
) -> Response:
    """Returns a stored response, if it is one of the latest thousand, or streams its events."""
    response, origin = await found(edge, tenant, kept, response_id)
    if not stream:
        if starting_after is not None:
            raise InvalidRequest("starting_after without stream; allowed: with stream=true", param="starting_after")
        return Response(response, media_type="application/json")
    turn = await _turn(edge, tenant, response_id, origin)
    begun = {"status": None, "output": None, "usage": None, "error": None, "incomplete_details": None}
    head = {**msgspec.json.decode(response), **begun}
    after = -1 if starting_after is None else starting_after
    return EventStream(ResponseAnswer(edge, turn, head, origin.form, after=after))


async def _turn(edge: Edge, tenant: Tenant, name: str, origin: Origin) -> LiveTurn:
    """Returns the turn of a stored response. Raises `NotFound`."""
    try:
        return await edge.turns.recall(tenant.name, name, origin.turn)
    except NotFound:
        raise NotFound(f"the events of response {name!r} are too old; allowed: to read it without stream") from None


@router.post("/{response_id}/cancel", response_model=None, responses=READ)
async def cancel(edge: EdgeOf, tenant: Caller, kept: KeptOf, response_id: ResponseId) -> Response:
    """Ends a response in the background and returns it. One that has ended stays as it is."""
    response, origin = await found(edge, tenant, kept, response_id)
    if origin.ended is None:
        raise InvalidRequest("Cannot cancel a synchronous response. Allowed: those created with background")
    if not origin.ended.is_set():
        await edge.turns.abort(await _turn(edge, tenant, response_id, origin))
        await origin.ended.wait()
    return Response(kept.find(response_id) or response, media_type="application/json")


@router.get("/{response_id}/input_items")
async def input_items(
    edge: EdgeOf,
    tenant: Caller,
    kept: KeptOf,
    response_id: ResponseId,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> dict[str, Any]:
    """Returns a page of the items that a stored response's request had as input."""
    await found(edge, tenant, kept, response_id)
    items = kept.items.find(response_id)
    if items is None:
        raise NotFound(f"the input items of response {response_id!r} are too old, or too large")
    return page_of(msgspec.json.decode(items), after, limit, newest_first=order == "desc")


@router.delete("/{response_id}")
async def delete(edge: EdgeOf, tenant: Caller, kept: KeptOf, response_id: ResponseId) -> dict[str, Any]:
    """Deletes a response and closes its session. Responses that continue it have their own sessions."""
    await edge.link.call(CloseSession(tenant=tenant.name, session=response_id))
    kept.forget(response_id)
    return {"id": response_id, "object": "response", "deleted": True}
