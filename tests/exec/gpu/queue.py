"""A queue that needs no device: work is done at once. Captured work may not use what a captured graph cannot repeat."""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Done:
    """A mark in a queue that never has work left."""

    def record(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Waits for a device that tests run on."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Watch(TorchDispatchMode):
    """Records the operations of captured work with the addresses of tensors that exist before it, and refuses those
    that wait for the device or read the host's memory, which may be elsewhere the next time."""

    WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "item", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[object, ...]]] = []
        self._made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        assert not any(word in name for word in self.WAITING), f"{name} waits for the device"
        lifted = name.startswith("lift_fresh") and args[0].dim() > 0  # a single number goes with the launch
        assert not lifted, f"{name} copies from the host's memory"
        chosen = args[1] if name.startswith("index.") else ()
        masks = [each for each in chosen if each is not None and each.dtype == torch.bool]
        assert not masks, f"{name} waits for the device to count what a mask chooses"
        flat = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        fixed = tuple(each.data_ptr() for each in flat if each.untyped_storage().data_ptr() not in self._made)
        self.seen.append((name, fixed))
        result = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor) and not any(
                each.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in flat
            ):
                self._made.add(each.untyped_storage().data_ptr())
        return result


def _refused(*_: object) -> None:
    raise AssertionError("from_numpy reads the host's memory")


class Nothing(TorchDispatchMode):
    """Refuses every operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func.__name__} is queued, or allocates")


class HostQueue:
    """See `Queue`. Every run of captured work must do the same operations on the same fixed tensors."""

    def __init__(self) -> None:
        self.captured = 0
        self.runs = 0

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def mark(self) -> Done:
        return Done()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        self.captured += 1

        def watched() -> list[tuple[str, tuple[object, ...]]]:
            with torch.inference_mode(), patch.object(torch, "from_numpy", _refused), Watch() as watch:
                work()
                return watch.seen

        expected = watched()

        def again() -> None:
            self.runs += 1
            assert watched() == expected, "captured work did other operations, or used other tensors"

        return again
