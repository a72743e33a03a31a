"""Loading and unloading of adapters (LoRA) while the server runs, as vLLM and SGLang spell it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.wire.trainer_messages import LoadAdapter, UnloadAdapter
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import DEFAULT_MODEL, Admin, Edge, EdgeOf
from tenuto.serve.shared.objects import ForeignObject
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, tags=["adapters"], responses=REFUSALS)


class AdapterToLoad(ForeignObject):
    """An adapter to load."""

    ignored = frozenset({"base_model_name", "is_3d_lora_weight"})

    lora_name: str = Field(min_length=1, max_length=128, description="The model's name in requests for the adapter.")
    lora_path: str = Field(min_length=1, max_length=4096, description="A directory that PEFT wrote, on the server.")
    load_inplace: bool | None = Field(None, description="Replace the loaded adapter of this name.")
    pinned: bool | None = Field(None, description="No effect: adapters stay until they are unloaded.")


class AdapterToUnload(ForeignObject):
    """An adapter to unload."""

    ignored = frozenset({"lora_int_id"})

    lora_name: str = Field(min_length=1, max_length=128)


TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


@router.post("/v1/load_lora_adapter", response_model=None, responses=TEXT)
async def load(edge: EdgeOf, _: Admin, body: AdapterToLoad) -> PlainTextResponse:
    """Loads an adapter. Requests that name it as their model, and sessions opened with it, are computed with it."""
    await _load(edge, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None, responses=TEXT)
async def unload(edge: EdgeOf, _: Admin, body: AdapterToUnload) -> PlainTextResponse:
    """Unloads an adapter. Refused while turns with it are open. Its sessions are kept, and their next turns refused
    until it is loaded again."""
    await _unload(edge, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/load_lora_adapter", tags=["sglang"])
async def load_for_sglang(edge: EdgeOf, _: Admin, body: AdapterToLoad) -> dict[str, Any]:
    """Loads an adapter; answers with all that are loaded."""
    await _load(edge, body)
    return _loaded(edge)


@router.post("/unload_lora_adapter", tags=["sglang"])
async def unload_for_sglang(edge: EdgeOf, _: Admin, body: AdapterToUnload) -> dict[str, Any]:
    """Unloads an adapter, see `/v1/unload_lora_adapter`; answers with all that are still loaded."""
    await _unload(edge, body)
    return _loaded(edge)


async def _load(edge: Edge, body: AdapterToLoad) -> None:
    name = body.lora_name
    if name in (*edge.served_names, DEFAULT_MODEL):
        raise InvalidRequest(f"lora_name is {name!r}, a name of the model; allowed: others", param="lora_name")
    loading = LoadAdapter(name=name, path=body.lora_path, replace=bool(body.load_inplace))
    edge.adapters[name] = await edge.link.call(loading)


async def _unload(edge: Edge, body: AdapterToUnload) -> None:
    await edge.link.call(UnloadAdapter(name=body.lora_name))
    edge.adapters.pop(body.lora_name, None)


def _loaded(edge: Edge) -> dict[str, Any]:
    return {"success": True, "loaded_adapters": {name: adapter.path for name, adapter in edge.adapters.items()}}
