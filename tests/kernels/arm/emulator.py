"""Kernels of another CPU: `build.library` compiles them with a cross compiler, and they run in an emulated process.

Arguments are copied to that process, with everything that they point to; `interface.h` says how much that is. Results
are copied back.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from tenuto.kernels.elements import Element, KVCacheDtype
from tenuto.kernels.native import library
from tenuto.kernels.native.build import VARIANTS, Machine

CALLS = Path(__file__).parent / "calls.cpp"
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64")
SYSTEM = "/usr/aarch64-linux-gnu"
"""Where the emulated process finds the C and C++ libraries."""
ARM = Machine(frozenset({"asimd", "asimddp", "i8mm", "bf16"}), COMPILER)
NEON = [name for name in VARIANTS if name.startswith("neon")]
MATRICES = ("first", "second", "third")
needs_emulator = pytest.mark.skipif(
    not (COMPILER and EMULATOR), reason="there is no aarch64-linux-gnu-g++ or no qemu-aarch64"
)


class Process:
    """An emulated process that calls the library at `path`."""

    def __init__(self, path: Path, *options: str) -> None:
        """`options` are more of the emulator's."""
        digest = hashlib.sha256(CALLS.read_bytes()).hexdigest()[:20]
        program = path.parent / f"calls-{digest}"
        if not program.exists():
            made = program.with_suffix(f".{os.getpid()}")
            subprocess.run([str(COMPILER), "-O2", "-pthread", "-o", str(made), str(CALLS), "-ldl"], check=True)
            made.replace(program)
        command = [str(EMULATOR), *options, "-L", SYSTEM, str(program), str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._of: IO[bytes] = self._process.stdout
        self._held: list[int] = []

    def ask(self, letter: str, *given: int | None, data: bytes = b"") -> int:
        """Makes a request of `calls.cpp` and returns the answer."""
        self._send(letter, *given, data=data)
        return int(struct.unpack("q", self._of.read(8))[0])

    def put(self, address: int | None, size: int) -> int | None:
        """Copies the bytes at an address of this process. Returns their address in the emulated one; None stays."""
        if not address:
            return None
        there = self.ask("a", size)
        self.ask("w", there, size, data=ctypes.string_at(address, size))
        self._held.append(there)
        return there

    def put_all(self, values: ctypes.Structure | ctypes.Array[Any]) -> int | None:
        return self.put(ctypes.addressof(values), ctypes.sizeof(values))

    def take(self, there: int | None, address: int | None, size: int) -> None:
        """Copies bytes of the emulated process to an address of this one, unless that is None."""
        if address:
            self._send("r", there, size)
            ctypes.memmove(address, self._of.read(size), size)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Copies that are made within the block last until its end."""
        kept, self._held = self._held, []
        try:
            yield
            self.free(self._held)
        finally:
            self._held = kept

    @contextmanager
    def lasting(self) -> Iterator[list[int]]:
        """Copies that are made within the block are added to the list, and last until they are freed."""
        kept, self._held = self._held, []
        try:
            yield self._held
        finally:
            self._held = kept

    def free(self, held: list[int]) -> None:
        for there in held:
            self.ask("f", there)

    @property
    def ended(self) -> bool:
        return self._to.closed

    def end(self) -> None:
        with suppress(BrokenPipeError):  # the process may have ended by itself
            self._to.close()
        self._of.close()
        self._process.wait()

    def _send(self, letter: str, *given: int | None, data: bytes = b"") -> None:
        self._to.write(struct.pack("7q", ord(letter), *(x or 0 for x in given), *[0] * (6 - len(given))) + data)
        self._to.flush()


@dataclass(slots=True)
class _Opened:
    """An open forward pass. `held`: addresses, in the emulated process, of what it was opened with. `units`: the number
    of units of each group. `seen`: copies of the units of groups that `Emulated.memory` has returned."""

    model: library.Model
    ops: list[library.Op]
    held: list[int]
    units: list[int] = field(default_factory=list)
    seen: dict[int, ctypes.Array[ctypes.c_char]] = field(default_factory=dict)


class Emulated:
    """Does what `library.Library` does, except that it keeps no threads on cores. Units that `memory` returns are
    copies, valid until the next call, which takes over what was written to them."""

    def __init__(self, path: Path, process: Process | None = None) -> None:
        """`process` is one that calls the library at `path`; by default a new one."""
        self.variant = path.stem.partition("-")[0]
        self.process = process or Process(path)
        self._opened: dict[int, _Opened] = {}
        atexit.register(self.process.end)

    def open(self, model_reference: Any, ops: Any, count: int, threads: int) -> int:
        put, given, model = self.process.put, model_reference._obj, _copy(model_reference._obj)
        groups = _array(library.Group, [given.groups[i] for i in range(given.groups_count)])
        ropes = _array(library.Rope, [_copy(given.ropes[i]) for i in range(given.ropes_count)])
        with self.process.lasting() as held:
            for rope in ropes:
                rope.frequencies = put(rope.frequencies, 4 * rope.pairs)
            model.groups, model.ropes = self._at(groups, library.Group), self._at(ropes, library.Rope)
            made = _array(library.Op, [self._op(_copy(ops[i]), given) for i in range(count)])
            handle = self.process.ask("o", self.process.put_all(model), self.process.put_all(made), count, threads)
        self._opened[handle] = _Opened(given, [ops[i] for i in range(count)], held)
        return handle

    def _at(self, values: Any, kind: Any) -> Any:
        return ctypes.cast(self.process.put_all(values) or 0, ctypes.POINTER(kind))

    def _op(self, op: Any, model: library.Model) -> Any:
        put, groups = self.process.put, model.groups
        columns = model.hidden
        if op.kind == library.OpKind.ATTEND:
            columns = op.attention.contents.heads * groups[op.attention.contents.group].head_dim
        op.order = put(op.order, 4 * columns)
        norms = 2 if op.kind == library.OpKind.JOIN else 1
        op.norm = put(op.norm, 4 * -(-norms * model.hidden // 32) * 32)
        for name in MATRICES:
            setattr(op, name, self._matrix(_copy(getattr(op, name))))
        if op.attention:
            a = _copy(op.attention.contents)
            width = groups[a.group].head_dim
            a.query_norm, a.key_norm = put(a.query_norm, 4 * width), put(a.key_norm, 4 * width)
            a.sinks = put(a.sinks, 4 * a.heads)
            a.key_scales = put(a.key_scales, 4 * width * groups[a.group].kv_heads)
            op.attention = self._at(a, library.Attention)
        if op.recurrent:
            r = _copy(op.recurrent.contents)
            channels = groups[r.group].conv_channels
            r.weights, r.bias = put(r.weights, 4 * r.kernel * channels), put(r.bias, 4 * channels)
            r.rates, r.step_bias = put(r.rates, 4 * r.heads), put(r.step_bias, 4 * r.heads)
            r.skip, r.norm = put(r.skip, 4 * r.heads), put(r.norm, 4 * r.heads * r.head_dim)
            op.recurrent = self._at(r, library.Recurrent)
        if op.experts:
            e = _copy(op.experts.contents)
            e.correction = put(e.correction, 4 * e.count)
            for name in ("gate", "up", "down"):
                if own := getattr(e, name):
                    matrices = [self._matrix(_copy(own[i])) for i in range(e.count)]
                    setattr(e, name, self._at(_array(library.Matrix, matrices), library.Matrix))
            op.experts = self._at(e, library.Experts)
        return op

    def _matrix(self, matrix: library.Matrix) -> library.Matrix:
        matrix.data = self.process.put(matrix.data, matrix.panels * matrix.stride)
        matrix.bias = self.process.put(matrix.bias, matrix.panels * 64)
        return matrix

    def prepare(self, forward: int, units: Any, rows: int, most_kept: int) -> int:
        opened = self._opened[forward]
        opened.units, opened.seen = list(units), {}
        with self.process.call():
            return self.process.ask("p", forward, self.process.put_all(units), rows, most_kept)

    def copy(self, forward: int, group: int, count: int, sources: int, targets: int) -> None:
        self._write_back(forward)
        put = self.process.put
        with self.process.call():
            self.process.ask("c", forward, group, count, put(sources, 4 * count), put(targets, 4 * count))

    def memory(self, forward: int, group: int) -> int:
        opened = self._opened[forward]
        if group not in opened.seen:
            size = opened.units[group] * _unit_bytes(opened.model, opened.model.groups[group])
            copied = opened.seen[group] = ctypes.create_string_buffer(size)
            self.process.take(self.process.ask("u", forward, group), ctypes.addressof(copied), size)
        return ctypes.addressof(opened.seen[group])

    def _write_back(self, forward: int) -> None:
        opened = self._opened[forward]
        for group, copied in opened.seen.items():
            self.process.ask("w", self.process.ask("u", forward, group), len(copied), data=copied.raw)
        opened.seen.clear()

    def step(self, forward: int, step_reference: Any) -> int:
        self._write_back(forward)
        given: library.Step = step_reference._obj
        put, take, step, opened = self.process.put, self.process.take, _copy(given), self._opened[forward]
        with self.process.call():
            most = max(ctypes.cast(given.row_ids, ctypes.POINTER(ctypes.c_int32))[: given.rows]) + 1
            for name in ("row_ids", "starts", "counts", "adapter_of", "guesses"):
                setattr(step, name, put(getattr(given, name), 4 * given.rows))
            for name in ("tokens", "sources"):
                setattr(step, name, put(getattr(given, name), 4 * given.tokens_count))
            for name in ("firsts", "lengths"):
                setattr(step, name, put(getattr(given, name), 4 * given.sums_count))
            step.outputs = put(given.outputs, 4 * given.outputs_count)
            groups = [_copy(given.groups[i]) for i in range(opened.model.groups_count)]
            for group in groups:
                group.table = put(group.table, 4 * most * group.width)
                for name in ("reads", "writes", "absorbs", "keeps"):
                    setattr(group, name, put(getattr(group, name), 4 * given.rows))
            step.groups = self._at(_array(library.GroupStep, groups), library.GroupStep)
            adapters = [self._adapter(_copy(given.adapters[i]), opened.ops) for i in range(given.adapters_count)]
            step.adapters = self._at(_array(library.Adapter, adapters), library.Adapter)
            sizes = {
                "logits": 4 * given.outputs_count * opened.model.vocab,
                "best": 4 * given.outputs_count,
                "vectors": 4 * given.sums_count * opened.model.hidden,
                "op_seconds": 8 * len(library.OpKind),
            }
            for name, size in sizes.items():
                setattr(step, name, put(getattr(given, name), size))
            failed = self.process.ask("s", forward, self.process.put_all(step))
            for name, size in sizes.items():
                take(getattr(step, name), getattr(given, name), size)
        return failed

    def _adapter(self, adapter: library.Adapter, ops: list[library.Op]) -> library.Adapter:
        table = [_copy(adapter.changes[i]) for i in range(len(MATRICES) * len(ops))]
        for i, change in enumerate(table):
            matrix, item = getattr(ops[i // 3], MATRICES[i % 3]), 2 if change.bfloat16 else 4
            lanes, inputs = -(-change.rank // 16) * 16, -(-matrix.inputs // 32) * 32
            change.down = self.process.put(change.down, lanes * inputs * item)
            change.up = self.process.put(change.up, 16 * matrix.panels * change.rank * item)
        adapter.changes = self._at(_array(library.LowRank, table), library.LowRank)
        return adapter

    def sample(self, forward: int, draws_reference: Any) -> None:
        given: library.Draws = draws_reference._obj
        put, take, draws, rows = self.process.put, self.process.take, _copy(given), given.rows
        with self.process.call():
            size = 4 * rows * self._opened[forward].model.vocab
            draws.logits, draws.tokens = put(given.logits, size), put(given.tokens, 4 * rows)
            draws.options = put(given.options, ctypes.sizeof(library.SamplingOptions) * rows)
            if given.masks:
                addresses = (ctypes.c_void_p * rows).from_address(given.masks)
                masks = (ctypes.c_void_p * rows)(*(put(address, 4 * given.words) for address in addresses))
                draws.masks = self.process.put_all(masks)
            self.process.ask("m", forward, self.process.put_all(draws))
            take(draws.logits, given.logits, size)
            take(draws.tokens, given.tokens, 4 * rows)

    def close(self, forward: int) -> None:
        opened = self._opened.pop(forward)
        if not self.process.ended:
            self.process.ask("e", forward)
            self.process.free(opened.held)


def _unit_bytes(model: library.Model, group: library.Group) -> int:
    if not group.kv_heads:
        return 4 * group.layers * (group.conv_tokens * group.conv_channels + group.state_floats)
    (kept_as,) = (dtype for dtype in KVCacheDtype if dtype.number == group.kv_type)
    slots = group.layers * group.kv_heads * -(-model.page_size // 16) * 16
    return slots * kept_as.slot_bytes(group.head_dim, Element.BFLOAT16)


def _copy(structure: Any) -> Any:
    return type(structure).from_buffer_copy(structure)


def _array(kind: Any, values: list[Any]) -> Any:
    return (kind * len(values))(*values)
