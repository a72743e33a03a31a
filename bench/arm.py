"""`python -m bench.arm`: the instructions that the kernels for Arm execute in steps of the default model.

They run in emulation (`qemu-aarch64`), so there are no times. A plugin of the emulator counts the instructions of each
operation of a step, computed by one thread. Figures are instructions per multiplication with an addition. The least is
what a variant would execute if there were nothing but its widest instruction for such multiplications.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.kernels import PAGE, Steps
from bench.weight_types import TYPES
from tenuto.base.config import DEFAULT_MODEL, cache_dir
from tenuto.kernels.native import library
from tenuto.kernels.native.build import Machine, Unavailable
from tenuto.kernels.native.build import library as compiled
from tenuto.kernels.native.formats import PanelFormat
from tenuto.kernels.native.library import OpKind
from tenuto.models.checkpoint import open_checkpoint, weights_of
from tenuto.models.native.program import NativeProgram
from tenuto.models.store import resolve
from tenuto.models.weights import StoredWeight
from tests.kernels.arm.emulator import ARM, COMPILER, EMULATOR, MATRICES, NEON, Emulated, Process
from tests.kernels.arm.twins import executor

PRODUCTS = (OpKind.QKV, OpKind.ATTEND, OpKind.ADD, OpKind.GATED, OpKind.LOGITS)
FITTING = [name for name, (inputs, _) in TYPES.items() if 576 % inputs == 0]
"""Types of weights with blocks that divide the default model's rows."""


@dataclass(frozen=True, slots=True)
class Widest:
    """How many multiplications with an addition one instruction does at most: of bytes, bfloat16 and float32."""

    bytes: int
    bfloat16: int
    float32: int

    def least(self, multiplications: Counter[PanelFormat]) -> float:
        """Returns the number of instructions for multiplications, each by weights of a format."""
        return sum(number / self._of(weights) for weights, number in multiplications.items())

    def _of(self, weights: PanelFormat) -> int:
        if weights in (PanelFormat.F32, PanelFormat.F16):
            return self.float32
        return self.bfloat16 if weights in (PanelFormat.BF16, PanelFormat.FP8) else self.bytes


WIDEST = {
    "neon_bf16": Widest(32, 16, 4),  # USMMLA, BFMMLA, FMLA
    "neon_dot": Widest(16, 4, 4),  # SDOT, FMLA
    "neon": Widest(8, 4, 4),  # SMLAL, FMLA
}
"""Variants without instructions for bfloat16 multiply float32 instead."""


class CountedProcess(Process):
    """An emulated process whose instructions are counted. `instructions`: the number executed by the last step."""

    def __init__(self, path: Path, directory: Path) -> None:
        """Compiles the plugin into `directory`. Raises `Unavailable` if the emulator does not accept it."""
        plugin, counter = directory / "instructions.so", directory / "counter"
        source, compiler = Path(__file__).with_name("instructions.cpp"), Machine.this().compiler or "c++"
        made = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-o", str(plugin), str(source)]
        subprocess.run(made, check=True)  # noqa: S603 - our source
        counter.write_bytes(bytes(8))
        with counter.open("r+b") as file:
            self._counter = mmap.mmap(file.fileno(), 8)
        self.instructions = 0
        super().__init__(path, "-plugin", f"{plugin},counter={counter}")
        try:
            self.ask("f", None)
        except (OSError, struct.error):
            self.end()
            raise Unavailable(f"{EMULATOR} does not run plugins of interface version 1; QEMU 7.2 does") from None

    def ask(self, letter: str, *given: int | None, data: bytes = b"") -> int:
        before = self._count()
        answer = super().ask(letter, *given, data=data)
        if letter == "s":
            self.instructions = self._count() - before
        return answer

    def _count(self) -> int:
        return int.from_bytes(self._counter[:8], "little")


class Counting(Emulated):
    """Computes steps one operation at a time. `instructions`: those of each kind of operation since this was last
    cleared, without those that a step of no operation executes."""

    def __init__(self, path: Path, process: CountedProcess) -> None:
        super().__init__(path, process)
        self._process = process
        self.instructions: Counter[OpKind] = Counter()

    def step(self, forward: int, step_reference: Any) -> int:
        """Does what `Emulated.step` does, for rows that each compute one token, or for one row."""
        given: library.Step = step_reference._obj  # noqa: SLF001 - what `byref` refers to
        ops, first, end = self._opened[forward].ops, given.first_op, given.end_op
        narrows = given.outputs_count < given.tokens_count
        narrow = next((i for i in range(first, end) if narrows and ops[i].kind == OpKind.NARROW), end)
        for i in range(first, end):
            begin = min(i, narrow)  # a step begins with all tokens, so each of them narrows x anew
            executed = []
            for stop in (i, i + 1):
                given.first_op, given.end_op = begin, stop
                if super().step(forward, step_reference):
                    return 1
                executed.append(self._process.instructions)
            self.instructions[OpKind(ops[i].kind)] += executed[1] - executed[0]
        given.first_op, given.end_op = first, end
        return 0


