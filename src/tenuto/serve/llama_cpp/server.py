"""llama.cpp's routes about the server itself."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Query

from tenuto.base.errors import ServerFull
from tenuto.serve.llama_cpp.answers import NO_SLOT
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.settings import Tenant

router = APIRouter(route_class=JsonRoute, tags=["llama.cpp"], responses=REFUSALS)


@router.get("/props")
async def props(edge: EdgeOf, _: Caller) -> dict[str, Any]:
    """Returns the model's name, its context, and how many requests run at once."""
    edge.require_engine()
    return {
        "default_generation_settings": {"n_ctx": edge.model.context_length},
        "total_slots": edge.model.config.max_running,
        "model_alias": edge.served_name,
        "model_path": edge.served_name,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"tenuto-{version('tenuto')}",
    }


@router.get("/slots")
async def slots(
    edge: EdgeOf,
    tenant: Caller,
    fail_on_no_slot: Annotated[str | None, Query(description="If given, answer 503 when no turn could begin.")] = None,
) -> list[dict[str, Any]]:
    """Returns the turns that are open, and idle slots up to the number of turns that run at once. Of other tenants'
    turns only admins see more than that they are open."""
    edge.require_engine()
    turns, most = edge.turns.open_turns(), edge.model.config.max_running
    if fail_on_no_slot is not None and len(turns) >= most:
        raise ServerFull(f"{len(turns)} turns are open, and {most} run at once; try again later")
    idle = {"n_ctx": edge.model.context_length, "speculative": False, "is_processing": False}
    shown = [{**idle, "is_processing": True, **_shown(edge, tenant, turn)} for turn in turns]
    return [{"id": number, **slot} for number, slot in enumerate(shown + [idle] * (most - len(turns)))]


def _shown(edge: Edge, tenant: Tenant, turn: LiveTurn) -> dict[str, Any]:
    """Returns what a tenant may see of a turn."""
    if not (tenant.admin or turn.tenant == tenant.name):
        return {}
    decoded, ticket = sum(len(delta.tokens) for delta in turn.deltas), turn.ticket
    return {
        "id_task": ticket.turn if ticket is not None else NO_SLOT,
        "turn_id": turn.id,
        "session_id": turn.request.session,
        "state": turn.state,
        "model": edge.name_of(turn.request.adapter),
        "n_prompt_tokens": ticket.prompt_tokens if ticket is not None else 0,
        "next_token": {
            "has_next_token": True,
            "n_decoded": decoded,
            "n_remain": ticket.max_new_tokens - decoded if ticket is not None else -1,
        },
    }
