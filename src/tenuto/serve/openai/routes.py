"""OpenAI-compatible routes. A completion is a turn of an ephemeral session or, with `session_id`, of the client's own
session."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from tenuto.base.errors import AlreadyExists, InvalidRequest, NotFound, SessionBusy, TenutoError
from tenuto.base.tools.answers import Reading
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.openai.answers import Choices, Writer
from tenuto.serve.openai.chat import ChatWriter, Shown
from tenuto.serve.openai.completions import CompletionWriter, echo_of
from tenuto.serve.openai.schemas import ChatBody, CompletionBody, Generation
from tenuto.serve.openai.stored_chats import (
    CHAT,
    MESSAGES,
    StoredChats,
    StoredChoices,
    checked_metadata,
    listed_messages,
)
from tenuto.serve.openai.tools import customs_of
from tenuto.serve.shared.bodies import JsonRoute, of_many
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf, open_message
from tenuto.serve.shared.idempotency import RequestKey
from tenuto.serve.shared.placing import placed
from tenuto.serve.shared.run_turns import start_in_run
from tenuto.serve.shared.runs import run_names
from tenuto.serve.shared.samples import Samples, close_all, start_all
from tenuto.serve.shared.schemas import REFUSALS, IdempotencyKey
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import respond, streamed, while_connected
from tenuto.serve.shared.volatile import without_volatile_lines

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"], responses=REFUSALS)


async def _stored(edge: EdgeOf, tenant: Caller) -> StoredChats:
    chats, messages = edge.objects(tenant, CHAT), edge.objects(tenant, MESSAGES)
    return edge.part(StoredChats, chats, messages, tenant=tenant.name)


StoredOf = Annotated[StoredChats, Depends(_stored)]
MAX_CHOICES = 1024
"""Maximum number of answers to one request: prompts times `n`."""


# -- completions


STREAMED = streamed("The completion, or its chunks, of which the last is `[DONE]`")


@router.post("/completions", response_model=None, responses=STREAMED)
async def complete(
    edge: EdgeOf, tenant: Caller, body: CompletionBody, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Continues texts. With `session_id`, the prompt is appended to the session's history and continued."""
    _check(edge, body, len(body.prompts))
    with body.naming(edge.model.context_length):
        more = {
            "session": body.session_id,
            "adapter": edge.adapter(body.model),
            "echo": bool(body.echo or body.return_token_ids or body.verbose),
            "most": body.most(edge.model.context_length),
        }
        prompts, habits = body.prompts, edge.model.habits
        starts = await of_many(len(prompts), lambda: [body.start(tenant, prompt, habits, **more) for prompt in prompts])
        samples = await while_connected(request, _begin(edge, tenant, body, request, starts, idempotency_key))
    try:
        writers: list[Writer] = []
        for prompt, start, answers in zip(body.prompts, starts, samples, strict=True):
            echo = await echo_of(edge, prompt, answers, start.params) if body.echo else None
            ids, silent = bool(body.return_tokens_as_token_ids), edge.model.eos_ids
            writers += [CompletionWriter(start.params, echo, silent, ids=ids) for _ in answers.turns]
    except BaseException:
        close_all(samples)
        raise
    return await respond(request, Choices(edge, "text_completion", samples, writers, body), stream=body.stream)


# -- chat completions


