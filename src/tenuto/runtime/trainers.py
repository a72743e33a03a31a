"""Requests of training loops: a running engine gives memory back and computes with other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tenuto.base.wire.request import Request
from tenuto.base.wire.trainer_messages import (
    GetWeight,
    JoinGroup,
    LeaveGroup,
    LoadAdapter,
    ReceiveTensors,
    ReleaseMemory,
    ResumeMemory,
    UpdateTensors,
    UpdateWeights,
)
from tenuto.formats.tensor_pickle import NamedTensor, read_tensors
from tenuto.runtime.lanes import Lanes
from tenuto.runtime.loaded_model import LoadedModel

if TYPE_CHECKING:
    from tenuto.models.weight_groups import WeightGroups

T = TypeVar("T")

OfWeights = ReleaseMemory | ResumeMemory | UpdateWeights
OfTrainers = OfWeights | UpdateTensors | ReceiveTensors | GetWeight | JoinGroup | LeaveGroup | LoadAdapter
"""Requests that `Trainers` takes."""


class AnswerWith(Protocol):
    """Answers a request with the result or the error of `work`."""

    def __call__(self, request: Request[T], work: Callable[[], T], /) -> None: ...


class Trainers:
    """Works on memory and weights in the lane for files. Waits for trainers in a lane of their own, so that they delay
    nothing else."""

    def __init__(
        self,
        loaded: LoadedModel,
        lanes: Lanes,
        answer: AnswerWith,
        move_memory: Callable[[Request[Any], Callable[[], Any]], None],
    ) -> None:
        """`move_memory`: like `answer`, for work that replaces weights."""
        self._loaded = loaded
        self._lanes = lanes
        self._answer = answer
        self._move_memory = move_memory
        self._joined: WeightGroups | None = None  # set by the lane that waits

    def take(self, request: OfTrainers) -> None:
        """Answers a request, now or later."""
        match request:
            case ReleaseMemory() | ResumeMemory() | UpdateWeights():
                self._move(request, partial(self._loaded.execute, request))
            case UpdateTensors():
                self._replace(request, lambda: read_tensors(request.pickled, flattened=request.bucket))
            case GetWeight():
                self._lanes.files.put(0, partial(self._answer, request, partial(self._loaded.weight, request)))
            case LoadAdapter():
                self._lanes.files.put(0, partial(self._answer, request, partial(self._loaded.load_adapter, request)))
            case JoinGroup():
                self._wait(
                    request,
                    lambda: self._groups.join(request.group, request.address, request.port, request.rank, request.size),
                )
            case LeaveGroup():
                self._wait(request, lambda: self._groups.leave(request.group))
            case ReceiveTensors():
                self._lanes.trainers.put(0, partial(self._receive, request))

    def close(self) -> None:
        """Ends waits for trainers and leaves their groups."""
        if (groups := self._joined) is not None:
            groups.kill()
            self._lanes.trainers.put(0, groups.close)

    @property
    def _groups(self) -> WeightGroups:
        if self._joined is None:
            from tenuto.models.weight_groups import WeightGroups  # noqa: PLC0415 - rarely needed

            self._joined = WeightGroups()
        return self._joined

    def _wait(self, request: Request[None], work: Callable[[], None]) -> None:
        self._lanes.trainers.put(0, partial(self._answer, request, work))

    def _receive(self, request: ReceiveTensors) -> None:
        """Receives tensors, and has them put to use."""
        try:
            tensors = self._groups.receive(
                request.group, request.names, request.dtypes, request.shapes, bucket=request.bucket
            )
        except Exception as error:  # noqa: BLE001 - every error is answered
            self._answer(request, partial(_raise, error))
        else:
            self._replace(request, lambda: tensors)

    def _replace(
        self, request: UpdateTensors | ReceiveTensors, tensors: Callable[[], Mapping[str, NamedTensor]]
    ) -> None:
        self._move(request, lambda: self._loaded.replace(tensors(), request.use))

    def _move(self, request: Request[T], work: Callable[[], T]) -> None:
        self._lanes.files.put(0, partial(self._move_memory, request, work))


def _raise(error: Exception) -> Any:
    raise error
