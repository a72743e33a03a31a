"""A queue that needs no device: work is done at once. Captured work may not use what a captured graph cannot repeat."""

import weakref
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

Seen = tuple[str, tuple[object, ...]]
"""An operation or a launch: its name, and what a graph repeats of it."""


class Done:
    """A mark in a queue that never has work left."""

    def record(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Waits for a device that tests run on."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Watch(TorchDispatchMode):
    """Records the operations of captured work: the addresses of tensors that exist before it, the shapes of others, and
    numbers. It refuses operations that wait for the device or read the host's memory, which may be elsewhere the next
    time, and those that allocate memory of the host."""

    WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "item", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self._made: set[int] = set()
        self._results: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        assert not any(word in name for word in self.WAITING), f"{name} waits for the device"
        lifted = name.startswith("lift_fresh") and args[0].dim() > 0  # a single number goes with the launch
        assert not lifted, f"{name} copies from the host's memory"
        assert "pin_memory" not in name, f"{name} allocates memory of the host"
        chosen = args[1] if name.startswith("index.") else ()
        masks = [each for each in chosen if each is not None and each.dtype == torch.bool]
        assert not masks, f"{name} waits for the device to count what a mask chooses"
        given = tree_leaves((args, kwargs))
        flat = [each for each in given if isinstance(each, torch.Tensor)]
        if torch.cuda.is_available():
            paged = [each for each in flat if each.device.type == "cpu" and each.dim() and not each.is_pinned()]
            assert not paged, f"{name} copies from the host's memory"
        self.add(name, given)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not any(
                each.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in flat
            ):
                self._made.add(each.untyped_storage().data_ptr())
                self._results.append(weakref.ref(each))
                self.seen.append((name, tuple(each.shape)))
        return result

    def add(self, name: str, given: Sequence[object]) -> None:
        """Records an operation with its arguments."""
        self.seen.append((name, tuple(map(self._repeated, given))))

    def _repeated(self, given: object) -> object:
        if not isinstance(given, torch.Tensor):
            return given if isinstance(given, int | float | str | bool) else None
        if given.untyped_storage().data_ptr() in self._made:
            return tuple(given.shape)
        return given.data_ptr(), tuple(given.shape)

    @property
    def left(self) -> list[tuple[int, ...]]:
        """The shapes of tensors that outlive the work that made them."""
        return [tuple(each.shape) for ref in self._results if (each := ref()) is not None]


def _refused(*_: object) -> None:
    raise AssertionError("from_numpy reads the host's memory")


def watched(work: Callable[[], object]) -> list[Seen]:
    """Does captured work, and returns its operations and the launches of kernels."""
    with torch.inference_mode(), patch.object(torch, "from_numpy", _refused), Watch() as watch:
        launch = GridExecutor.__call__

        def launched(self: GridExecutor, *args: object, **kwargs: object) -> object:
            watch.add(self.fn.__name__, [*self.grid, *args, *kwargs.values()])
            return launch(self, *args, **kwargs)

        with patch.object(GridExecutor, "__call__", launched):
            work()
    assert not watch.left, f"captured work leaves memory behind that the next one overwrites: {watch.left}"
    return watch.seen


class Nothing(TorchDispatchMode):
    """Refuses every operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func.__name__} is queued, or allocates")


class HostQueue:
    """See `Queue`. Every run of captured work must do the same operations on the same fixed tensors, and launch the
    same kernels with the same numbers."""

    def __init__(self) -> None:
        self.captured = 0
        self.runs = 0

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def mark(self) -> Done:
        return Done()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        self.captured += 1
        expected = watched(work)

        def again() -> None:
            self.runs += 1
            assert watched(work) == expected, "captured work did other operations, or used other tensors"

        return again
