"""The kernels for GPUs as they are compiled on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may use, by compute capability; for 80 what all of its generation have."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled Triton function. `stack`: bytes of local memory per thread, which registers spill to. `products`,
    `copies`: numbers of the instructions that multiply on tensor cores, of the newest generation and of any, and that
    copy to shared memory asynchronously."""

    launch: str
    module: str
    kernel: str
    registers: int
    stack: int
    shared: int
    newest_products: int
    products: int
    copies: int


def compiled(capability: int, cache: Path) -> list[Compiled]:
    """Returns the compiled functions of all `launches`. They are compiled in a separate process, since Triton
    either interprets or compiles. `cache`: a directory for what Triton stores."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compiling", str(capability)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [Compiled(**each) for each in json.loads(done.stdout)]
