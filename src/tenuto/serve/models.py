"""`/v1/models`, in the form that the client expects: OpenAI's, or Anthropic's if the request has its version header."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from tenuto.base.options import MAX_NEW_TOKENS
from tenuto.serve.shared.edge import DEFAULT_MODEL, Caller, Edge, EdgeOf
from tenuto.serve.shared.errors import is_anthropics
from tenuto.serve.shared.pages import Cursor, Limit, page
from tenuto.serve.shared.schemas import REFUSALS
from tenuto.serve.shared.settings import Tenant

router = APIRouter(prefix="/v1/models", tags=["models"], responses=REFUSALS)

UNKNOWN_TIME = "1970-01-01T00:00:00Z"
"""The time that Anthropic's interface gives for a model whose release date is unknown."""


@router.get("")
async def list_models(
    edge: EdgeOf,
    tenant: Caller,
    request: Request,
    after_id: Cursor = None,
    before_id: Cursor = None,
    limit: Limit = 20,
) -> dict[str, Any]:
    """Lists the served model under each of its names, and then the loaded adapters. Only Anthropic's form has pages."""
    edge.require_engine()
    names = [*edge.served_names, *edge.adapters]
    if not is_anthropics(request.scope):
        return {"object": "list", "data": [_model(edge, tenant, name) for name in names]}
    return page([_info(edge, name) for name in names], after_id, before_id, limit)


@router.get("/{model_id:path}")
async def get_model(edge: EdgeOf, tenant: Caller, request: Request, model_id: str) -> dict[str, Any]:
    """Returns the model, by one of its names or as `default`, or an adapter."""
    edge.require_engine()
    edge.adapter(model_id)
    name = edge.served_name if model_id == DEFAULT_MODEL else model_id
    return _info(edge, name) if is_anthropics(request.scope) else _model(edge, tenant, name)


def _model(edge: Edge, tenant: Tenant, name: str) -> dict[str, Any]:
    """Returns the model, or an adapter, in OpenAI's form. Only admins see the path of an adapter."""
    adapter = edge.adapters.get(name)
    root = edge.model.model if adapter is None else adapter.path if tenant.admin else name
    return {
        "id": name,
        "object": "model",
        "created": int(edge.started),
        "owned_by": "tenuto",
        "root": root,
        "parent": edge.served_name if adapter is not None else None,
        "max_model_len": edge.model.context_length,
    }


def _info(edge: Edge, name: str) -> dict[str, Any]:
    """Returns the model in Anthropic's form."""
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": UNKNOWN_TIME,
        "lifecycle": "active",
        "max_input_tokens": edge.model.context_length,
        "max_tokens": min(edge.model.context_length, MAX_NEW_TOKENS),
    }