@contextmanager
def counting(variant: str) -> Iterator[Counting]:
    """Gives the kernels of a variant for Arm. Raises `Unavailable`."""
    needed = {"aarch64-linux-gnu-g++": COMPILER, "qemu-aarch64": EMULATOR, "a C++ compiler": Machine.this().compiler}
    if missing := [name for name, found in needed.items() if found is None]:
        raise Unavailable(f"missing: {', '.join(missing)}")
    path = compiled(cache_dir(), ARM, variant, print)
    with tempfile.TemporaryDirectory() as directory:
        process = CountedProcess(path, Path(directory))
        try:
            yield Counting(path, process)
        finally:
            process.end()


@dataclass(frozen=True, slots=True)
class Work:
    """A step in which `rows` rows compute `count` tokens each, from position `start` on, and sample one."""

    rows: int
    start: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.count} tokens" if self.count > 1 else f"{self.rows} row{'s' if self.rows > 1 else ''}"

    def multiplications(self, program: NativeProgram) -> dict[OpKind, Counter[PanelFormat]]:
        """Returns the number of each kind of `PRODUCTS`, by the format of weights, or of keys and values."""
        found, tokens = {kind: Counter[PanelFormat]() for kind in PRODUCTS}, self.rows * self.count
        pairs = self.rows * sum(range(self.start + 1, self.start + self.count + 1))  # of queries and keys
        for op in program.ops[: program.whole.stop]:
            if op.kind == OpKind.NARROW:
                tokens = self.rows
            elif op.kind == OpKind.ATTEND:
                attention = op.attention.contents
                width = attention.heads * program.model.groups[attention.group].head_dim
                found[OpKind.ATTEND][PanelFormat.BF16] += 2 * width * pairs
            elif op.kind in PRODUCTS:
                inputs = self.rows if op.kind == OpKind.LOGITS else tokens
                for matrix in (getattr(op, name) for name in MATRICES):
                    found[OpKind(op.kind)][PanelFormat(matrix.format)] += matrix.outputs * matrix.inputs * inputs
        return found


WORKS = (*(Work(1, 0, tokens) for tokens in (48, 128)), *(Work(rows, 128, 1) for rows in (1, 4, 16)))


def counted(kernels: Counting, program: NativeProgram, works: Sequence[Work] = WORKS) -> list[dict[OpKind, int]]:
    """Returns the instructions of steps, by the kind of operation."""
    made, found = executor(kernels, program, 1), list[dict[OpKind, int]]()
    steps = Steps(
        made, max(work.rows for work in works), max(work.start + work.count for work in works), program.config.vocab
    )
    for work in works:
        steps.fill(work.rows, work.start)
        kernels.instructions.clear()
        steps.run(work.rows, work.start, work.count)
        found.append(dict(kernels.instructions))
    made.close()
    return found


def table(variants: Iterable[str], program: NativeProgram) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    yield f"| kernels | operation | least | {' | '.join(work.name for work in WORKS)} |"
    yield f"|{'---|' * (3 + len(WORKS))}"
    for variant in variants:
        with counting(variant) as kernels:
            steps = counted(kernels, program)
        for kind in PRODUCTS:
            done = [work.multiplications(program)[kind] for work in WORKS]
            least = WIDEST[variant].least(done[0]) / done[0].total()
            each = [f"{step[kind] / made.total():.3f}" for step, made in zip(steps, done, strict=True)]
            yield f"| {variant} | {kind.name} | {least:.3f} | {' | '.join(each)} |"
        tokens = [
            f"{sum(step.values()) / work.rows / work.count / 1e6:.1f}" for step, work in zip(steps, WORKS, strict=True)
        ]
        yield f"| {variant} | all, millions a token | | {' | '.join(tokens)} |"


def program_of(layers: int | None, kind: str | None) -> NativeProgram:
    """Returns the default model, or its first layers. `kind`: one of `FITTING` to which the matrices of layers are
    rounded first."""
    checkpoint = open_checkpoint(resolve(DEFAULT_MODEL, cache_dir()))
    config = replace(checkpoint.config, layers=checkpoint.config.layers[:layers])

    def weights() -> Iterator[tuple[str, StoredWeight]]:
        for name, stored in weights_of(checkpoint, config):
            number = name.removeprefix("model.layers.").partition(".")[0]
            if not number.isdecimal():
                yield name, stored
            elif int(number) < len(config.layers):
                yield name, stored if kind is None or len(stored.shape) < 2 else TYPES[kind][1](stored.decode())

    return NativeProgram(config, weights(), PAGE)


def main() -> None:
    """Prints tables of the chosen kernels and types."""
    parser = argparse.ArgumentParser(prog="python -m bench.arm", description=__doc__)
    parser.add_argument("kernels", nargs="*", help="by default all variants for Arm")
    parser.add_argument("--types", nargs="+", choices=FITTING, help="of matrices of layers; by default as in the file")
    parser.add_argument("--layers", type=int, help="number of layers that are computed; by default all")
    arguments = parser.parse_args()
    try:
        for kind in arguments.types or [None]:
            print(f"\nLayers in {kind}\n" if kind else "")
            for line in table(arguments.kernels or NEON, program_of(arguments.layers, kind)):
                print(line, flush=True)
    except Unavailable as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
