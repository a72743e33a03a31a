"""The C interface of the native kernels. `interface.h` and `weight_formats.h` describe the fields; a test compares
layouts."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

from tenuto.kernels.native.build import Unavailable


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


class Activation(IntEnum):
    """The activation of a gate, in the order of `models.config.ACTIVATIONS`."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2
    RELU2 = 3


class Matrix(ctypes.Structure):
    """A weight matrix in panels; `format` is a `PanelFormat`."""

    _fields_ = (
        ("format", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("panels", c_int32),
        ("stride", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class Rope(ctypes.Structure):
    """A rotary embedding."""

    _fields_ = (("pairs", c_int32), ("magnitude", c_float), ("frequencies", c_void_p))


class Group(ctypes.Structure):
    """A memory group."""

    _fields_ = (
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("kv_type", c_int32),
        ("conv_tokens", c_int32),
        ("conv_channels", c_int32),
        ("state_floats", c_int32),
    )


class Attention(ctypes.Structure):
    """An attention layer."""

    _fields_ = (
        ("group", c_int32),
        ("layer", c_int32),
        ("heads", c_int32),
        ("rope", c_int32),
        ("gated", c_int32),
        ("scale", c_float),
        ("cap", c_float),
        ("epsilon", c_float),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("sinks", c_void_p),
        ("key_scales", c_void_p),
    )


class Recurrent(ctypes.Structure):
    """A recurrent layer."""

    _fields_ = (
        ("group", c_int32),
        ("layer", c_int32),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("groups", c_int32),
        ("state_size", c_int32),
        ("kernel", c_int32),
        ("conv_column", c_int32),
        ("gate_column", c_int32),
        ("step_column", c_int32),
        ("write_column", c_int32),
        ("norm_groups", c_int32),
        ("gate_first", c_int32),
        ("min_step", c_float),
        ("max_step", c_float),
        ("gate_scale", c_float),
        ("step_scale", c_float),
        ("epsilon", c_float),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("rates", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
    )


class Experts(ctypes.Structure):
    """A mixture of experts."""

    _fields_ = (
        ("count", c_int32),
        ("chosen", c_int32),
        ("normalised", c_int32),
        ("scale", c_float),
        ("correction", c_void_p),
        ("gate", POINTER(Matrix)),
        ("up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
    )


class Op(ctypes.Structure):
    """An operation."""

    _fields_ = (
        ("kind", c_int32),
        ("consumer", c_int32),
        ("activation", c_int32),
        ("apart", c_int32),
        ("column", c_int32),
        ("epsilon", c_float),
        ("scale", c_float),
        ("gate_scale", c_float),
        ("cap", c_float),
        ("norm", c_void_p),
        ("first", Matrix),
        ("second", Matrix),
        ("third", Matrix),
        ("attention", POINTER(Attention)),
        ("recurrent", POINTER(Recurrent)),
        ("experts", POINTER(Experts)),
    )


class Model(ctypes.Structure):
    """The shape of a model."""

    _fields_ = (
        ("hidden", c_int32),
        ("vocab", c_int32),
        ("page_size", c_int32),
        ("groups_count", c_int32),
        ("ropes_count", c_int32),
        ("groups", POINTER(Group)),
        ("ropes", POINTER(Rope)),
    )


class GroupStep(ctypes.Structure):
    """A step's memory in one group."""

    _fields_ = (("table", c_void_p), ("width", c_int64), ("reads", c_void_p), ("writes", c_void_p))


class Step(ctypes.Structure):
    """A step: the arrays of its plan, and of its results."""

    _fields_ = (
        ("rows", c_int32),
        ("tokens_count", c_int32),
        ("outputs_count", c_int32),
        ("row_ids", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("tokens", c_void_p),
        ("groups", POINTER(GroupStep)),
        ("outputs", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("op_seconds", c_void_p),
    )


class SamplingOptions(ctypes.Structure):
    """The sampling options of one token."""

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("uniform", c_double),
        ("top_k", c_int64),
    )


class Draws(ctypes.Structure):
    """The arguments of one call that samples tokens."""

    _fields_ = (
        ("rows", c_int32),
        ("words", c_int32),
        ("logits", c_void_p),
        ("options", c_void_p),
        ("masks", c_void_p),
        ("tokens", c_void_p),
    )


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
        self.prepare = loaded.tenuto_prepare
        self.prepare.argtypes = (c_void_p, POINTER(c_int64))
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