@router.post("/chat/completions", response_model=None, responses=STREAMED)
async def chat(
    edge: EdgeOf,
    tenant: Caller,
    body: ChatBody,
    request: Request,
    stored: StoredOf,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Answers messages. With `session_id`, send only the new messages: the session has the earlier ones."""
    _check(edge, body, 1)
    metadata = checked_metadata(body.metadata) if body.store else {}
    with body.naming(edge.model.context_length):
        given, usual = body.messages, edge.model.habits
        messages = await of_many(
            len(given), lambda: without_volatile_lines(edge, placed([message.rendered() for message in given], usual))
        )
        kept = await of_many(len(given), lambda: listed_messages(given)) if body.store else b""
        asker = body.messages[-1].role if body.messages else ""
        habits = edge.model.habits.with_variables(body.chat_template_kwargs or {}).after(asker)
        if body.add_generation_prompt is False and habits.thinks == "opened":
            habits = replace(
                habits, thinks="no"
            )  # what continues an answer follows its thoughts; else nothing opens any
        more = {
            "adapter": edge.adapter(body.model),
            "variables": body.variables(),
            "echo": bool(body.return_token_ids or body.verbose),
            "continues": bool(body.continue_final_message),
            "closed": body.add_generation_prompt is False and not body.continue_final_message,
            "most": body.most(edge.model.context_length),
        }
        start = body.start(tenant, messages, habits, session=body.session_id, **more)
        reading = body.tool_use.reading(habits, start.params.grammar)
        beginning = _begin(edge, tenant, body, request, [start], idempotency_key, reading)
        samples = await while_connected(request, beginning)
    customs = customs_of(body.tools)
    shown = Shown(body.include_reasoning is not False, bool(body.return_tokens_as_token_ids), body.echoed)

    def writers() -> list[ChatWriter]:
        return [ChatWriter(reading.reader(turn.id), start.params, customs, shown) for turn in samples[0].turns]

    answer = (edge, "chat.completion", samples, writers(), body, reading)
    if not body.store:
        return await respond(request, Choices(*answer), stream=body.stream)
    store = partial(stored.store, metadata=metadata, messages=kept)
    return await respond(request, StoredChoices(store, writers(), *answer), stream=body.stream)


# -- shared by both


def _check(edge: Edge, body: Generation, prompts: int) -> None:
    edge.adapter(body.model)
    body.check()
    if not 1 <= prompts * body.samples <= MAX_CHOICES:
        raise InvalidRequest(f"{prompts} prompts with n {body.samples}; allowed: 1 to {MAX_CHOICES} answers in all")


async def _begin(
    edge: Edge,
    tenant: Tenant,
    body: Generation,
    request: Request,
    starts: list[StartTurn],
    key: str | None,
    reading: Reading | None = None,
) -> list[Samples]:
    """Starts the samples of every prompt. The caller closes them. `reading`: how the answer to messages is parsed."""
    if body.session_id is None:
        if reading is not None and body.samples == 1 and _resendable(starts[0]):
            names = run_names(request.headers, body.run_name())
            if (turn := await start_in_run(edge, tenant, names, starts[0], reading)) is not None:
                return [Samples.of(edge, tenant, turn)]
        return await start_all(edge, tenant, starts, body.samples)
    return await _in_session(edge, tenant, starts[0], await RequestKey.of(request, key))


def _resendable(start: StartTurn) -> bool:
    """Whether a session may have the beginning of the request: what it asks about must not be earlier messages."""
    return not (start.echo or start.continues or start.closed or start.params.scores_input) and start.most is None


async def _in_session(edge: Edge, tenant: Tenant, start: StartTurn, key: RequestKey | None) -> list[Samples]:
    """Starts a turn of the client's session. A missing session is opened first, and closed again if the turn is
    refused."""
    samples, session = Samples(edge, tenant, partial(edge.start, tenant, request_key=key)), start.session or ""
    try:
        await samples.start(start)
    except NotFound:
        ttl, opened = edge.settings.ttl(None, named=True), False
        with suppress(AlreadyExists):  # another request opened it meanwhile
            await edge.link.call(open_message(tenant, session, ttl=ttl, adapter=start.adapter))
            opened = True
        try:
            await samples.start(start)
        except SessionBusy:  # another request is using the session
            raise
        except TenutoError:
            if opened and edge.turns.queues.open_turn((tenant.name, session)) is None:
                await edge.turns.close_if_open((tenant.name, session), version=0)
            raise
    return [samples]
