"""Anthropic-compatible routes. A request is one turn: of an ephemeral session or, with `thread`, of a kept one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tenuto.base.turns import last_role
from tenuto.base.wire.messages import Tokenize
from tenuto.serve.anthropic import threads
from tenuto.serve.anthropic.answers import MessageAnswer
from tenuto.serve.anthropic.compactions import Compaction, PausedAnswer, compacted
from tenuto.serve.anthropic.content import NewMessage
from tenuto.serve.anthropic.schemas import Conversation, MessagesBody
from tenuto.serve.anthropic.threads import KeptTools, ThreadTools
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.run_turns import start_in_run
from tenuto.serve.shared.runs import run_names
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import Answer, respond, streamed, while_connected
from tenuto.serve.shared.volatile import without_volatile_lines

router = APIRouter(route_class=JsonRoute, prefix="/v1/messages", tags=["anthropic"], responses=REFUSALS)


@router.post("", response_model=None, responses=streamed("The answer, or its events"))
async def messages(edge: EdgeOf, tenant: Caller, body: MessagesBody, request: Request, kept: ThreadTools) -> Response:
    """Answers messages. With `thread`, the server keeps the conversation, and later requests send only new messages."""
    run = run_names(request.headers, body.run_name())
    answer = await while_connected(request, begin(edge, tenant, body, kept, request.state.request_id, run=run))
    return await respond(request, answer, stream=body.stream)


async def begin(
    edge: Edge,
    tenant: Tenant,
    body: MessagesBody,
    kept: KeptTools,
    request_id: str,
    priority: int | None = None,
    run: Sequence[bytes] = (),
) -> Answer:
    """Starts the turn that answers messages, and returns its answer once the engine has accepted it. `priority`: that
    of the turn, if not the usual one. `run`: the names of its run."""
    adapter = edge.adapter(body.model)
    with body.naming(edge.model.context_length):
        if body.thread is not None and body.context_management is not None:
            raise threads.ThreadRefused(
                "thread_unsupported_request",
                "thread and context_management are given; allowed: one of them",
                unsupported=["context_management"],
            )
        applied = await _edit(edge, tenant, body)
        compaction = await _compact(edge, tenant, body, adapter, run)
        if compaction is not None and compaction.pauses:
            return PausedAnswer(edge, compaction, adapter, request_id)
        continued = body.thread.continued() if body.thread is not None else None
        thread = await threads.find(edge, tenant, continued, kept) if continued is not None else None
        if thread is not None:
            body.take(thread.tools)
        given = without_volatile_lines(edge, body.rendered(edge.model.habits, begun=thread is not None))
        habits = edge.model.habits.after(last_role(given))
        start = body.start(tenant, given, habits, adapter=adapter)
        if priority is not None:
            start = msgspec.structs.replace(start, params=replace(start.params, priority=priority))
        reading = body.tool_use.reading(habits, start.params.grammar)
        if body.thread is None:
            turn = await start_in_run(edge, tenant, run, start, reading) or await edge.start(tenant, start)
            return MessageAnswer(
                edge, turn, reading.reader(turn.id), request_id, applied=applied, compaction=compaction
            )
        if thread is None:
            thread = await threads.new_thread(body.tool_use.definitions, kept)
        turn = await threads.start_turn(edge, tenant, thread, start)
    end = partial(threads.end_turn, edge, tenant, thread, turn)
    return MessageAnswer(edge, turn, reading.reader(turn.id), request_id, thread.next_id, end)


@router.post("/count_tokens")
async def count_tokens(edge: EdgeOf, tenant: Caller, body: Conversation) -> dict[str, Any]:
    """Returns the number of tokens of the messages as a prompt."""
    edge.adapter(body.model)
    original = await _count(edge, tenant, body, body.messages)
    if await _edit(edge, tenant, body) is None:
        return {"input_tokens": original}
    count = await _count(edge, tenant, body, body.messages)
    return {"input_tokens": count, "context_management": {"original_input_tokens": original}}


async def _edit(edge: Edge, tenant: Tenant, body: Conversation) -> list[dict[str, Any]] | None:
    """Edits the messages as the request asks. Returns the reports on the edits, or `None` if it asks for none."""
    if body.context_management is None:
        return None
    messages, reports = await body.context_management.apply(body.messages, partial(_count, edge, tenant, body))
    body.messages = list(messages)
    return reports


async def _compact(
    edge: Edge, tenant: Tenant, body: MessagesBody, adapter: str | None, run: Sequence[bytes]
) -> Compaction | None:
    """Replaces the messages by a summary if the request asks for that and they are long enough."""
    edit = body.context_management.compact if body.context_management is not None else None
    if edit is None or not await edit.wanted(body.messages, partial(_count, edge, tenant, body)):
        return None
    compaction = await compacted(edge, tenant, body, edit, adapter, run)
    body.messages = compaction.messages(body.messages)
    return compaction


async def _count(edge: Edge, tenant: Tenant, body: Conversation, messages: Sequence[NewMessage]) -> int:
    """Returns the number of tokens of the prompt, with these messages."""
    prompt = body.model_copy(update={"messages": messages})
    given = Tokenize(
        tenant=tenant.name,
        input=without_volatile_lines(edge, prompt.rendered(edge.model.habits)),
        tools=body.tool_use.definitions,
    )
    return len(array("i", await edge.link.call(given)))
