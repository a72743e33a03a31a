"""The forward pass with native kernels, on a CPU."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import Array, byref, c_int32, c_int64, c_uint8
from typing import cast

import numpy as np

from tenuto.base.config import EngineOptions
from tenuto.base.errors import ConfigError
from tenuto.base.plan import Bytes, Ints, Plan, StepResult, TableChanges
from tenuto.exec.forward import describe
from tenuto.exec.logits import Longs, Outputs, Singles
from tenuto.exec.nodes import Node, node_of
from tenuto.exec.row_edits import Edits, HostEdits
from tenuto.exec.row_options import RowOptions
from tenuto.kernels.native import library
from tenuto.kernels.native.library import GroupStep, Library, OpKind, Step
from tenuto.kernels.native.sampling import sample, score
from tenuto.kernels.sampling import Choice, Masks
from tenuto.models.adapter import Adapter
from tenuto.models.config import Attention
from tenuto.models.native.low_rank import PackedAdapter, PlacedAdapter
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


class NativeLogits:
    """A `Logits` in an array; the threads of `handle`, an open forward pass of `library`, sample from it."""

    def __init__(self, library: Library, handle: int, values: Singles) -> None:
        self._library, self._handle, self._values = library, handle, values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, outputs: slice) -> NativeLogits:
        return NativeLogits(self._library, self._handle, self._values[outputs])

    def copy(self, outputs: Longs) -> NativeLogits:
        return NativeLogits(self._library, self._handle, self._values[outputs])

    def at(self, outputs: Longs, tokens: Longs) -> Singles:
        return self._values[outputs, tokens]

    def put(self, outputs: Longs, tokens: Longs, values: Singles) -> None:
        self._values[outputs, tokens] = values

    def sample(self, choice: Choice, masks: Masks | None = None) -> Longs:
        return sample(self._library, self._handle, self._values, choice, masks)

    def score(self, tokens: Longs, most: int) -> tuple[Singles, Longs, Singles]:
        return score(self._values, tokens, most)

    def host(self) -> Singles:
        return self._values.copy()


class NativeForward:
    """A `Forward` for any mix of layers that the native kernels support.

    `weight_bytes`: size of the weights in memory. `op_seconds`, float64 [len(OpKind)], is the time all steps so far
    have spent in each kind of operation.

    Invariant: `_model` lives as long as `_handle`, which points into it.
    """

    def __init__(self, library: Library, model: NativeProgram, threads: int) -> None:
        """`threads`: the number of computing threads. Raises `ConfigError` if threads or memory cannot be allocated."""
        self._library, self._model = library, model
        self.config, self.spec, self.key_scales = model.config, model.spec, model.key_scales
        self.weight_bytes = model.weight_bytes
        self.batch_invariant = True
        self.defaults = EngineOptions()
        self.threads = threads
        self._nodes = 0  # among which threads are divided
        self._handle = library.open(byref(model.model), model.ops, len(model.ops), self.threads)
        if not self._handle:
            raise ConfigError(f"{self.threads} threads, or memory for their work, cannot be allocated")
        self._close = weakref.finalize(self, library.close, self._handle)
        self._logits, self._best = self._room_for(16)
        self.op_seconds = np.zeros(len(OpKind))
        self._adapters: dict[int, PlacedAdapter] = {}  # by slot

    def pin(self, nodes: Sequence[Node]) -> bool:
        """Keeps each thread, except for the one that calls `run`, on one of these nodes. Returns whether the system
        allows that; `description` says so then."""
        members = range(1, self.threads)
        kept = all(self._keep(member, node_of(member, self.threads, nodes).cores) for member in members)
        if not kept:
            for member in members:
                self._keep(member, sorted(os.sched_getaffinity(0)))
        self._nodes = len(nodes) if kept else 0
        return kept

    def _keep(self, member: int, cores: Sequence[int]) -> bool:
        failed: int = self._library.pin(self._handle, member, (c_int32 * len(cores))(*cores), len(cores))
        return failed == 0

    @property
    def layout(self) -> str:
        weights = "native, values apart, plain weights" if self._model.plain else "native, values apart"
        if not self._kept_as:
            return weights
        kept = self._model.kv_cache_dtype
        scaled = f", keys scaled by {self.key_scales.digest}" if kept.scaled_keys else ""
        return f"{weights}, {kept.words} but for {sorted(self.key_scales.wide)}{scaled}"

    @property
    def description(self) -> str:
        where = f" on {self._nodes} memory nodes" if self._nodes else ""
        parts = self._library.variant, f"{self.threads} threads{where}", self._kept_as
        return f"native kernels ({', '.join(filter(None, parts))})"

    @property
    def _kept_as(self) -> str:
        """Description of keys and values that are not in 16 bits; "" if all are."""
        words = self._model.kv_cache_dtype.words
        if not words:
            return ""
        wide, layers = len(self.key_scales.wide), sum(isinstance(mixer, Attention) for mixer in self.config.mixers)
        return words + (f", of 16 bits in {wide} of {layers} layers" if wide else "")

    def prepare(self, units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        if self._library.prepare(self._handle, (c_int64 * len(units))(*units), rows, most_kept):
            self._release(len(units))  # some groups may have been allocated
            raise ConfigError(f"this machine cannot hold {describe(units, self.spec, rows * most_kept)}")
        self._units = units
        self._tables = {g: _Table(rows) for g, group in enumerate(self.spec.groups) if group.paged}

    def memory(self, group: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """Returns a view of a group's units, uint8 [units, bytes per unit]. Steps change it."""
        shape = self._units[group], self.spec.groups[group].bytes_per_unit
        start = self._library.memory(self._handle, group)
        return np.ctypeslib.as_array((c_uint8 * (shape[0] * shape[1])).from_address(start)).reshape(shape)

    def apply(self, plan: Plan) -> None:
        for (group, table), changes, copies in zip(self._tables.items(), plan.tables, plan.copies, strict=True):
            table.apply(changes)
            if count := len(copies.sources):
                self._library.copy(self._handle, group, count, _address(copies.sources), _address(copies.targets))

    def run(self, plan: Plan, tokens: Ints, outputs: Ints, *, best_only: bool = False) -> Outputs:
        if len(outputs) > len(self._logits):
            self._logits, self._best = self._room_for(2 * len(outputs))
        asked, vectors = plan.vectors, None
        if asked is not None:
            vectors = np.empty((len(asked.firsts), self.config.hidden), np.float32)
        # taking one array's address is cheaper than taking five
        given = np.concatenate((plan.rows, plan.starts, plan.counts, tokens, outputs))
        rows, at = len(plan.rows), _address(given)
        step = Step(
            rows,
            len(tokens),
            len(outputs),
            len(asked.firsts) if asked is not None else 0,
            at,
            at + 4 * rows,
            at + 8 * rows,
            at + 12 * rows,
            self._group_steps(plan),
            at + 12 * rows + 4 * len(tokens),
            _address(asked.firsts) if asked is not None else None,
            _address(asked.counts) if asked is not None else None,
            None if best_only else self._logits.ctypes.data,
            _address(self._best),
            vectors.ctypes.data if vectors is not None else None,
            self.op_seconds.ctypes.data,
        )
        if plan.adapters is not None:
            given_adapters = self._adapt(step, plan.adapters)  # noqa: F841 - lives until the step is computed
        if plan.samples.max(initial=0) > 1:
            guesses = np.maximum(plan.samples - 1, 0, dtype=np.int32)
            step.guesses = _address(guesses)
        self._step(step, self._model.whole)
        return self._outputs(len(outputs), 0 if best_only else len(outputs), vectors)

    def _step(self, step: Step, ops: range) -> None:
        """Computes some of the program's operations."""
        step.first_op, step.end_op = ops.start, ops.stop
        if self._library.step(self._handle, byref(step)):
            raise MemoryError(f"there is no memory for a step of {step.tokens_count} tokens")

    def _outputs(self, count: int, with_logits: int, vectors: Singles | None = None) -> Outputs:
        """Returns the results of `count` outputs, of which `with_logits` have logits."""
        logits = NativeLogits(self._library, self._handle, self._logits[:with_logits])
        return Outputs(logits, self._best[:count].copy(), vectors)

    def edits(self, rows: int) -> Edits:  # noqa: ARG002 - used by other forward passes
        """See `Forward.edits`."""
        return HostEdits(self.config.vocab)

    def decode(
        self,
        plan: Plan,  # noqa: ARG002 - used by other forward passes
        tokens: Callable[[], Ints],  # noqa: ARG002
        options: RowOptions,  # noqa: ARG002
    ) -> Callable[[], StepResult] | None:
        """See `Forward.decode`; every step is computed by `apply` and `run`."""
        return None

    def remember(self, plan: Plan, following: Ints) -> None:
        sources = np.arange(len(following), dtype=np.int32)
        self._predict((plan.rows, plan.starts, plan.counts, following, sources), 0, self._model.keys)

    def predict(self, rows: Ints, positions: Ints, tokens: Ints, sources: Ints) -> Outputs:
        self._predict((rows, positions, np.ones_like(rows), tokens, sources), len(rows), self._model.head)
        return self._outputs(len(rows), len(rows))

    def _predict(self, arrays: tuple[Ints, Ints, Ints, Ints, Ints], outputs: int, ops: range) -> None:
        """Computes operations of the head for the tokens of rows; the first `outputs` tokens have logits. `arrays`:
        `row_ids`, `starts`, `counts`, `tokens` and `sources` of the step."""
        rows, tokens = len(arrays[0]), len(arrays[3])
        given = np.concatenate((*arrays, np.arange(outputs, dtype=np.int32)))
        at = _address(given)
        step = Step(rows, tokens, outputs, 0, at, at + 4 * rows, at + 8 * rows, at + 12 * rows)
        step.groups = self._pages_of_groups()
        step.sources, step.outputs = at + 12 * rows + 4 * tokens, at + 12 * rows + 8 * tokens
        step.logits, step.best = self._logits.ctypes.data, _address(self._best)
        step.op_seconds = self.op_seconds.ctypes.data
        self._step(step, ops)

    def _adapt(self, step: Step, slots: Ints) -> object:
        """Gives the step its adapters, by the slots of its rows. Returns what must live until it is computed."""
        present = [slot for slot in np.unique(slots).tolist() if slot]
        found = (library.Adapter * len(present))(*(self._adapters[slot].structure() for slot in present))
        places = np.full(slots.max() + 1, -1, np.int32)
        places[present] = np.arange(len(present), dtype=np.int32)
        of_rows = places[slots]
        step.adapters_count, step.adapters, step.adapter_of = len(present), found, _address(of_rows)
        return found, of_rows

    @property
    def packer(self) -> Callable[[Adapter], PackedAdapter]:
        return PackedAdapter

    def set_adapter(self, slot: int, packed: object | None) -> None:
        if packed is None:
            del self._adapters[slot]
        else:
            self._adapters[slot] = PlacedAdapter.of(cast("PackedAdapter", packed), self._model)

    def _group_steps(self, plan: Plan) -> Array[GroupStep]:
        """Returns each group's page table or state moves for a step, as pointers into `plan` and the page tables."""
        states = iter(plan.states)
        made = []
        for group in range(len(self.spec.groups)):
            if table := self._tables.get(group):
                made.append(GroupStep(_address(table.pages), table.pages.shape[1]))
            else:
                moves = next(states)
                arrays = moves.reads, moves.writes, moves.absorbs, moves.keeps
                made.append(GroupStep(None, 0, *map(_address, arrays)))
        return (GroupStep * len(made))(*made)

    def _pages_of_groups(self) -> Array[GroupStep]:
        """Returns the page tables of groups, for operations that need nothing else."""
        tables = (self._tables.get(group) for group in range(len(self.spec.groups)))
        made = [GroupStep(_address(table.pages), table.pages.shape[1]) if table else GroupStep() for table in tables]
        return (GroupStep * len(made))(*made)

    def read_units(self, group: int, units: Ints) -> Bytes:
        copied: Bytes = self.memory(group)[units]
        return copied

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        memory = self.memory(group)
        for unit, copied in zip(units.tolist(), data, strict=True):
            memory[unit] = copied

    def _room_for(self, outputs: int) -> tuple[Singles, Ints]:
        """Allocates arrays for logits and likeliest tokens of `outputs` outputs."""
        return np.empty((outputs, self.config.vocab), np.float32), np.zeros(outputs, np.int32)

    def release_units(self) -> None:
        self._release(len(self._units))
        self._units = (0,) * len(self._units)

    def _release(self, groups: int) -> None:
        self._library.prepare(self._handle, (c_int64 * groups)(), 0, 0)

    def close(self) -> None:
        """Ends the threads and releases the memory."""
        self._close()


_INT32 = np.dtype(np.int32)


def _address(values: Ints) -> int:
    if values.dtype != _INT32 or not values.flags.c_contiguous:
        raise TypeError(
            f"the native kernels need contiguous int32; given: {values.dtype}, contiguous: {values.flags.c_contiguous}"
        )
    return values.ctypes.data
