"""SGLang-compatible routes for the server itself: its health, model, weights and memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from tenuto.base.errors import LimitReached, Overloaded, TenutoError
from tenuto.base.options import ONE_TOKEN
from tenuto.base.wire.messages import DropMemory, GetStats, StartTurn
from tenuto.base.wire.trainer_messages import Pause, ReleaseMemory, Resume, ResumeMemory
from tenuto.serve.sglang.requests import RequestsOf
from tenuto.serve.sglang.schemas import MemoryRequest, PauseRequest
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Admin, Caller, Edge, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.tasks import all_of

router = APIRouter(route_class=JsonRoute, tags=["sglang"])

PROBE_SECONDS = 20.0
"""Time in which a healthy engine generates a token, or at least takes a step."""
UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The engine has stopped, or the server is shutting down"}
}


@router.get("/flush_cache", response_class=PlainTextResponse, responses=REFUSALS)
@router.post("/flush_cache", response_class=PlainTextResponse, responses=REFUSALS)
async def flush_cache(edge: EdgeOf, _: Admin) -> Response:
    """Drops the memory of sessions without a running turn. Their state is computed again when it is needed."""
    dropped = await edge.link.call(DropMemory())
    return PlainTextResponse(f"Dropped the memory of {dropped} sessions; running turns keep theirs.\n")


@router.post("/pause_generation", responses=REFUSALS)
async def pause(edge: EdgeOf, _: Admin, body: PauseRequest | None = None) -> dict[str, str]:
    """Takes no more steps until `/continue_generation`. Open requests wait or end; new requests queue."""
    mode = body.mode if body is not None else "abort"
    await edge.link.call(Pause(release=mode == "retract"))
    if mode == "abort":
        await all_of(edge.turns.abort_quietly(turn) for turn in edge.turns.open_turns())
    return {"status": "ok", "message": f"paused, {mode}"}


@router.post("/continue_generation", responses=REFUSALS)
async def resume(edge: EdgeOf, _: Admin) -> dict[str, str]:
    """Continues after a pause."""
    await edge.link.call(Resume())
    return {"status": "ok", "message": "continued"}


@router.post("/release_memory_occupation", responses=REFUSALS)
async def release_memory(edge: EdgeOf, _: Admin, body: MemoryRequest | None = None) -> dict[str, str]:
    """Returns memory to the system while generation is paused or no turn runs. Sessions keep their tokens; turns are
    refused with 503 until all memory is resumed."""
    parts = (body or MemoryRequest.model_validate({})).parts
    if parts:
        await edge.link.call(ReleaseMemory(parts=parts))
    return {"status": "ok", "message": f"released, {' and '.join(parts) or 'nothing'}"}


@router.post("/resume_memory_occupation", responses=REFUSALS)
async def resume_memory(edge: EdgeOf, _: Admin, body: MemoryRequest | None = None) -> dict[str, str]:
    """Allocates memory again, and reads the weights again if they were released. The state that sessions need is
    computed again or restored."""
    parts = (body or MemoryRequest.model_validate({})).parts
    if parts:
        await edge.link.call(ResumeMemory(parts=parts))
    return {"status": "ok", "message": f"resumed, {' and '.join(parts) or 'nothing'}"}


@router.get("/health", response_class=Response, responses=UNHEALTHY)
async def health(edge: EdgeOf) -> Response:
    """Whether the server accepts requests. Needs no key."""
    return Response(status_code=200 if edge.healthy else 503)


@router.get("/health_generate", response_class=Response, responses=UNHEALTHY)
async def health_generate(edge: EdgeOf, requests: RequestsOf) -> Response:
    """Whether the engine generates a token or, if it is too busy, takes steps. Needs no key. Simultaneous requests
    share a token."""
    if not edge.healthy:
        return Response(status_code=503)
    if requests.probe is None or requests.probe.done():
        requests.probe = asyncio.ensure_future(_probe(edge))
    try:
        healthy = await asyncio.wait_for(asyncio.shield(requests.probe), 2 * PROBE_SECONDS)
    except TimeoutError:
        healthy = False
    return Response(status_code=200 if healthy else 503)


async def _probe(edge: Edge) -> bool:
    """Whether the engine generates a token or takes steps."""
    probe = StartTurn(kind="turn", tenant="", input=[0], params=replace(ONE_TOKEN, timeout=PROBE_SECONDS))
    try:
        before = await edge.link.call(GetStats())
        with suppress(LimitReached, Overloaded):  # it is busy: check that it takes steps
            turn = await edge.start(Tenant(""), probe)
            if (await turn.finished()).committed:
                return True
        after = await edge.link.call(GetStats())
    except TenutoError:
        return False
    return after.steps > before.steps


@router.get("/get_model_info", responses=REFUSALS)
@router.get("/model_info", responses=REFUSALS)
async def model_info(edge: EdgeOf, tenant: Caller) -> dict[str, Any]:
    """Returns the model's name, and its path for admins."""
    edge.require_engine()
    return {
        **_paths(edge, tenant),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": edge.weights.version,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def _paths(edge: Edge, tenant: Tenant) -> dict[str, str]:
    """Returns the paths of the model's files for admins, and its name for others."""
    if not tenant.admin:
        return {"model_path": edge.served_name, "tokenizer_path": edge.served_name}
    model = edge.model.path or edge.model.model
    return {"model_path": edge.weights.path or model, "tokenizer_path": model}


@router.get("/get_server_info", responses=REFUSALS)
@router.get("/server_info", responses=REFUSALS)
async def server_info(edge: EdgeOf, tenant: Caller) -> dict[str, Any]:
    """Returns the model, its memory, and the engine's current load."""
    model, settings = edge.model, edge.settings
    stats = await edge.link.call(GetStats())
    return {
        **_paths(edge, tenant),
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
