"""The C interface of the native kernels; `forward.cpp` says what each field means."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

from tenuto.kernels.native.build import Unavailable


class OpKind(IntEnum):
    """What an operation does."""

    EMBED = 0
    NORM = 1
    QKV = 2
    ATTEND = 3
    ADD = 4
    GATED = 5
    SELECT = 6
    LOGITS = 7


class PanelKind(IntEnum):
    """How a panel's weights are stored."""

    NIBBLES = 0
    NIBBLES_MIN = 1
    BYTES = 2
    FIVES_MIN = 3
    PAIRS = 4
    SIXES = 5
    FLOAT32 = 6
    FLOAT16 = 7


class Matrix(ctypes.Structure):
    """A weight matrix in panels."""

    _fields_ = (
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("panels", c_int32),
        ("stride", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class Op(ctypes.Structure):
    """One operation."""

    _fields_ = (
        ("kind", c_int32),
        ("layer", c_int32),
        ("reader", c_int32),
        ("epsilon", c_float),
        ("norm", c_void_p),
        ("first", Matrix),
        ("second", Matrix),
        ("third", Matrix),
    )


class Model(ctypes.Structure):
    """The shape of a model."""

    _fields_ = (
        ("hidden", c_int32),
        ("widest", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("layers", c_int32),
        ("vocab", c_int32),
        ("page_size", c_int32),
        ("frequencies", c_void_p),
    )


class Step(ctypes.Structure):
    """A plan's arrays, and where the results go."""

    _fields_ = (
        ("rows", c_int32),
        ("tokens_count", c_int32),
        ("outputs_count", c_int32),
        ("row_ids", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("tokens", c_void_p),
        ("table", c_void_p),
        ("table_width", c_int64),
        ("outputs", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("op_seconds", c_void_p),
    )


class SamplingOptions(ctypes.Structure):
    """How one token is chosen."""

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("uniform", c_double),
        ("top_k", c_int64),
    )


class Draws(ctypes.Structure):
    """Tokens to choose."""

    _fields_ = (("rows", c_int32), ("logits", c_void_p), ("options", c_void_p), ("tokens", c_void_p))


class Library:
    """A loaded library. Calls let other Python threads run."""

    def __init__(self, path: Path) -> None:
        """Raises `Unavailable` if it cannot be loaded, or if the system does not permit what it needs."""
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
        self.prepare = loaded.tenuto_prepare
        self.prepare.argtypes = (c_void_p, c_int64)
        self.copy = loaded.tenuto_copy
        self.copy.argtypes, self.copy.restype = (c_void_p, c_int, c_void_p, c_void_p), None
        self.step = loaded.tenuto_step
        self.step.argtypes = (c_void_p, POINTER(Step))
        self.sample = loaded.tenuto_sample
        self.sample.argtypes, self.sample.restype = (c_void_p, POINTER(Draws)), None
        self.close = loaded.tenuto_close
        self.close.argtypes, self.close.restype = (c_void_p,), None


@cache
def loaded(path: Path) -> Library:
    """The library at `path`, loaded once a process. Raises as `Library`."""
    return Library(path)
