"""Tensors that PyTorch pickled, read without PyTorch and without running anything that the pickle names.

Trainers send weights as SGLang's `MultiprocessingSerializer` writes them: a pickle of [(name, tensor)], or of a bucket
of tensors in one (`flattened_bucket`). The functions and classes that such a pickle may name are listed here, and stand
for our own readers; any other name is an error. Layouts: `torch/_utils.py`, `torch/multiprocessing/reductions.py` and
the older format of `torch/serialization.py`.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tenuto.base.checks import shown
from tenuto.base.errors import InvalidRequest
from tenuto.formats.mapped import mapped
from tenuto.formats.safetensors_file import BITS

Bytes = npt.NDArray[np.uint8]

DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64",
    "double": "F64", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""PyTorch's names of types, and those in safetensors files."""
_STORAGES = {
    "BFloat16Storage": "BF16", "HalfStorage": "F16", "FloatStorage": "F32", "DoubleStorage": "F64", "ByteStorage": "U8",
    "CharStorage": "I8", "ShortStorage": "I16", "IntStorage": "I32", "LongStorage": "I64", "BoolStorage": "BOOL",
}  # fmt: skip
_SHARED = re.compile(rb"/torch_[0-9A-Za-z_]+")
_SHARED_HEADER = 64
"""Bytes before the elements in memory shared by name: PyTorch counts its users there."""
_NAMES = "collections, torch._utils, torch.multiprocessing.reductions and SGLang's buckets"


