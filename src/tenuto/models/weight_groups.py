"""Groups of processes in which a trainer, rank 0, broadcasts new weights to servers, by `torch.distributed`."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tenuto.base.checks import shown
from tenuto.base.child import Child
from tenuto.base.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded
from tenuto.formats.safetensors_file import BITS
from tenuto.formats.tensor_pickle import DTYPES, Bytes, NamedTensor, split

_SO = "the weights are as before, and the group is gone"
UNSENT = 0xFF
"""The last byte of a tensor until the trainer has sent it. No finite weight below 1e38 ends with it, in any type."""


@dataclass(frozen=True, slots=True)
class Joining:
    """The first message: a group of `size` processes, to be joined."""

    name: str
    address: str
    port: int
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Announced:
    """A later message: a tensor that the trainer broadcasts. `dtype` is PyTorch's name."""

    dtype: str
    shape: Sequence[int]


class WeightGroups:
    """The groups that this process has joined, by name. Calls wait for the trainer. Only one thread may make them, but
    for `kill`."""

    def __init__(self) -> None:
        self._groups: dict[str, _Receiver] = {}

    def join(self, name: str, address: str, port: int, rank: int, size: int) -> None:
        """Joins a group of `size` processes and waits for the others. Raises `AlreadyExists` if it is one of ours, and
        `Overloaded` if they do not come."""
        if name in self._groups:
            raise AlreadyExists(f"the group {shown(name)} exists; destroy it first", param="group_name")
        receiver = self._groups[name] = _Receiver()
        try:
            receiver.ask(Joining(name, address, port, rank, size))
        except OSError as error:
            self.leave(name)
            raise Overloaded(f"the group {shown(name)} at {address}:{port} did not form: {error}; {_SO}") from error

    def leave(self, name: str) -> None:
        """Leaves a group. Raises `NotFound`."""
        self._group(name).close()
        del self._groups[name]

    def receive(
        self, name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, bucket: bool
    ) -> dict[str, NamedTensor]:
        """Returns the tensors that the trainer broadcasts, in this order, or with `bucket` all in one. Raises
        `NotFound`, `InvalidRequest`, or `Overloaded` if one does not come. After either of the last two the group is
        left, because what its trainer sends next may still belong to this request."""
        receiver = self._group(name)
        try:
            return receiver.tensors(names, dtypes, shapes, bucket=bucket)
        except InvalidRequest as error:
            self.leave(name)
            raise InvalidRequest(f"{error.message}; {_SO}", param=error.param) from error
        except OSError as error:
            self.leave(name)
            raise Overloaded(f"the trainer of group {shown(name)} did not send all tensors: {error}; {_SO}") from error

    def kill(self) -> None:
        """Ends waits for trainers with an error. Any thread may call this."""
        for receiver in list(self._groups.values()):
            receiver.kill()

    def close(self) -> None:
        """Leaves all groups."""
        for name in list(self._groups):
            self.leave(name)

    def _group(self, name: str) -> _Receiver:
        if name not in self._groups:
            raise NotFound(
                f"there is no group {shown(name)}; call /init_weights_update_group first", param="group_name"
            )
        return self._groups[name]


class _Receiver:
    """A process that is a member of a group; see `weight_receiver`. Methods raise `OSError`, with what failed."""

    def __init__(self) -> None:
        self._process = Child("tenuto.models.weight_receiver")

    def ask(self, message: Joining | Announced) -> None:
        """Sends a message, and waits until what it asks for is done."""
        try:
            self._process.send(message)
            failed = self._process.answer()
        except (OSError, EOFError) as error:
            raise OSError(self._ended()) from error
        if failed:
            raise OSError(failed)

    def tensors(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, bucket: bool
    ) -> dict[str, NamedTensor]:
        """See `WeightGroups.receive`."""
        kinds = [_dtype(dtype) for dtype in dtypes]
        if not len(names) == len(kinds) == len(shapes) or not names:
            raise InvalidRequest(
                "there are different numbers of names, dtypes and shapes, or none; allowed: one of each"
            )
        sizes = [math.prod(shape) * BITS[kind] // 8 for shape, kind in zip(shapes, kinds, strict=True)]
        if bucket:
            flat = self._received("uint8", [sum(sizes)], sum(sizes))
            starts = [int(start) for start in np.cumsum([0, *sizes])[:-1]]
            return dict(split(flat, list(zip(names, kinds, shapes, starts, strict=True))))
        found = {}
        for name, dtype, kind, shape, size in zip(names, dtypes, kinds, shapes, sizes, strict=True):
            found[name] = NamedTensor(kind, tuple(shape), self._received(dtype, shape, size))
        return found

    def _received(self, dtype: str, shape: Sequence[int], size: int) -> Bytes:
        """Returns the `size` bytes of the next tensor."""
        self.ask(Announced(dtype.removeprefix("torch."), shape))
        data = np.frombuffer(self._process.read(size), np.uint8)
        if len(data) != size:
            raise OSError(self._ended())
        if size and data[-1] == UNSENT:
            raise InvalidRequest(f"the trainer has sent fewer bytes than {dtype} of shape {list(shape)} takes")
        return data

    def _ended(self) -> str:
        status = self._process.status()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        return f"its member here {how}, as when the trainer sends more bytes than dtypes and shapes in the request say"

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def _dtype(name: str) -> str:
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise InvalidRequest(f"a dtype is {shown(name)}; allowed: {', '.join(DTYPES)}", param="dtypes")
    return found
