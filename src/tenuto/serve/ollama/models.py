"""Ollama's routes about models. The server has one, under each of its names."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from tenuto.base.errors import InvalidRequest
from tenuto.serve.ollama.errors import REFUSALS
from tenuto.serve.ollama.schemas import LATEST, ShowBody
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf

router = APIRouter(route_class=JsonRoute, prefix="/api", tags=["ollama"], responses=REFUSALS)

FOREVER = "2318-01-01T00:00:00Z"
"""Time until which the model stays loaded: as long as the server runs."""


def adapter_of(edge: Edge, name: str) -> str | None:
    """Returns the adapter that the model's name, with or without the tag `latest`, asks for, as `Edge.adapter` does."""
    known = name in edge.served_names or name in edge.adapters
    return edge.adapter(name if known else name.removesuffix(LATEST))


def _names(edge: Edge) -> list[str]:
    return [*edge.served_names, *edge.adapters]


@router.get("/version")
async def server_version(edge: EdgeOf, _: Caller) -> dict[str, str]:
    """Returns the server's version."""
    edge.require_engine()
    return {"version": version("tenuto")}


@router.get("/tags")
async def tags(edge: EdgeOf, _: Caller) -> dict[str, Any]:
    """Lists the served model under each of its names, and then the loaded adapters."""
    edge.require_engine()
    return {"models": [_model(edge, name) for name in _names(edge)]}


@router.get("/ps")
async def running(edge: EdgeOf, _: Caller) -> dict[str, Any]:
    """Lists the served model and its adapters, which stay loaded."""
    edge.require_engine()
    loaded = {"expires_at": FOREVER, "size_vram": 0, "context_length": edge.model.context_length}
    return {"models": [{**_model(edge, name), **loaded} for name in _names(edge)]}


@router.post("/show")
async def show(edge: EdgeOf, _: Caller, body: ShowBody) -> dict[str, Any]:
    """Describes the model."""
    edge.require_engine()
    name = body.model or body.name
    if not name:
        raise InvalidRequest("there is no model; allowed: a name that /api/tags lists", param="model")
    adapter_of(edge, name)
    model = edge.model
    can = {"tools": model.has_chat, "thinking": model.habits.thinks != "no" or bool(model.habits.switches)}
    can["insert"] = model.fill is not None
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(edge),
        "model_info": {
            "general.basename": name,
            "general.context_length": model.context_length,
            "tokenizer.ggml.vocab_size": model.vocab_size,
        },
        "capabilities": ["completion", *(name for name, able in can.items() if able)],
        "modified_at": _modified(edge),
    }


def _model(edge: Edge, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(edge),
        "size": sum(file.stat().st_size for file in _files(edge)),
        "digest": sha256(edge.fingerprint.encode()).hexdigest(),
        "details": _details(edge),
    }


def _details(edge: Edge) -> dict[str, Any]:
    form = "gguf" if edge.model.path.endswith(".gguf") else "safetensors"
    return {
        "parent_model": "",
        "format": form,
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _files(edge: Edge) -> list[Path]:
    """Returns the files of the model's weights; none if it has no files."""
    path = Path(edge.model.path)
    if path.is_file():
        return [path]
    return sorted(path.glob("*.safetensors")) if edge.model.path and path.is_dir() else []


def _modified(edge: Edge) -> str:
    """Returns the time at which the model's files changed or, without files, the server started."""
    seconds = max((file.stat().st_mtime for file in _files(edge)), default=edge.started)
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
