"""The interface in SGLang's manner: its paths, its requests and the form of its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse

from tenuto.base.errors import InvalidRequest, LimitReached, Overloaded, TenutoError
from tenuto.base.messages import Detokenize, DropMemory, GetStats, StartTurn
from tenuto.base.options import TurnParams
from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import EndReason, TurnResult, joined
from tenuto.serve.native.schemas import REFUSALS
from tenuto.serve.sglang.requests import Requests, Running
from tenuto.serve.sglang.schemas import Abort, Generate, NewSession, OldSession
from tenuto.serve.shared.edge import Admin, Caller, Edge, EdgeOf, Failure
from tenuto.serve.shared.samples import all_of, merged
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import DONE, EventStream, data, while_connected
from tenuto.serve.shared.turns import LiveTurn

router = APIRouter(tags=["sglang"])

PROBE_SECONDS = 20.0
"""In which an engine that is well generates a token, or at least takes a step."""
WEIGHT_VERSION = "default"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, a list of them for several prompts, or a stream of answers so far",
        "content": {
            "application/json": {"schema": {}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}
UNWELL: dict[int | str, dict[str, Any]] = {503: {"description": "There is no engine, or the server is about to end"}}
_REASONS = {
    EndReason.ABORT: "the request was aborted",
    EndReason.DEADLINE: "the request had not begun, or ended, by its deadline",
    EndReason.FAILED: "the steps that the request was in failed; try again",
}


def _requests(request: Request, edge: EdgeOf) -> Requests:
    """What this interface remembers; made for its first request."""
    state = request.app.state
    if not hasattr(state, "sglang"):
        state.sglang = Requests(edge)
    requests: Requests = state.sglang
    return requests


RequestsOf = Annotated[Requests, Depends(_requests)]


# -- sessions


@router.post("/open_session", responses=REFUSALS)
async def open_session(requests: RequestsOf, tenant: Caller, body: NewSession) -> str:
    """Open a session; the answer is its id."""
    return await requests.open(tenant, body)


@router.post("/close_session", response_class=Response, responses=REFUSALS)
async def close_session(requests: RequestsOf, tenant: Caller, body: OldSession) -> Response:
    """Close a session. One that is not there is closed already."""
    await requests.close(tenant, body.session_id)
    return Response()


# -- requests


@router.post("/generate", response_model=None, responses=REFUSALS | STREAMED)
@router.put("/generate", response_model=None, responses=REFUSALS | STREAMED)
async def generate(edge: EdgeOf, requests: RequestsOf, tenant: Caller, body: Generate, request: Request) -> Response:
    """Continue text or tokens, one or several, by themselves or in a session."""
    try:
        running = await while_connected(request, requests.start(tenant, body.items()))
    except TenutoError as error:
        error.param = body.param(error.param)
        raise
    several = len(running) > 1 or body.several
    if body.stream:
        return EventStream(_events(edge, running, several=several), lambda: requests.leave(running))
    try:
        await while_connected(request, all_of(_finish(one) for one in running))
        answers = [await _answer(edge, one, _turn(one).result) for one in running]
    finally:
        requests.leave(running)
    return Response(msgspec.json.encode(answers if several else answers[0]), media_type="application/json")


@router.post("/abort_request", response_class=Response, responses=REFUSALS)
async def abort_request(edge: EdgeOf, requests: RequestsOf, tenant: Caller, body: Abort) -> Response:
    """End requests: those of one id, or all that are yours. What does not exist is ended already."""
    edge.require_engine()
    if body.abort_all:
        await requests.abort_all(tenant)
    elif body.rid:
        await requests.abort(tenant, body.rid)
    else:
        raise InvalidRequest("there is no request to abort; give rid, or abort_all")
    return Response()


async def _finish(running: Running) -> None:
    await _turn(running).finished()
    running.reply.take(_turn(running).reply())


async def _events(edge: Edge, running: Sequence[Running], *, several: bool) -> AsyncIterator[bytes]:
    """Each has all that was said so far."""
    try:
        async with aclosing(merged([_turn(one) for one in running])) as news:
            async for index, updates in news:
                one = running[index]
                one.reply.take(joined(updates))
                answer = await _answer(edge, one, updates[-1].result, updates[-1].delivered)
                yield data({**answer, "index": index} if several else answer)
    except TenutoError as error:
        yield data(Failure.of(error).body)
    yield DONE


# -- answers


async def _answer(edge: Edge, running: Running, result: TurnResult | None, delivered: int = 0) -> dict[str, Any]:
    """What a request has brought so far. `result`: once that is all."""
    reply, ticket = running.reply, _turn(running).ticket
    assert ticket is not None
    meta: dict[str, Any] = {
        "id": running.rid,
        "finish_reason": _finish_reason(result, len(reply.token_ids)) if result is not None else None,
        "prompt_tokens": ticket.prompt_tokens,
        "weight_version": WEIGHT_VERSION,
        "completion_tokens": len(reply.token_ids),
        "cached_tokens": _cached(running, result) if result is not None else None,
    }
    if running.item.look.logprobs:
        meta |= await _logprobs(edge, running)
    if result is not None:
        meta["e2e_latency"] = (running.ended or time.perf_counter()) - running.started
    text = await _text(edge, running, result, delivered)
    return {"text": text, "output_ids": reply.token_ids, "meta_info": meta}


def _turn(running: Running) -> LiveTurn:
    assert running.turn is not None
    return running.turn


def _finish_reason(result: TurnResult, generated: int) -> dict[str, Any]:
    if result.reason is EndReason.STOP:
        return {"type": "stop", "matched": result.stop}
    if result.reason in (EndReason.LENGTH, EndReason.APPENDED):
        return {"type": "length", "length": generated}
    return {
        "type": "abort",
        "message": _REASONS[result.reason],
        "status_code": None,
        "err_type": None,
    }


def _cached(running: Running, result: TurnResult) -> int:
    """The prompt of several answers was computed once, for the first."""
    if running.prompt is not None and running.prompt.result is not None and running.sample == 0:
        return running.prompt.result.usage.cached
    return result.usage.cached


async def _text(edge: Edge, running: Running, result: TurnResult | None, delivered: int) -> str:
    """The text of the output, with control tokens and with what ended it if they are wanted."""
    look, reply = running.item.look, running.reply
    stop = result.stop if result is not None else None
    if not look.special and not _differs(edge, stop, trim=look.trim):
        return reply.text
    tokens = reply.token_ids if result is not None else reply.token_ids[:delivered]
    if look.trim and isinstance(stop, int):
        tokens = tokens[:-1]
    text = await edge.link.call(Detokenize(tokens=tokens, special=look.special))
    if look.trim and isinstance(stop, str):
        text = text[: text.rfind(stop)] if stop in text else text
    return text


def _differs(edge: Edge, stop: str | int | None, *, trim: bool) -> bool:
    """Whether the text differs from what was delivered, which ends before a stop string, and with a stop id."""
    if isinstance(stop, str):
        return not trim
    return trim and stop is not None and stop not in edge.model.eos_ids


async def _logprobs(edge: Edge, running: Running) -> dict[str, Any]:
    """Lists of (log-probability, token id, text); the first of the prompt's has no log-probability."""
    look, reply = running.item.look, running.reply
    before = await _of_prompt(edge, running) if look.start >= 0 else []
    found: dict[str, Any] = {
        "input_token_logprobs": [entry for entry, _ in before],
        "output_token_logprobs": [_entry(view, text=look.token_text) for view in reply.logprobs],
    }
    if look.top:
        found["input_top_logprobs"] = [top for _, top in before]
        found["output_top_logprobs"] = [_top(view, text=look.token_text) for view in reply.logprobs]
    return found


