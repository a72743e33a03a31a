"""OpenAI-compatible routes. A completion is a turn of an ephemeral session, or with `session_id` of one that the client
keeps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tenuto.base.errors import AlreadyExists, ContextExceeded, InvalidRequest, NotFound, SessionBusy, TenutoError
from tenuto.base.options import Policy
from tenuto.base.tools.definitions import NO_TOOLS, ModelHabits
from tenuto.base.tools.variables import NO_VARIABLES
from tenuto.base.turns import TurnInput
from tenuto.base.wire.messages import OpenSession, StartTurn
from tenuto.serve.openai.answers import Choices, Writer
from tenuto.serve.openai.chat import ChatWriter
from tenuto.serve.openai.completions import CompletionWriter, echo_of
from tenuto.serve.openai.schemas import ChatBody, CompletionBody, Generation
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.context import context_error
from tenuto.serve.shared.edge import DEFAULT_MODEL, Caller, Edge, EdgeOf
from tenuto.serve.shared.idempotency import RequestKey
from tenuto.serve.shared.placing import placed
from tenuto.serve.shared.samples import Samples, close_all, start_all
from tenuto.serve.shared.schemas import REFUSALS, IdempotencyKey
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import EventStream, while_connected

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"])

MAX_CHOICES = 1024
"""Answers to one request: prompts times `n`."""


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The completion, or its chunks, of which the last is `[DONE]`",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


# -- models


@router.get("/models", responses=REFUSALS)
async def list_models(edge: EdgeOf, _: Caller) -> dict[str, Any]:
    """List the served model, under each of its names."""
    edge.require_engine()
    return {"object": "list", "data": [_model(edge, name) for name in edge.served_names]}


@router.get("/models/{model_id:path}", responses=REFUSALS)
async def get_model(edge: EdgeOf, _: Caller, model_id: str) -> dict[str, Any]:
    """The model, by its name or as `default`."""
    edge.require_engine()
    edge.check_model(model_id)
    return _model(edge, edge.served_name if model_id == DEFAULT_MODEL else model_id)


def _model(edge: Edge, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(edge.started),
        "owned_by": "tenuto",
        "root": edge.model.model,
        "parent": None,
        "max_model_len": edge.model.context_length,
    }


# -- completions


@router.post("/completions", response_model=None, responses=REFUSALS | STREAMED)
async def complete(
    edge: EdgeOf, tenant: Caller, body: CompletionBody, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Continue texts. With `session_id`, the prompt is appended to the session's history and continued."""
    _check(edge, body, len(body.prompts))
    starts = [_start(edge, tenant, body, prompt) for prompt in body.prompts]
    samples = await _begin(edge, tenant, body, request, starts, idempotency_key)
    return await _respond(edge, body, request, samples, lambda: _completion_writers(edge, body, samples))


async def _completion_writers(edge: Edge, body: CompletionBody, samples: Sequence[Samples]) -> list[Writer]:
    logprobs, silent = body.logprobs is not None, edge.model.eos_ids
    writers: list[Writer] = []
    for prompt, answers in zip(body.prompts, samples, strict=True):
        echo = await echo_of(edge, prompt, answers, logprobs=logprobs) if body.echo else None
        writers += [CompletionWriter(logprobs=logprobs, echo=echo, silent=silent) for _ in answers.turns]
    return writers


# -- chat completions