class NamedTensor:
    """A tensor in memory. `dtype` is a key of `BITS`; `data` are its little-endian bytes in order, uint8 [bytes]."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data


def read_tensors(data: bytes, *, flattened: bool) -> dict[str, NamedTensor]:
    """Returns the tensors in a pickle by name. `flattened`: it is a bucket. Raises `InvalidRequest` if it has another
    form, names anything but tensors, or refers to memory that cannot be opened here."""
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        return dict(_checked(_of_bucket(found) if flattened else [(name, _whole(value)) for name, value in found]))
    except InvalidRequest:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        form = "a bucket" if flattened else "pairs of names and tensors"
        raise InvalidRequest(
            f"the serialized tensors cannot be read: {shown(str(error) or repr(error))}; allowed: a pickle of {form}",
            param="serialized_named_tensors",
        ) from error


def _checked(pairs: list[Any]) -> list[tuple[str, NamedTensor]]:
    if not pairs or any(type(name) is not str or not isinstance(each, NamedTensor) for name, each in pairs):
        raise ValueError("it is not a list of names and tensors")
    return pairs


def split(flat: Bytes, described: Sequence[tuple[str, str, Sequence[int], int]]) -> list[tuple[str, NamedTensor]]:
    """Returns the tensors of a bucket: names, types and shapes, and the byte at which each begins. Raises `ValueError`
    if one is not within it."""
    made = []
    for name, dtype, shape, first in described:
        size = math.prod(shape) * BITS[dtype] // 8
        if first < 0 or min(shape, default=1) < 0 or first + size > len(flat):
            raise ValueError(f"tensor {name!r} is not within its bucket of {len(flat)} bytes")
        made.append((name, NamedTensor(dtype, tuple(shape), flat[first : first + size])))
    return made


def _of_bucket(found: Any) -> list[tuple[str, NamedTensor]]:
    """Returns the tensors of a dictionary or object with one tensor of all bytes and a description of its parts."""
    fields = found if isinstance(found, dict) else vars(found)
    flat, parts = fields["flattened_tensor"], [vars(part) for part in fields["metadata"]]
    return split(flat.data, [(p["name"], p["dtype"].name, tuple(p["shape"]), int(p["start_idx"])) for p in parts])


def _whole(value: Any) -> Any:
    """Returns a tensor, which may be serialized once more for each of several devices; the first one is ours."""
    if isinstance(value, _Plain):
        return _Unpickler(io.BytesIO(vars(value)["values"][0])).load()
    return value


class _Plain:
    """An object of which only the attributes matter."""


class _Handle(_Plain):
    """A file descriptor of another process."""


@dataclass(frozen=True, slots=True)
class _Type:
    """A type of elements."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """Elements of tensors. `dtype` is "" while it is not known."""

    data: Bytes
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class _Function:
    """A function that a pickle may call. It is frozen because a pickle may also set attributes."""

    call: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)


def _tensor(storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> NamedTensor:
    """Returns elements `offset` + indices * `strides` of a storage."""
    if len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
        raise ValueError(f"a tensor has the shape {shape}, the strides {strides} and the offset {offset}")
    elements = storage.data.view(np.dtype(f"V{BITS[dtype] // 8}"))
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= len(elements):
        raise ValueError(f"a tensor of shape {shape} ends after its {len(elements)} elements")
    if not math.prod(shape):
        return NamedTensor(dtype, tuple(shape), np.zeros(0, np.uint8))
    size = elements.itemsize
    view = np.lib.stride_tricks.as_strided(elements[offset:], tuple(shape), [step * size for step in strides])
    return NamedTensor(dtype, tuple(shape), np.ascontiguousarray(view).reshape(-1).view(np.uint8))


def _of_shared(_cls: Any, storage: _Storage, about: tuple[Any, ...]) -> NamedTensor:
    return _tensor(storage, about[0], about[1], about[2], storage.dtype)


def _of_storage(storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> NamedTensor:
    return _tensor(storage, offset, shape, strides, storage.dtype)


def _of_bytes(
    storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], _grad: Any, _hooks: Any, dtype: _Type,
    *_: Any,
) -> NamedTensor:  # fmt: skip
    return _tensor(storage, offset, shape, strides, dtype.name)


def _shared(_cls: Any, _manager: Any, name: bytes, size: int, *_: Any) -> _Storage:
    """Opens memory that another process of this machine shares by name."""
    if type(name) is not bytes or not _SHARED.fullmatch(name):
        raise _unopened("in shared memory without a name of PyTorch's")
    try:
        return _Storage(mapped(Path("/dev/shm") / name[1:].decode(), _SHARED_HEADER, size).copy())  # noqa: S108 - theirs
    except (OSError, ValueError, TypeError) as error:
        raise _unopened(f"in shared memory that cannot be opened here ({error})") from error


def _unopened(where: str) -> InvalidRequest:
    return InvalidRequest(
        f"a tensor is {where}; allowed: the bytes of tensors on the CPU (pickle.dumps), or memory shared by name with "
        'this machine (torch.multiprocessing.set_sharing_strategy("file_system"))',
        param="serialized_named_tensors",
    )


def _by_descriptor(*_: Any) -> NoReturn:
    raise _unopened("shared by a file descriptor, which only children of its process can open")


def _on_device(*_: Any) -> NoReturn:
    raise _unopened("a handle of memory on another device")


def _loaded(data: bytes) -> _Storage:
    """Reads a storage in the older format of `torch.save`: pickles of two numbers, facts about the machine, the storage
    and its key, then the number of elements and these."""
    file = io.BytesIO(data)
    for _ in range(3):
        _Unpickler(file).load()
    dtype, key, count = _StorageUnpickler(file).load()
    if _Unpickler(file).load() != [key] or int.from_bytes(file.read(8), "little") != count:
        raise ValueError("a storage does not have the elements it describes")
    size = count * BITS[dtype] // 8
    elements = np.frombuffer(file.read(size), np.uint8)
    if len(elements) != size:
        raise ValueError(f"a storage of {size} bytes has {len(elements)}")
    return _Storage(elements, dtype)


_PARTS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_of_storage),
    ("torch._utils", "_rebuild_tensor_v3"): _Function(_of_bytes),
    ("torch._utils", "_rebuild_parameter"): _Function(lambda tensor, *_: tensor),
    ("torch.storage", "_load_from_bytes"): _Function(_loaded),
    ("torch.multiprocessing.reductions", "rebuild_tensor"): _Function(_of_shared),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): _Function(
        lambda storage, dtype: _Storage(storage.data, dtype.name)
    ),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): _Function(_shared),
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"): _Function(
        lambda *_: _Storage(np.zeros(0, np.uint8))
    ),
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"): _Function(_by_descriptor),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _Function(_on_device),
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _Function(_on_device),
    ("torch", "Size"): _Function(tuple),
    ("torch", "Tensor"): None,
    ("torch.nn.parameter", "Parameter"): None,
    ("torch.storage", "UntypedStorage"): None,
    ("torch", "UntypedStorage"): None,
    **{("torch", name): _Type(dtype) for name, dtype in DTYPES.items()},
    **{("torch", name): _Type(dtype) for name, dtype in _STORAGES.items()},
}
_OBJECTS: dict[tuple[str, str], type[_Plain]] = {
    ("multiprocessing.resource_sharer", "DupFd"): _Handle,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): _Plain,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorBucket"): _Plain,
    ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"): _Plain,
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "LocalSerializedTensor"): _Plain,
}


class _Unpickler(pickle.Unpickler):
    """Knows only the names above."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns our reader for a name. Raises `InvalidRequest` for any other."""
        if (kind := _OBJECTS.get((module, name))) is not None:
            return type(kind.__name__, (kind,), {})  # a new class, because a pickle may set attributes
        if (module, name) in _PARTS:
            return _PARTS[module, name]
        raise InvalidRequest(
            f"the serialized tensors name {shown(f'{module}.{name}')}; allowed: tensors alone, by names of {_NAMES}",
            param="serialized_named_tensors",
        )


class _StorageUnpickler(_Unpickler):
    """Reads the description of a storage."""

    def persistent_load(self, described: Any) -> tuple[str, str, int]:
        """Returns the type, the key and the number of elements of a storage on the CPU."""
        _, kind, key, location, count, *_ = described
        if location != "cpu":
            raise _unopened(f"on {shown(location)}")
        return kind.name, key, int(count)