async def _of_prompt(edge: Edge, running: Running) -> list[tuple[list[Any], list[Any] | None]]:
    """From the token that was asked for on: its entry, and those of the likeliest in its place."""
    look = running.item.look
    source = running.prompt if running.prompt is not None else _turn(running)
    views = source.reply().input_logprobs if running.prompt is not None else running.reply.input_logprobs
    ticket = source.ticket
    if ticket is None or not views or look.start >= ticket.history + len(views):
        return []
    first = ticket.prompt[look.start]
    text = None
    if look.token_text:
        text = await edge.link.call(Detokenize(tokens=[first]))
    rest = [view for view in views[look.start + 1 - ticket.history :] if view is not None]
    return [
        ([None, first, text], None),
        *((_entry(view, text=look.token_text), _top(view, text=look.token_text)) for view in rest),
    ]


def _entry(view: TokenLogprob | Candidate, *, text: bool) -> list[Any]:
    return [view.logprob, view.token, view.raw.decode(errors="replace") if text else None]


def _top(view: TokenLogprob, *, text: bool) -> list[Any]:
    return [_entry(candidate, text=text) for candidate in view.top]


# -- the server


@router.get("/flush_cache", response_class=PlainTextResponse, responses=REFUSALS)
@router.post("/flush_cache", response_class=PlainTextResponse, responses=REFUSALS)
async def flush_cache(edge: EdgeOf, _: Admin) -> Response:
    """Drop the memory of what is not running; it is computed again when it is wanted."""
    dropped = await edge.link.call(DropMemory())
    return PlainTextResponse(f"Dropped the memory of {dropped} sessions; running turns keep theirs.\n")


