"""SGLang-compatible routes for trainers that send weights, whole or tensor by tensor."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body

from tenuto.base.wire.messages import (
    GetWeight,
    JoinGroup,
    LeaveGroup,
    ReceiveTensors,
    Request,
    UpdateTensors,
    UpdateWeights,
)
from tenuto.serve.sglang.weight_schemas import (
    GroupRequest,
    InitGroupRequest,
    TensorsRequest,
    UpdateFromDiskRequest,
    UpdateFromGroupRequest,
    UpdateRequest,
    WeightRequest,
)
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Admin, Edge, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, tags=["sglang"], responses=REFUSALS)


@router.post("/update_weights_from_disk")
async def update_from_disk(edge: EdgeOf, _: Admin, body: UpdateFromDiskRequest) -> dict[str, Any]:
    """Switches to other weights. Sessions and open turns keep their tokens, whose state is computed again. Weights that
    are damaged or of another shape are refused without any change."""
    request = UpdateWeights(path=body.model_path, abort=bool(body.abort_all_requests))
    return await _updated(edge, request, body, f"the weights are those at {body.model_path}", body.model_path)


@router.post("/update_weights_from_tensor")
async def update_from_tensor(edge: EdgeOf, _: Admin, body: TensorsRequest) -> dict[str, Any]:
    """Replaces some tensors of the weights, all of them or, after an error, none. Otherwise as
    `/update_weights_from_disk`."""
    request = UpdateTensors(pickled=body.pickled(), bucket=body.bucket, abort=bool(body.abort_all_requests))
    return await _updated(edge, request, body, "the tensors are in use")


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
        abort=bool(body.abort_all_requests),
    )
    return await _updated(edge, request, body, "the tensors are in use")


async def _updated(
    edge: Edge, request: Request[None], body: UpdateRequest, message: str, path: str | None = None
) -> dict[str, Any]:
    await edge.link.call(request)
    edge.weights.updated(path, body.weight_version)
    return {"success": True, "message": message, "num_paused_requests": 0}


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
