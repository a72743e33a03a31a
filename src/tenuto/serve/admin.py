"""Health, metrics, audit, and what only administrators may see."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter

from tenuto.base.messages import Audit, AuditView
from tenuto.serve.edge import Admin, Caller, EdgeOf

router = APIRouter(tags=["operations"])


@router.get("/v1/engine")
async def engine(edge: EdgeOf, _: Caller) -> dict[str, Any]:
    """The model that runs, and how."""
    edge.require_engine()
    view: dict[str, Any] = msgspec.to_builtins(edge.model)
    return view


@router.get("/audit")
async def audit(edge: EdgeOf, _: Admin) -> dict[str, Any]:
    """Recount every unit of memory from its holders."""
    view = await edge.link.call(Audit(), AuditView)
    return {"clean": True, **msgspec.to_builtins(view)}
