"""The C interface of the native kernels. Structures have the fields that `interface.h`, `weight_formats.h` and
`sampling.h` declare and describe; a test compares layouts."""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from tenuto.kernels.native.build import SOURCES, Unavailable


class OpKind(IntEnum):
    """The kind of an operation."""

    EMBED = 0
    NORM = 1
    QKV = 2
    ATTEND = 3
    ADD = 4
    GATED = 5
    SELECT = 6
    LOGITS = 7
    POST = 8
    PROJECT = 9
    CONVOLVE = 10
    SCAN = 11
    DELTA = 12
    GATE = 13
    EXPERTS = 14
    KEEP = 15
    JOIN = 16
    NARROW = 17


_HEADERS = "".join((SOURCES / name).read_text("utf-8") for name in ("interface.h", "weight_formats.h", "sampling.h"))
_NUMBERS = {"float": c_float, "double": c_double, "int64_t": c_int64, "int32_t": c_int32, "PanelFormat": c_int32}


def _declared(name: str, *structures: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Returns the fields that the headers declare for the structure `name`, perhaps with the prefix `Tenuto`. Those
    that hold or point to one of `structures` are typed; other pointers are addresses."""
    known = {structure.__name__: structure for structure in structures}
    (body,) = re.findall(rf"^struct (?:Tenuto)?{name} {{$(.*?)^}};$", _HEADERS, re.MULTILINE | re.DOTALL)
    found: list[tuple[str, Any]] = []
    for kind, declared in re.findall(r"^  (?:const )?(?:Tenuto)?(\w+) (.+?);", body, re.MULTILINE):
        for one in declared.split(", "):
            held: Any = known.get(kind) or _NUMBERS.get(kind)
            if "*" in one:
                held = POINTER(held) if kind in known else c_void_p
            found.append((re.findall(r"\w+", one)[-1], held))
    return found


class Matrix(ctypes.Structure):
    """A weight matrix in panels; `format` is a `PanelFormat`."""

    _fields_ = _declared("Matrix")


class Rope(ctypes.Structure):
    """A rotary embedding."""

    _fields_ = _declared("Rope")


class Group(ctypes.Structure):
    """A memory group."""

    _fields_ = _declared("Group")


class Attention(ctypes.Structure):
    """An attention layer."""

    _fields_ = _declared("Attention")


class Recurrent(ctypes.Structure):
    """A recurrent layer."""

    _fields_ = _declared("Recurrent")


class Experts(ctypes.Structure):
    """A mixture of experts."""

    _fields_ = _declared("Experts", Matrix)


class Op(ctypes.Structure):
    """An operation."""

    _fields_ = _declared("Op", Matrix, Attention, Recurrent, Experts)


class Model(ctypes.Structure):
    """The shape of a model."""

    _fields_ = _declared("Model", Group, Rope)


class GroupStep(ctypes.Structure):
    """A step's memory in one group."""

    _fields_ = _declared("GroupStep")


class LowRank(ctypes.Structure):
    """A low-rank change of a matrix."""

    _fields_ = _declared("LowRank")


class Adapter(ctypes.Structure):
    """An adapter: changes of the matrices of operations."""

    _fields_ = _declared("Adapter", LowRank)


class Step(ctypes.Structure):
    """A step: the arrays of its plan, and of its results."""

    _fields_ = _declared("Step", GroupStep, Adapter)


class SamplingOptions(ctypes.Structure):
    """The sampling options of one token."""

    _fields_ = _declared("SamplingOptions")


class Draws(ctypes.Structure):
    """The arguments of one call that samples tokens."""

    _fields_ = _declared("Draws")


class Library:
    """The native kernels, loaded from a compiled library. Calls release the GIL."""

    def __init__(self, path: Path) -> None:
        """Raises `Unavailable` if it cannot be loaded, or if the system does not permit AMX."""
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"{path} cannot be loaded: {error}") from error
        loaded.tenuto_variant.restype = c_char_p
        if loaded.tenuto_permit():
            raise Unavailable("the system does not let this process use AMX")
        self.variant = loaded.tenuto_variant().decode()
        self.open = loaded.tenuto_open
        self.open.argtypes, self.open.restype = (POINTER(Model), POINTER(Op), c_int, c_int), c_void_p
        self.pin = loaded.tenuto_pin
        self.pin.argtypes = (c_void_p, c_int, POINTER(c_int32), c_int)
        self.prepare = loaded.tenuto_prepare
        self.prepare.argtypes = (c_void_p, POINTER(c_int64), c_int, c_int)
        self.copy = loaded.tenuto_copy
        self.copy.argtypes, self.copy.restype = (c_void_p, c_int, c_int, c_void_p, c_void_p), None
        self.memory = loaded.tenuto_memory
        self.memory.argtypes, self.memory.restype = (c_void_p, c_int), c_void_p
        self.step = loaded.tenuto_step
        self.step.argtypes = (c_void_p, POINTER(Step))
        self.sample = loaded.tenuto_sample
        self.sample.argtypes, self.sample.restype = (c_void_p, POINTER(Draws)), None
        self.close = loaded.tenuto_close
        self.close.argtypes, self.close.restype = (c_void_p,), None


@cache
def loaded(path: Path) -> Library:
    """Returns the library at `path`, loaded once per process. Raises what `Library` raises."""
    return Library(path)
