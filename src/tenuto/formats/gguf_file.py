"""The GGUF container: typed metadata and encoded tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The reader in the
`gguf` package creates an array per vocabulary entry, which takes seconds; this one takes a tenth of a second.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from tenuto.base.errors import ModelError
from tenuto.formats.mapped import Span, mapped

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SIZE = struct.Struct("<Q")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST_DIMENSIONS = 4
_DIGITS = 5
"""Number of digits in the file names of a split model, such as `name-00001-of-00003.gguf`."""
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An encoded tensor and the location of its bytes. `shape` lists the slowest dimension first, so (outputs, inputs)
    for a matrix; the file has the opposite order."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    span: Span


class GgufFile:
    """An open GGUF file, or all files of a split model; `path` is then the first of them. `metadata` is that of the
    first file, with values of type int, float, bool, str or lists of these. `tensors` are those of all files."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` if a file cannot be read, is truncated, or has another format or version, or if files of
        a split model are missing or do not belong together."""
        self.path = path
        first = _One(path)
        self.metadata = first.metadata
        self.tensors = first.tensors
        count = self.metadata.get(_COUNT, 1)
        if count != 1:
            self._add_others(count)

    def _add_others(self, count: object) -> None:
        if type(count) is not int or not 1 < count < 10**_DIGITS:
            raise ModelError(f"{self.path} has {_COUNT} = {count!r}; expected: the number of files of the model")
        if (number := self.metadata.get(_NUMBER, 0)) != 0:
            raise ModelError(f"{self.path} is file {number!r} + 1 of {count} of a model; open the first file")
        match = re.fullmatch(rf"(.*)-(\d{{{_DIGITS}}})-of-(\d{{{_DIGITS}}})\.gguf", self.path.name)
        if match is None or (int(match[2]), int(match[3])) != (1, count):
            expected = f"model-{1:0{_DIGITS}}-of-{count:0{_DIGITS}}.gguf"
            raise ModelError(
                f"{self.path} is the first of {count} files of a model; expected: a name such as {expected}"
            )
        others = [self.path.with_name(f"{match[1]}-{i:0{_DIGITS}}-of-{match[3]}.gguf") for i in range(2, count + 1)]
        if missing := [other.name for other in others if not other.is_file()]:
            raise ModelError(f"{self.path} is the first of {count} files; missing beside it: {', '.join(missing)}")
        for i, other in enumerate(others, 1):
            part = _One(other)
            if (part.metadata.get(_NUMBER), part.metadata.get(_COUNT)) != (i, count):
                raise ModelError(
                    f"{other} is not file {i + 1} of {count} of the model, although its name says so; fetch it again"
                )
            if twice := self.tensors.keys() & part.tensors.keys():
                raise ModelError(f"{other} repeats the tensor {min(twice)!r} of another file; fetch the model again")
            self.tensors |= part.tensors
        expected_tensors = self.metadata.get(_TENSORS, len(self.tensors))
        if expected_tensors != len(self.tensors):
            raise ModelError(
                f"the {count} files of {self.path} have {len(self.tensors)} tensors; expected: {expected_tensors}; "
                "fetch the model again"
            )

    def number(self, key: str, default: float | None = None) -> Any:
        """Returns the number under `key` in the metadata, an int or float as in the file. Raises `ModelError` if the
        value is not a number, or is missing without a `default`."""
        value = self.metadata.get(key, default)
        if type(value) not in (int, float):
            raise ModelError(f"{self.path} has {key} = {value!r}; expected: one number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Like `number`, for an int."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise ModelError(f"{self.path} has {key} = {value!r}; expected: one whole number")
        return value

    def tensor(self, name: str) -> GgufTensor:
        """Returns the tensor `name`. Raises `ModelError` if it is missing."""
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {name!r}; the file is damaged or of an unsupported kind")
        return self.tensors[name]


class _One:
    """The contents of one file; see `GgufFile`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._view = mapped(path).data
            self._at = 0
            self._read()
        except (OSError, ValueError, OverflowError, RecursionError, struct.error, KeyError) as error:
            raise ModelError(f"{path} is not a readable GGUF file ({error}); fetch it again") from error

    def _read(self) -> None:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, entries = self._scalar("I"), self._scalar("Q"), self._scalar("Q")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; supported: {_VERSIONS}")
        for _ in range(entries):
            key = self._string()
            self.metadata[key] = self._value(GGUFValueType(self._scalar("I")))
        headers = [self._tensor_header() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in headers:
            elements, size = GGML_QUANT_SIZES[kind]
            if not shape or 0 in shape or shape[-1] % elements:
                raise ValueError(f"tensor {name!r} of type {kind.name} has shape {shape}")
            count = math.prod(shape) // elements * size
            if start + offset + count > len(self._view):
                raise ValueError(f"it ends within tensor {name!r}")
            self.tensors[name] = GgufTensor(kind, shape, Span(self.path, start + offset, count))

    def _tensor_header(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Reads a tensor's name, type, shape and offset in the data section."""
        name = self._string()
        dimensions = self._scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions; allowed: at most {_MOST_DIMENSIONS}")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, GGMLQuantizationType(self._scalar("I")), shape, self._scalar("Q")

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, count = GGUFValueType(self._scalar("I")), self._scalar("Q")
        if kind in _SCALARS:
            item = np.dtype(_SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self._take(count * item.itemsize), item).tolist()
        if kind is GGUFValueType.STRING:
            return self._strings(count)
        return [self._value(kind) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Reads `count` strings, faster than `count` calls of `_string`; vocabularies are most of the metadata."""
        view, at, size_at, found = self._view, self._at, _SIZE.unpack_from, list[str]()
        for _ in range(count):
            begin = at + _SIZE.size
            at = begin + size_at(view, at)[0]
            found.append(str(view[begin:at], "utf-8"))
        if at > len(view):
            raise ValueError("it ends within its metadata")
        self._at = at
        return found

    def _string(self) -> str:
        return str(self._take(self._scalar("Q")), "utf-8")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._view, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _take(self, count: int) -> memoryview:
        """Returns the next `count` bytes. Raises `ValueError` if there are fewer."""
        taken = self._view[self._at : self._at + count]
        if len(taken) != count:
            raise ValueError("it ends within its metadata")
        self._at += count
        return taken
