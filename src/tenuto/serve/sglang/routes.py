"""SGLang-compatible routes of sessions and requests."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from tenuto.base.errors import InvalidRequest
from tenuto.serve.sglang.answers import Answers
from tenuto.serve.sglang.requests import RequestsOf
from tenuto.serve.sglang.schemas import AbortRequest, CloseSessionRequest, GenerateRequest, OpenSessionRequest
from tenuto.serve.shared.bodies import JsonRoute, of_many
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.sse import respond, streamed, while_connected

router = APIRouter(route_class=JsonRoute, tags=["sglang"], responses=REFUSALS)

STREAMED = streamed("The answer, a list of them for several prompts, or a stream of answers so far")


@router.post("/open_session")
async def open_session(requests: RequestsOf, tenant: Caller, body: OpenSessionRequest) -> str:
    """Opens a session and answers with its id."""
    return await requests.open(tenant, body)


@router.post("/close_session", response_class=Response)
async def close_session(requests: RequestsOf, tenant: Caller, body: CloseSessionRequest) -> Response:
    """Closes a session, if it exists."""
    await requests.close(tenant, body.session_id)
    return Response()


# -- requests


@router.post("/generate", response_model=None, responses=STREAMED)
@router.put("/generate", response_model=None, responses=STREAMED)
async def generate(
    edge: EdgeOf, requests: RequestsOf, tenant: Caller, body: GenerateRequest, request: Request
) -> Response:
    """Generates continuations of one or several texts or lists of tokens, optionally in a session."""
    adapter = edge.adapter(body.model)
    with body.naming(edge.model.context_length):
        items = await of_many(body.prompts, partial(body.items, adapter))
        running = await while_connected(request, requests.start(tenant, items))
    answers = Answers(edge, requests, running, several=len(running) > 1 or body.several)
    return await respond(request, answers, stream=body.stream)


@router.post("/abort_request", response_class=Response)
async def abort_request(edge: EdgeOf, requests: RequestsOf, tenant: Caller, body: AbortRequest) -> Response:
    """Ends the requests with the given id, if any, or all of the caller's."""
    edge.require_engine()
    if body.abort_all:
        await requests.abort_all(tenant)
    elif body.rid:
        await requests.abort(tenant, body.rid)
    else:
        raise InvalidRequest("there is neither rid nor abort_all; allowed: either of them")
    return Response()
