"""SGLang-compatible requests of trainers."""

from __future__ import annotations

from binascii import Error, a2b_base64
from typing import Annotated, Literal

from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.wire.trainer_messages import MAX_WEIGHT_VERSION, NewWeights
from tenuto.serve.sglang.schemas import SGLangObject

MAX_TENSORS = 2**16
_Size = Annotated[int, Field(ge=0, lt=2**40)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]
GroupName = Annotated[str, Field(min_length=1, max_length=256)]
LoadFormat = Annotated[
    Literal["auto", "direct", "flattened_bucket"] | None,
    Field(description="With `flattened_bucket` the tensors come in one. Others are read as tensors by name."),
]


class UpdateRequest(SGLangObject):
    """Other weights for the running model."""

    weight_version: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_WEIGHT_VERSION,
        description="Their version in answers; by default the number of updates.",
    )
    abort_all_requests: bool | None = Field(
        None, description="End open requests; otherwise they continue from their tokens."
    )
    keep_state: bool | None = Field(
        None,
        description="Sessions and their forks go on with the state that earlier weights computed. No other session "
        "finds it. Otherwise all state is computed again.",
    )
    torch_empty_cache: bool | None = Field(None, description="No effect: free memory is always returned.")
    selector: Literal["target", "all"] | None = Field(None, description="No effect: there is one model.")

    @property
    def use(self) -> NewWeights:
        """How the weights are put to use."""
        return NewWeights(
            version=self.weight_version, abort=bool(self.abort_all_requests), keep_state=bool(self.keep_state)
        )


class UpdateFromDiskRequest(UpdateRequest):
    """Weights in files."""

    model_path: str = Field(
        min_length=1, max_length=4096, description="A model of the same shape: a directory, a GGUF file or a hub id."
    )
    flush_cache: bool | None = Field(
        None, description="False is only allowed with `keep_state`, which decides whether earlier state is used."
    )
    load_format: Literal["auto"] | None = None
    is_async: bool | None = Field(None, description="No effect: weights are always read while requests continue.")
    keep_pause: bool | None = Field(None, description="No effect: a pause lasts until it is ended.")
    recapture_cuda_graph: bool | None = Field(None, description="No effect.")
    token_step: int | None = Field(None, description="No effect.")

    @property
    def use(self) -> NewWeights:
        """How the weights are put to use. Raises `InvalidRequest` if state is to stay without `keep_state`."""
        if self.flush_cache is False and not self.keep_state:
            raise InvalidRequest(
                "flush_cache is false; allowed: true, or false with keep_state, which keeps the state of sessions",
                param="flush_cache",
            )
        return super().use


class PartialUpdateRequest(UpdateRequest):
    """Some tensors of the weights."""

    load_format: LoadFormat = None
    flush_cache: bool | None = Field(
        None, description="No effect: state computed with other weights is never used, also between parts of an update."
    )

    @property
    def bucket(self) -> bool:
        """Whether all tensors are sent as one."""
        return self.load_format == "flattened_bucket"


class TensorsRequest(PartialUpdateRequest):
    """Serialized tensors."""

    serialized_named_tensors: list[str] = Field(
        min_length=1,
        max_length=64,
        description="Base64 of a pickle, for each of several devices; the first one is used. Only tensors are read.",
    )

    def pickled(self) -> bytes:
        """Returns the bytes of the pickle. Raises `InvalidRequest`."""
        try:
            return a2b_base64(self.serialized_named_tensors[0], strict_mode=True)
        except (Error, ValueError) as error:
            raise InvalidRequest(
                f"serialized_named_tensors[0] is not base64 ({error}); allowed: base64 of a pickle",
                param="serialized_named_tensors",
            ) from error


class WeightVersionRequest(SGLangObject):
    """A name for the weights in use."""

    new_version: str = Field(min_length=1, max_length=MAX_WEIGHT_VERSION)
    abort_all_requests: bool = True


class GroupRequest(SGLangObject):
    """A group of processes."""

    group_name: GroupName = "weight_update_group"


class InitGroupRequest(GroupRequest):
    """A group to join."""

    master_address: str = Field(min_length=1, max_length=256, description="Where rank 0 listens.")
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1, le=2**16, description="The rank of this server.")
    world_size: int = Field(ge=2, le=2**16, description="The number of processes.")
    backend: Literal["gloo"] = "gloo"


class UpdateFromGroupRequest(GroupRequest, PartialUpdateRequest):
    """Tensors that rank 0 of a group sends."""

    names: list[Name] = Field(min_length=1, max_length=MAX_TENSORS)
    dtypes: list[Annotated[str, Field(max_length=64)]] = Field(min_length=1, max_length=MAX_TENSORS)
    shapes: list[Annotated[list[_Size], Field(max_length=8)]] = Field(min_length=1, max_length=MAX_TENSORS)


class WeightRequest(SGLangObject):
    """A tensor to show."""

    name: Name = Field(description="As in the model's files.")
    truncate_size: int = Field(100, ge=1, le=2**16, description="The most numbers, or rows of a matrix.")
