"""Groups of processes in which a trainer, rank 0, broadcasts new weights to servers, by `torch.distributed`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import numpy as np

from tenuto.base.checks import shown
from tenuto.base.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded
from tenuto.formats.tensor_pickle import DTYPES, NamedTensor, split

WAIT = timedelta(seconds=300)
"""Time for the other processes of a group to join, or for the trainer to send a tensor."""
BACKEND = "gloo"
"""The only backend, because weights are received on the CPU."""


class WeightGroups:
    """The groups that this process has joined, by name. Calls wait for the trainer; only one thread may make them."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def join(self, name: str, address: str, port: int, rank: int, size: int) -> None:
        """Joins a group of `size` processes and waits for the others. Raises `AlreadyExists` if it is one of ours, and
        `Overloaded` if they do not come."""
        if name in self._groups:
            raise AlreadyExists(f"the group {shown(name)} exists; destroy it first", param="group_name")
        c10d: Any = import_module("torch.distributed.distributed_c10d")  # slow, and rarely needed
        try:
            store, _, _ = next(c10d.rendezvous(f"tcp://{address}:{port}", rank, size, timeout=WAIT))
            store.set_timeout(WAIT)
            # As trainers make their side, beside the default group: this function is private, but the names that it
            # gives keys in the store are what both sides have to agree on.
            group, _ = c10d._new_process_group_helper(  # noqa: SLF001 - see above
                size, rank, [], c10d.Backend(BACKEND), c10d.PrefixStore(name, store), group_name=name, timeout=WAIT
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise _failed(f"the group {shown(name)} at {address}:{port} did not form", error) from error
        c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}  # noqa: SLF001 - see above
        self._groups[name] = group

    def leave(self, name: str) -> None:
        """Leaves a group. Raises `NotFound`."""
        from torch import distributed  # noqa: PLC0415 - slow, and rarely needed

        with suppress(RuntimeError):  # others may have left it already
            distributed.destroy_process_group(self._group(name))
        del self._groups[name]

    def receive(
        self, name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, bucket: bool
    ) -> dict[str, NamedTensor]:
        """Returns the tensors that the trainer broadcasts, in this order, or with `bucket` all in one. Raises
        `InvalidRequest`, `NotFound`, or `Overloaded` if one does not come; the group is then left."""
        kinds = [_dtype(dtype) for dtype in dtypes]
        if not len(names) == len(kinds) == len(shapes) or not names:
            raise InvalidRequest(
                "there are different numbers of names, dtypes and shapes, or none; allowed: one of each"
            )
        group = self._group(name)
        import torch  # noqa: PLC0415 - slow, and rarely needed
        from torch import distributed  # noqa: PLC0415 - slow, and rarely needed

        def received(shape: Sequence[int], dtype: Any) -> Any:
            tensor = torch.empty(tuple(shape), dtype=dtype)
            distributed.broadcast(tensor, 0, group)
            return tensor.reshape(-1).view(torch.uint8).numpy()

        types = [getattr(torch, dtype.removeprefix("torch.")) for dtype in dtypes]
        try:
            if not bucket:
                tensors = [received(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
                return {
                    each: NamedTensor(kind, tuple(shape), data)
                    for each, kind, shape, data in zip(names, kinds, shapes, tensors, strict=True)
                }
            sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types, strict=True)]
            flat = received([sum(sizes)], torch.uint8)
        except (RuntimeError, ValueError) as error:
            self.leave(name)
            raise _failed(f"the trainer of group {shown(name)} did not send all tensors", error) from error
        starts = [int(start) for start in np.cumsum([0, *sizes])[:-1]]
        return dict(split(flat, list(zip(names, kinds, shapes, starts, strict=True))))

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            raise NotFound(
                f"there is no group {shown(name)}; call /init_weights_update_group first", param="group_name"
            )
        return self._groups[name]


def _dtype(name: str) -> str:
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise InvalidRequest(f"a dtype is {shown(name)}; allowed: {', '.join(DTYPES)}", param="dtypes")
    return found


def _failed(what: str, error: Exception) -> Overloaded:
    return Overloaded(f"{what}: {str(error).splitlines()[0][:300]}; the weights are as before, and the group is gone")
