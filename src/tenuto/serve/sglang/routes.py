"""SGLang-compatible routes of sessions and requests."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tenuto.base.errors import InvalidRequest, TenutoError
from tenuto.serve.sglang.answers import AnswerEvents, whole_answer
from tenuto.serve.sglang.requests import RequestsOf
from tenuto.serve.sglang.schemas import AbortRequest, CloseSessionRequest, GenerateRequest, OpenSessionRequest
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.sse import EventStream, while_connected
from tenuto.serve.shared.tasks import all_of

router = APIRouter(route_class=JsonRoute, tags=["sglang"])

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, a list of them for several prompts, or a stream of answers so far",
        "content": {
            "application/json": {"schema": {}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}


@router.post("/open_session", responses=REFUSALS)
async def open_session(requests: RequestsOf, tenant: Caller, body: OpenSessionRequest) -> str:
    """Open a session; the answer is its id."""
    return await requests.open(tenant, body)


@router.post("/close_session", response_class=Response, responses=REFUSALS)
async def close_session(requests: RequestsOf, tenant: Caller, body: CloseSessionRequest) -> Response:
    """Close a session, if it exists."""
    await requests.close(tenant, body.session_id)
    return Response()


# -- requests


@router.post("/generate", response_model=None, responses=REFUSALS | STREAMED)
@router.put("/generate", response_model=None, responses=REFUSALS | STREAMED)
async def generate(
    edge: EdgeOf, requests: RequestsOf, tenant: Caller, body: GenerateRequest, request: Request
) -> Response:
    """Continue one or several texts or lists of tokens, by themselves or in a session."""
    if body.model is not None:
        edge.check_model(body.model)
    try:
        running = await while_connected(request, requests.start(tenant, body.items()))
    except TenutoError as error:
        error.param = body.param(error.param)
        raise
    several = len(running) > 1 or body.several
    if body.stream:
        events = AnswerEvents(edge, running, several=several)
        return EventStream([each.accepted for each in running], events, lambda: requests.leave(running))
    try:
        await while_connected(request, all_of(each.accepted.finished() for each in running))
        answers = [await whole_answer(edge, each) for each in running]
    finally:
        requests.leave(running)
    return Response(msgspec.json.encode(answers if several else answers[0]), media_type="application/json")


@router.post("/abort_request", response_class=Response, responses=REFUSALS)
async def abort_request(edge: EdgeOf, requests: RequestsOf, tenant: Caller, body: AbortRequest) -> Response:
    """End the requests with an id, if any, or all of yours."""
    edge.require_engine()
    if body.abort_all:
        await requests.abort_all(tenant)
    elif body.rid:
        await requests.abort(tenant, body.rid)
    else:
        raise InvalidRequest("no request to abort is named; give rid, or abort_all")
    return Response()
