"""SGLang-compatible routes for trainers that send weights, whole or tensor by tensor."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body

from tenuto.base.views import WeightsView
from tenuto.base.wire.request import Request
from tenuto.base.wire.trainer_messages import (
    GetWeight,
    JoinGroup,
    LeaveGroup,
    NameWeights,
    ReceiveTensors,
    UpdateTensors,
    UpdateWeights,
)
from tenuto.serve.sglang.weight_schemas import (
    GroupRequest,
    InitGroupRequest,
    TensorsRequest,
    UpdateFromDiskRequest,
    UpdateFromGroupRequest,
    WeightRequest,
    WeightVersionRequest,
)
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Admin, Caller, Edge, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, tags=["sglang"], responses=REFUSALS)


@router.post("/update_weights_from_disk")
async def update_from_disk(edge: EdgeOf, _: Admin, body: UpdateFromDiskRequest) -> dict[str, Any]:
    """Switches to other weights. Sessions and open turns keep their tokens, whose state is computed again, unless
    `keep_state` is set. Weights that are damaged or of another shape are refused without any change."""
    request = UpdateWeights(path=body.model_path, use=body.use)
    return await _updated(edge, request, f"the weights are those at {body.model_path}", body.model_path)


@router.post("/update_weights_from_tensor")
async def update_from_tensor(edge: EdgeOf, _: Admin, body: TensorsRequest) -> dict[str, Any]:
    """Replaces some tensors of the weights, all of them or, after an error, none. Otherwise as
    `/update_weights_from_disk`."""
    request = UpdateTensors(pickled=body.pickled(), bucket=body.bucket, use=body.use)
    return await _updated(edge, request, "the tensors are in use")


@router.post("/update_weights_from_distributed")
async def update_from_group(edge: EdgeOf, _: Admin, body: UpdateFromGroupRequest) -> dict[str, Any]:
    """Replaces some tensors of the weights by those that rank 0 of a group broadcasts, in the given order. Otherwise as
    `/update_weights_from_tensor`."""
    request = ReceiveTensors(
        group=body.group_name,
        names=body.names,
        dtypes=body.dtypes,
        shapes=body.shapes,
        bucket=body.bucket,
        use=body.use,
    )
    return await _updated(edge, request, "the tensors are in use")


async def _updated(edge: Edge, request: Request[WeightsView], message: str, path: str | None = None) -> dict[str, Any]:
    version = (await edge.link.call(request)).weight_version
    edge.weights.updated(path, version)
    return {"success": True, "message": message, "num_paused_requests": 0, "weight_version": version}


@router.post("/update_weight_version")
async def name_weights(edge: EdgeOf, _: Admin, body: WeightVersionRequest) -> dict[str, Any]:
    """Gives the weights in use another version. Open requests end, unless `abort_all_requests` is false."""
    await edge.link.call(NameWeights(version=body.new_version, abort=body.abort_all_requests))
    edge.weights.updated(None, body.new_version)
    return {"success": True, "message": "the weights have another version", "new_version": body.new_version}


@router.get("/get_weight_version")
@router.get("/weight_version")
async def weight_version(edge: EdgeOf, _: Caller) -> dict[str, str]:
    """Returns the version of the weights in use."""
    edge.require_engine()
    return {"weight_version": edge.weights.version}


@router.post("/init_weights_update_group")
async def init_group(edge: EdgeOf, _: Admin, body: InitGroupRequest) -> dict[str, Any]:
    """Joins a group of `torch.distributed` with the backend gloo, and waits until all its processes have joined."""
    await edge.link.call(
        JoinGroup(
            group=body.group_name,
            address=body.master_address,
            port=body.master_port,
            rank=body.rank_offset,
            size=body.world_size,
        )
    )
    return {"success": True, "message": "the group has formed"}


@router.post("/destroy_weights_update_group")
async def destroy_group(edge: EdgeOf, _: Admin, body: GroupRequest) -> dict[str, Any]:
    """Leaves a group."""
    await edge.link.call(LeaveGroup(group=body.group_name))
    return {"success": True, "message": "the group is gone"}


@router.post("/get_weights_by_name")
async def weights_by_name(edge: EdgeOf, _: Admin, body: Annotated[WeightRequest, Body()]) -> list[Any]:
    """Returns the first numbers, or rows, of a tensor of the weights in use."""
    return await edge.link.call(GetWeight(name=body.name, most=body.truncate_size))
