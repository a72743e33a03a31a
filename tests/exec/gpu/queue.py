"""A queue that needs no device: work is done at once. Captured work may not use what a captured graph cannot repeat."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

Seen = tuple[str, tuple[object, ...]]
"""An operation or a launch: its name, and what a graph repeats of it."""


_wait = torch.cuda.synchronize


class Done:
    """A mark in a queue that never has work left."""

    def record(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Waits for a device that tests run on."""
        if torch.cuda.is_available():
            _wait()


class Watch(TorchDispatchMode):
    """Records the operations of captured work: the addresses of tensors that exist before it, the shapes of others, and
    numbers. It refuses operations that wait for the device or read the host's memory, which may be elsewhere the next
    time, and those that allocate memory of the host.

    Without a GPU all tensors are on the host, so that memory of the host is known by how it is used: captured work
    copies only what it has computed itself, or what `pinned` gave, and names no device."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "argwhere",
        "unique",
        "masked_select",
        "masked_scatter",
        "bincount",
        "item",
        "is_nonzero",
        "equal",
        "allclose",
    )
    CHOSEN = ("index.", "index_put", "_index_put_impl")

    def __init__(self, pinned: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._pinned = {each.untyped_storage().data_ptr() for each in pinned}
        self.seen: list[Seen] = []
        self._made: set[int] = set()
        self._results: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__, kwargs or {}
        self._refuse_moves(name, args, kwargs)
        with self:  # operations made of others, which inference mode hands over whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        assert not any(word in name for word in self.WAITING), f"{name} waits for the device"
        counted = name.startswith("repeat_interleave") and kwargs.get("output_size") is None
        assert not counted, f"{name} waits for the device to count its results"
        lifted = name.startswith("lift_fresh") and args[0].dim() > 0  # a single number goes with the launch
        assert not lifted, f"{name} copies from the host's memory"
        assert "pin_memory" not in name, f"{name} allocates memory of the host"
        chosen = args[1] if name.startswith(self.CHOSEN) else ()
        masks = [each for each in chosen if each is not None and each.dtype in (torch.bool, torch.uint8)]
        assert not masks, f"{name} waits for the device to count what a mask chooses"
        given = tree_leaves((args, kwargs))
        flat = [each for each in given if isinstance(each, torch.Tensor)]
        if torch.cuda.is_available():
            paged = [each for each in flat if each.device.type == "cpu" and each.dim() and not each.is_pinned()]
            assert not paged, f"{name} copies from the host's memory"
        self.add(name, given)
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not any(
                each.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in flat
            ):
                self._made.add(each.untyped_storage().data_ptr())
                self._results.append(weakref.ref(each))
                self.seen.append((name, tuple(each.shape)))
        return result

    def _refuse_moves(self, name: str, args: Sequence[object], kwargs: dict[str, object]) -> None:
        """Refuses to copy a tensor that exists before the work: it may be memory of the host. Tensors that are just
        converted stay where they are, and so name no device."""
        if name.startswith(("to.", "_to_copy.")):
            named = [each for each in (*args[1:], kwargs.get("device")) if isinstance(each, torch.device)]
            assert not named, f"{name} copies from the host's memory or to it"
        if name.startswith(("copy_.", "copy.")):
            source = args[1]
            assert isinstance(source, torch.Tensor)
            known = source.untyped_storage().data_ptr() in self._made | self._pinned or source.dim() == 0
            assert known, f"{name} copies from the host's memory, perhaps"

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


_READING = {
    torch: ("from_numpy", "frombuffer", "as_tensor", "asarray"),
    torch.Tensor: ("numpy", "tolist", "cpu", "cuda", "__array__", "__dlpack__"),
    torch.cuda: ("synchronize",),
}
"""Functions that read or write memory of the host, or wait, without an operation that a mode sees."""


@contextmanager
def host_left_alone() -> Iterator[None]:
    """Within the block, functions that read or write memory of the host, or wait, are refused."""

    def refused(name: str) -> Callable[..., None]:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError(f"{name} reads the host's memory, or waits for the device")

        return refuse

    with ExitStack() as stack:
        for owner, names in _READING.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, refused(name)))
        yield


def watched(work: Callable[[], object], pinned: Sequence[torch.Tensor] = ()) -> list[Seen]:
    """Does captured work, and returns its operations and the launches of kernels. It may read `pinned` memory."""
    with torch.inference_mode(), host_left_alone(), Watch(pinned) as watch:
        launch = GridExecutor.__call__

        def launched(self: GridExecutor, *args: object, **kwargs: object) -> object:
            watch.add(self.fn.__name__, [*self.grid, *args, *kwargs.values()])
            with _disable_current_modes():
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
    same kernels with the same numbers. While it is `idle`, captured work is not done."""

    def __init__(self) -> None:
        self.captured = 0
        self.runs = 0
        self.idle = False
        self._pinned: list[torch.Tensor] = []

    def pinned(self, size: int) -> torch.Tensor:
        self._pinned.append(torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        return self._pinned[-1]

    def mark(self) -> Done:
        return Done()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        self.captured += 1
        expected = watched(work, self._pinned)

        def again() -> None:
            self.runs += 1
            if not self.idle:
                assert watched(work, self._pinned) == expected, (
                    "captured work did other operations, or used other tensors"
                )

        return again
