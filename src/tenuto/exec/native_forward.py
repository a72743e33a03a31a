"""A forward pass by the native kernels, on a CPU."""

from __future__ import annotations

import weakref
from ctypes import byref

import numpy as np
import torch

from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.plan import Plan
from tenuto.exec.forward import Longs, Outputs
from tenuto.kernels.native.library import Library, OpKind, Step
from tenuto.kernels.native.pack import LANES
from tenuto.kernels.native.sampling import sample
from tenuto.kernels.sampling import Choice
from tenuto.models.config import ModelConfig
from tenuto.models.native_llama import NativeLlama

BFLOAT16_BYTES = 2


class NativeForward:
    """A `Forward` for models with one full-attention group. Keys and values are bfloat16.

    `op_seconds`, float64 [len(OpKind)], is how long steps have spent in operations of each kind so far.

    Invariant: `_model` lives as long as `_handle`, which points into it.
    """

    def __init__(self, library: Library, model: NativeLlama, threads: int) -> None:
        """`threads`: how many compute. Raises `ConfigError` if there can be no more, or there is no memory."""
        c = model.shape
        self._library, self._model = library, model
        self.threads = threads
        page_size = model.model.page_size
        slots = -(-page_size // LANES) * LANES  # a page is kept in whole blocks of 16 slots
        token_bytes = c.layers * 2 * c.kv_heads * c.head_dim * BFLOAT16_BYTES
        self._spec = MemorySpec(page_size, (GroupSpec(Kind.FULL, slots * token_bytes),))
        self._handle = library.open(byref(model.model), model.ops, len(model.ops), self.threads)
        if not self._handle:
            raise ConfigError(f"there can be no {self.threads} threads, or there is no memory for their work")
        self._close = weakref.finalize(self, library.close, self._handle)
        self._logits, self._best = self._room_for(16)
        self.op_seconds = np.zeros(len(OpKind))

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def spec(self) -> MemorySpec:
        """One group of kind full; a unit is a page of keys and values of all layers."""
        return self._spec

    @property
    def description(self) -> str:
        return f"native kernels ({self._library.variant}, {self.threads} threads)"

    @property
    def weight_bytes(self) -> int:
        """Memory taken by the weights, in bytes."""
        return self._model.weight_bytes

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        (pages,) = units
        if self._library.prepare(self._handle, pages):
            size = pages * self._spec.groups[0].bytes_per_unit
            raise ConfigError(f"this machine cannot hold {pages} pages, {size} bytes")
        # As wide as a turn can ever need, so that it never moves; the system gives memory where it is written.
        self._table = np.zeros((rows, pages), np.int32)

    def apply(self, plan: Plan) -> None:
        (tables,), (copies,) = plan.tables, plan.copies
        self._table[tables.rows, tables.index] = tables.pages
        if len(copies.sources):
            self._library.copy(self._handle, len(copies.sources), _address(copies.sources), _address(copies.targets))

    def run(self, plan: Plan, tokens: torch.Tensor, outputs: Longs) -> Outputs:
        inputs, wanted = tokens.to(torch.int32).numpy(), outputs.astype(np.int32)
        if len(wanted) > len(self._logits):
            self._logits, self._best = self._room_for(2 * len(wanted))
        step = Step(
            len(plan.rows),
            len(inputs),
            len(wanted),
            _address(plan.rows),
            _address(plan.starts),
            _address(plan.counts),
            _address(inputs),
            _address(self._table),
            self._table.shape[1],
            _address(wanted),
            self._logits.data_ptr(),
            self._best.data_ptr(),
            self.op_seconds.ctypes.data,
        )
        if self._library.step(self._handle, byref(step)):
            raise MemoryError(f"there is no memory for a step of {len(inputs)} tokens")
        return Outputs(self._logits[: len(wanted)], self._best[: len(wanted)].long())

    def sample(self, logits: torch.Tensor, choice: Choice) -> torch.Tensor:
        return sample(self._library, self._handle, logits, choice)

    def _room_for(self, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For logits and likeliest tokens after so many tokens."""
        return torch.empty((outputs, self.config.vocab)), torch.zeros(outputs, dtype=torch.int32)

    def close(self) -> None:
        """End its threads and release its memory."""
        self._close()


def _address(values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> int:
    if values.dtype != np.int32 or not values.flags.c_contiguous:
        raise TypeError(f"the native kernels are given {values.dtype}, contiguous {values.flags.c_contiguous}")
    return values.ctypes.data
