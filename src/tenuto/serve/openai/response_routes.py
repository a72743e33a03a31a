"""OpenAI's Responses. A stored response is a session of the same name, in the state after the response. A request that
continues it forks that session."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request, Response

from tenuto.base.errors import NotFound, SessionBusy, TenutoError
from tenuto.base.options import Policy
from tenuto.base.views import SessionInfo
from tenuto.base.wire.messages import CloseSession, Fork, GetSession, OpenSession, StartTurn
from tenuto.serve.openai.conversation_routes import ConversationsOf
from tenuto.serve.openai.kept_responses import KeptResponses
from tenuto.serve.openai.response_answers import ResponseAnswer
from tenuto.serve.openai.response_schemas import Item, ResponseBody
from tenuto.serve.openai.tools import customs_of
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf, of_tenant
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.respond import respond, streamed
from tenuto.serve.shared.schemas import ID_LENGTH, ID_PATTERN, REFUSALS
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import while_connected

router = APIRouter(route_class=JsonRoute, prefix="/v1/responses", tags=["openai"])

INSTRUCTIONS = "instructions"
"""Key in the metadata of a response's session: a digest of its instructions."""
READ: dict[int | str, dict[str, Any]] = {
    200: {"description": "The response", "content": {"application/json": {"schema": {"type": "object"}}}}
}
ResponseId = Annotated[str, Path(pattern=ID_PATTERN, max_length=ID_LENGTH, description="The response's id.")]


Kept = Annotated[KeptResponses, of_tenant(KeptResponses)]


@router.post("", response_model=None, responses=REFUSALS | streamed("The response, or its events"))
async def create(
    edge: EdgeOf, tenant: Caller, body: ResponseBody, request: Request, kept: Kept, conversations: ConversationsOf
) -> Response:
    """Answers input. With `previous_response_id`, send only the new items: the turn runs on a fork of that response's
    session. With `conversation`, the answer follows the conversation's items and is added to them."""
    edge.check_model(body.model)
    name, usual = f"resp_{secrets.token_hex(16)}", edge.model.habits
    habits = usual.told(body.chat_template_kwargs or {}).after("tool" if body.answers_call else "")
    with body.naming(edge.model.context_length):
        going_on = conversations.go_on(body.conversation_id, body.items)
        try:
            start = body.start(tenant, (), habits, variables=body.variables())
            reading = body.tool_use.reading(habits, start.params.grammar)
            turn = await while_connected(request, _start(edge, tenant, body, start, name, going_on.earlier))
        except BaseException:
            going_on.end()
            raise

    def keep(response: dict[str, Any]) -> None:
        if body.store is not False:
            kept.keep(name, msgspec.json.encode(response))
        going_on.add(response["output"])

    def end() -> None:
        going_on.end()
        if turn.request.session is not None and (body.store is False or not turn.committed):
            edge.spawn(_close(edge, tenant, name))  # also aborts its turn

    answer = ResponseAnswer(
        edge,
        turn,
        reading.reader(turn.id),
        name,
        customs_of(body.tools),
        start.params.logprobs is not None,
        body.echoed(),
        keep,
        end,
    )
    return await respond(request, answer, stream=body.stream)


async def _start(
    edge: Edge, tenant: Tenant, body: ResponseBody, start: StartTurn, name: str, earlier: Sequence[Item]
) -> LiveTurn:
    """Starts the turn and returns it once the engine has accepted it. It runs in the session `name`, or in an ephemeral
    one if no state has to be kept. `start`: its options."""
    previous, stores = body.previous_response_id, body.store is not False
    state = await _state(edge, tenant, previous) if previous is not None else None
    given = body.rendered(edge.model.habits, earlier, instructed=state is not None and _instructed(body, state))
    start = msgspec.structs.replace(start, session=name if stores or previous is not None else None, input=given)
    if start.session is None:
        return await edge.start(tenant, start)
    told = ((INSTRUCTIONS, _digest(body.instructions)),) if body.instructions else ()
    if state is not None:
        others = tuple((key, value) for key, value in state.metadata.items() if key != INSTRUCTIONS)
        fork = Fork(
            tenant=tenant.name, session=state.session_id, child=name, metadata=others + told, limits=tenant.limits
        )
        await edge.link.call(fork)
    else:
        policy = Policy(ttl=edge.settings.ttl(None, named=True), tenant=tenant.name, metadata=told)
        await edge.link.call(OpenSession(session=name, policy=policy, limits=tenant.limits))
    try:
        return await edge.start(tenant, start)
    except BaseException:
        edge.spawn(_close(edge, tenant, name))
        raise


async def _state(edge: Edge, tenant: Tenant, previous: str) -> SessionInfo:
    """Returns the session of the previous response. Raises `NotFound`, or `SessionBusy` while that response is being
    written."""
    try:
        state = await edge.link.call(GetSession(tenant=tenant.name, session=previous))
    except NotFound:
        raise NotFound(
            f"there is no response {previous!r}; it was not stored, or is too old", param="previous_response_id"
        ) from None
    if state.turn is not None:
        raise SessionBusy(f"response {previous} is not complete yet", param="previous_response_id")
    return state


def _instructed(body: ResponseBody, state: SessionInfo) -> bool:
    """Whether the previous response had the same instructions, so that its session contains them already."""
    return body.instructions is not None and state.metadata.get(INSTRUCTIONS) == _digest(body.instructions)


def _digest(instructions: str) -> str:
    return sha256(instructions.encode(errors="surrogatepass")).hexdigest()[:32]


async def _close(edge: Edge, tenant: Tenant, name: str) -> None:
    try:
        await edge.turns.close_session((tenant.name, name))
    except TenutoError:
        return  # closed already, or never opened


@router.get("/{response_id}", response_model=None, responses=REFUSALS | READ)
async def read(kept: Kept, response_id: ResponseId) -> Response:
    """Returns a stored response, if it is one of the latest thousand."""
    response = kept.find(response_id)
    if response is None:
        raise NotFound(f"there is no response {response_id!r}; it was not stored, is too old, or is too large")
    return Response(response, media_type="application/json")


@router.delete("/{response_id}", responses=REFUSALS)
async def delete(edge: EdgeOf, tenant: Caller, kept: Kept, response_id: ResponseId) -> dict[str, Any]:
    """Deletes a response and closes its session. Responses that continue it have their own sessions."""
    await edge.link.call(CloseSession(tenant=tenant.name, session=response_id))
    kept.forget(response_id)
    return {"id": response_id, "object": "response", "deleted": True}
