"""Compiles all `launches`: `python -m tests.kernels.gpu.compiling 90` does so for compute capability 9.0."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from types import FunctionType

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tenuto.kernels.gpu import attention
from tests.kernels.gpu.compiled import SHARED, Compiled
from tests.kernels.gpu.launches import LAUNCHES

_TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


class Absent:
    """Stands for the driver of a GPU. It says what is compiled for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def main(capability: int) -> None:
    """Compiles in place of every launch, and prints what `compiled` returns."""
    found: list[Compiled] = []

    def run(self, *args, grid, warmup, **kwargs):
        kernel = launched(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_measured(name, self.fn, kernel, capability))

    driver.set_active(Absent(capability))
    launched, JITFunction.run = JITFunction.run, run
    attention.shared_memory = lambda _: SHARED[capability]  # type: ignore[assignment]
    for name, launch in LAUNCHES.items():  # noqa: B007 (`run` reads the name)
        launch.call()
    print(json.dumps([asdict(each) for each in found]))


def _measured(launch: str, function: FunctionType, kernel, capability: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    text = kernel.asm["ptx"]
    return Compiled(
        launch,
        function.__module__,
        function.__name__,
        int(used["REG"]),
        int(used["STACK"]) + int(used["LOCAL"]),
        kernel.metadata.shared,
        newest_products=text.count(_TENSOR_CORES[capability]),
        products=sum(text.count(each) for each in _TENSOR_CORES.values()),
        copies=text.count("cp.async.cg") + text.count("cp.async.bulk"),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