@router.post("/chat/completions", response_model=None, responses=REFUSALS | STREAMED)
async def chat(
    edge: EdgeOf, tenant: Caller, body: ChatBody, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Answer messages. With `session_id`, send only the new ones: the session has the earlier ones."""
    _check(edge, body, 1)
    messages = placed([message.rendered() for message in body.messages], edge.model.habits)
    start = _start(edge, tenant, body, messages)
    samples = await _begin(edge, tenant, body, request, [start], idempotency_key)
    return await _respond(edge, body, request, samples, lambda: _chat_writers(edge, body, start, samples))


async def _chat_writers(edge: Edge, body: ChatBody, start: StartTurn, samples: Sequence[Samples]) -> list[Writer]:
    reading = body.tool_use.reading(_habits(edge, body), start.params.grammar)
    turns = [turn for answers in samples for turn in answers.turns]
    return [ChatWriter(reading.reader(turn.id), logprobs=bool(body.logprobs)) for turn in turns]


# -- from requests to turns, and from turns to answers


def _check(edge: Edge, body: Generation, prompts: int) -> None:
    edge.check_model(body.model)
    body.check()
    if not 1 <= prompts * body.samples <= MAX_CHOICES:
        raise InvalidRequest(f"{prompts} prompts with n {body.samples}; allowed: 1 to {MAX_CHOICES} answers in all")


def _habits(edge: Edge, body: Generation) -> ModelHabits:
    """How the model writes, as its template is told."""
    if not isinstance(body, ChatBody):
        return edge.model.habits
    asker = body.messages[-1].role if body.messages else ""
    return edge.model.habits.told(body.chat_template_kwargs or {}).after(asker)


def _start(edge: Edge, tenant: Tenant, body: Generation, turn_input: TurnInput) -> StartTurn:
    return StartTurn(
        kind="turn",
        tenant=tenant.name,
        session=body.session_id,
        input=turn_input,
        params=body.params(_habits(edge, body)),
        tools=body.tool_use.told if isinstance(body, ChatBody) else NO_TOOLS,
        variables=body.variables() if isinstance(body, ChatBody) else NO_VARIABLES,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        limits=tenant.limits,
    )


async def _begin(
    edge: Edge, tenant: Tenant, body: Generation, request: Request, starts: list[StartTurn], key: str | None
) -> list[Samples]:
    """The samples of every prompt, which the caller closes."""
    if body.session_id is None:
        starting = start_all(edge, tenant, starts, body.samples)
    else:
        starting = _in_session(edge, tenant, starts[0], await RequestKey.of(request, key))
    try:
        return await while_connected(request, starting)
    except ContextExceeded as error:
        raise context_error(error, edge.model.context_length, body.input_field, "openai") from None
    except TenutoError as error:
        error.param = body.param(error.param)
        raise


async def _in_session(edge: Edge, tenant: Tenant, start: StartTurn, key: RequestKey | None) -> list[Samples]:
    """A turn of the client's session, which is opened if it does not exist, and closed again if the turn is refused."""
    samples, session = Samples(edge, tenant), start.session or ""
    try:
        samples.turns = [await edge.start(tenant, start, request_key=key)]
    except NotFound:
        opened = await _open(edge, tenant, session)
        try:
            samples.turns = [await edge.start(tenant, start, request_key=key)]
        except SessionBusy:  # it is there for whoever was faster
            raise
        except TenutoError:
            if opened and edge.turns.queues.open_turn((tenant.name, session)) is None:
                with suppress(TenutoError):
                    await edge.turns.close_session((tenant.name, session), version=0)
            raise
    return [samples]


async def _open(edge: Edge, tenant: Tenant, session: str) -> bool:
    """Open the session. False if somebody else did meanwhile."""
    opening = OpenSession(
        session=session,
        policy=Policy(ttl=edge.settings.ttl(None, named=True), tenant=tenant.name),
        limits=tenant.limits,
    )
    try:
        await edge.link.call(opening)
    except AlreadyExists:
        return False
    return True


async def _respond(
    edge: Edge,
    body: Generation,
    request: Request,
    samples: list[Samples],
    make_writers: Callable[[], Awaitable[list[Writer]]],
) -> Response:
    """The answer, whole or streamed. The samples are closed once it is sent or the client has gone."""
    kind = "text_completion" if isinstance(body, CompletionBody) else "chat.completion"
    streams = False
    try:
        answer = Choices(
            edge, kind, samples, await make_writers(), usage_at_end=body.usage_at_end, session_id=body.session_id
        )
        streams = bool(body.stream)
        if streams:
            return EventStream(answer.turns, answer, lambda: close_all(samples))
        whole = await while_connected(request, answer.whole())
        return Response(msgspec.json.encode(whole), media_type="application/json")
    finally:
        if not streams:
            close_all(samples)
