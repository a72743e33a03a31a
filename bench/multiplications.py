"""The most multiplications that this CPU makes, which no product can exceed."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tenuto.kernels.native.build import SOURCES, Machine, variant_flags

_ROUNDS = 20_000_000
_TIMES = 10


def multiplications(variant: str, threads: int) -> float:
    """Returns the most multiplications and additions a second that `threads` threads make together, with operands in
    registers, by the instructions of a variant of the kernels. AMX needs that the kernels of `variant` are loaded.
    Raises `CalledProcessError` if the compiler fails."""
    with tempfile.TemporaryDirectory() as directory:
        made = compiled(variant, Path(directory))
        multiply = ctypes.CDLL(str(made)).multiply
    multiply.argtypes, multiply.restype = [ctypes.c_int64], ctypes.c_int64
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_TIMES):
            began = time.perf_counter()
            done = sum(pool.map(multiply, [_ROUNDS] * threads))
            best = max(best, done / (time.perf_counter() - began))
    return best


def compiled(variant: str, directory: Path) -> Path:
    """Compiles the loops of a variant. Raises `CalledProcessError`."""
    made, source = directory / f"{variant}.so", Path(__file__).with_suffix(".cpp")
    options = ["-std=c++17", "-O3", "-shared", "-fPIC", "-w", f"-I{SOURCES}", *variant_flags(variant)]
    compiler = Machine.this().compiler or "c++"
    subprocess.run([compiler, *options, "-o", str(made), str(source)], check=True)  # noqa: S603 - our source
    return made
