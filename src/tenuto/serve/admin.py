"""Routes for operators: metrics, audit, and the running model."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from tenuto.base.wire.messages import Audit
from tenuto.serve.metrics import CONTENT_TYPE, Metrics
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Admin, Caller, EdgeOf, Scraper
from tenuto.serve.shared.schemas import REFUSALS

_REFUSALS: dict[int | str, dict[str, Any]] = {status: REFUSALS[status] for status in (400, 401, 403, 500, 503)}
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "In Prometheus's text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
router = APIRouter(route_class=JsonRoute, tags=["operations"], responses=_REFUSALS)


async def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


MetricsOf = Annotated[Metrics, Depends(_metrics)]


@router.get("/v1/engine")
async def engine(edge: EdgeOf, tenant: Caller) -> dict[str, Any]:
    """Returns the running model and its configuration. Only admins see the path of its files."""
    edge.require_engine()
    model = edge.model if tenant.admin else msgspec.structs.replace(edge.model, path="")
    view: dict[str, Any] = msgspec.to_builtins(model)
    return view


@router.get("/audit")
async def audit(edge: EdgeOf, _: Admin) -> dict[str, Any]:
    """Recounts every unit of memory from its holders."""
    report = await edge.link.call(Audit())
    return {"clean": True, "summary": str(report), **msgspec.to_builtins(report)}


@router.get("/metrics", response_class=Response, responses=_METRICS)
async def metrics(edge: EdgeOf, counted: MetricsOf, _: Scraper) -> Response:
    """Returns metrics for Prometheus. They name tenants, so a server with keys asks for an admin key unless it was
    started with `--public-metrics`."""
    text = await counted.text(edge.link, edge.served_name, edge.turns.queues.waiting.total())
    return Response(text, media_type=CONTENT_TYPE)
