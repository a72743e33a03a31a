"""A forward pass by the native kernels, on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import Array, byref, c_int64, c_uint8

import numpy as np
import torch

from tenuto.base.errors import ConfigError
from tenuto.base.groups import MemorySpec
from tenuto.base.plan import Bytes, Ints, Plan, TableChanges
from tenuto.exec.forward import Longs, Outputs, describe
from tenuto.kernels.native.library import Library, Moves, OpKind, Step
from tenuto.kernels.native.sampling import sample
from tenuto.kernels.sampling import Choice, Masks
from tenuto.models.config import ModelConfig
from tenuto.models.native.program import NativeProgram


class _Table:
    """The page table of one memory group: `pages`, int32 [row ids, pages]."""

    def __init__(self, rows: int) -> None:
        self.pages: np.ndarray[tuple[int, int], np.dtype[np.int32]] = np.zeros((rows, 64), np.int32)

    def apply(self, changes: TableChanges) -> None:
        if not len(changes.rows):
            return
        rows, width = self.pages.shape
        needed = int(changes.index.max()) + 1
        if needed > width:
            wider = np.zeros((rows, max(needed, 2 * width)), np.int32)
            wider[:, :width] = self.pages
            self.pages = wider
        self.pages[changes.rows, changes.index] = changes.pages


class NativeForward:
    """A `Forward` for any mix of layers that the native kernels have operations for.

    `op_seconds`, float64 [len(OpKind)], is how long steps have spent in operations of each kind so far.

    Invariant: `_model` lives as long as `_handle`, which points into it.
    """

    def __init__(self, library: Library, model: NativeProgram, threads: int) -> None:
        """`threads`: how many compute. Raises `ConfigError` if there can be no more, or there is no memory."""
        self._library, self._model = library, model
        self.threads = threads
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
        """The groups that the model's layers form."""
        return self._model.spec

    @property
    def layout(self) -> str:
        return "native, plain weights" if self._model.plain else "native"

    @property
    def description(self) -> str:
        return f"native kernels ({self._library.variant}, {self.threads} threads)"

    @property
    def weight_bytes(self) -> int:
        """Memory taken by the weights, in bytes."""
        return self._model.weight_bytes

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        if self._library.prepare(self._handle, (c_int64 * len(units))(*units)):
            raise ConfigError(f"this machine cannot hold {describe(units, self.spec)}")
        self._units = units
        self._tables = {g: _Table(rows) for g, group in enumerate(self.spec.groups) if group.paged}

    def memory(self, group: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """The units of a group, uint8 [units, bytes a unit]; not a copy. Steps change it."""
        shape = self._units[group], self.spec.groups[group].bytes_per_unit
        start = self._library.memory(self._handle, group)
        return np.ctypeslib.as_array((c_uint8 * (shape[0] * shape[1])).from_address(start)).reshape(shape)

    def apply(self, plan: Plan) -> None:
        for (group, table), changes, copies in zip(self._tables.items(), plan.tables, plan.copies, strict=True):
            table.apply(changes)
            if count := len(copies.sources):
                self._library.copy(self._handle, group, count, _address(copies.sources), _address(copies.targets))

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
            self._moves(plan),
            _address(wanted),
            self._logits.data_ptr(),
            self._best.data_ptr(),
            self.op_seconds.ctypes.data,
        )
        if self._library.step(self._handle, byref(step)):
            raise MemoryError(f"there is no memory for a step of {len(inputs)} tokens")
        return Outputs(self._logits[: len(wanted)], self._best[: len(wanted)].long())

    def _moves(self, plan: Plan) -> Array[Moves]:
        """What a step does in each group; it points into `plan` and the page tables."""
        states = iter(plan.states)
        made = []
        for group in range(len(self.spec.groups)):
            if table := self._tables.get(group):
                made.append(Moves(_address(table.pages), table.pages.shape[1]))
            else:
                moves = next(states)
                made.append(Moves(reads=_address(moves.reads), writes=_address(moves.writes)))
        return (Moves * len(made))(*made)

    def read_units(self, group: int, units: Ints) -> Bytes:
        copied: Bytes = self.memory(group)[units]
        return copied

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        memory = self.memory(group)
        for unit, copied in zip(units.tolist(), data, strict=True):
            memory[unit] = copied

    def sample(self, logits: torch.Tensor, choice: Choice, masks: Masks | None = None) -> torch.Tensor:
        return sample(self._library, self._handle, logits, choice, masks)

    def _room_for(self, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For logits and likeliest tokens after so many tokens."""
        return torch.empty((outputs, self.config.vocab)), torch.zeros(outputs, dtype=torch.int32)

    def close(self) -> None:
        """End its threads and release its memory."""
        self._close()


def _address(values: Ints) -> int:
    if values.dtype != np.int32 or not values.flags.c_contiguous:
        raise TypeError(f"the native kernels are given {values.dtype}, contiguous {values.flags.c_contiguous}")
    return values.ctypes.data