@router.get("/health", response_class=Response, responses=UNWELL)
async def health(edge: EdgeOf) -> Response:
    """Whether the server takes requests. Needs no key."""
    return Response(status_code=503 if edge.draining or edge.link.stopped is not None else 200)


@router.get("/health_generate", response_class=Response, responses=UNWELL)
async def health_generate(edge: EdgeOf, requests: RequestsOf) -> Response:
    """Generate a token. Where others are generated meanwhile, that will do. Needs no key; all who ask at once share a
    token."""
    if edge.draining or edge.link.stopped is not None:
        return Response(status_code=503)
    if requests.probe is None or requests.probe.done():
        requests.probe = asyncio.ensure_future(_probe(edge))
    try:
        well = await asyncio.wait_for(asyncio.shield(requests.probe), 2 * PROBE_SECONDS)
    except TimeoutError:
        well = False
    return Response(status_code=200 if well else 503)


async def _probe(edge: Edge) -> bool:
    """Whether the engine generates."""
    probe = StartTurn(kind="turn", tenant="", input=[0], params=TurnParams(max_new_tokens=1, timeout=PROBE_SECONDS))
    try:
        before = await edge.link.call(GetStats())
        with suppress(LimitReached, Overloaded):  # it is busy, but is it getting on?
            turn = await edge.start(Tenant(""), probe)
            if (await turn.finished()).committed:
                return True
        after = await edge.link.call(GetStats())
    except TenutoError:
        return False
    return after.steps > before.steps


@router.get("/get_model_info", responses=REFUSALS)
@router.get("/model_info", responses=REFUSALS)
async def model_info(edge: EdgeOf, _: Caller) -> dict[str, Any]:
    """The model."""
    edge.require_engine()
    return {
        "model_path": edge.model.path or edge.model.model,
        "tokenizer_path": edge.model.path or edge.model.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": WEIGHT_VERSION,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


@router.get("/get_server_info", responses=REFUSALS)
@router.get("/server_info", responses=REFUSALS)
async def server_info(edge: EdgeOf, _: Caller) -> dict[str, Any]:
    """The model, its memory, and what the engine is doing."""
    model, settings = edge.model, edge.settings
    stats = await edge.link.call(GetStats())
    return {
        "model_path": model.path or model.model,
        "tokenizer_path": model.path or model.model,
        "served_model_name": edge.served_name,
        "host": settings.host,
        "port": settings.port,
        "context_length": model.context_length,
        "max_req_input_len": model.context_length - 1,
        "max_total_num_tokens": model.capacity_tokens,
        "max_running_requests": model.config.max_running,
        "page_size": model.page_size,
        "status": "stopping" if edge.draining else "ready",
        "version": version("tenuto"),
        "internal_states": [
            {
                "sessions": stats.sessions,
                "running": stats.running,
                "queued": stats.queued,
                "steps": stats.steps,
                "generated_tokens": stats.generated_tokens,
            }
        ],
    }
