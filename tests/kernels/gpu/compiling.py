"""Compiles all `launches`, unless their results are known: `python -m tests.kernels.gpu.compiling 90` does so for
compute capability 9.0."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from triton import compiler, knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tenuto.kernels.gpu import attention
from tests.kernels.gpu.compiled import SAMPLE, SHARED, Compiled, Result, known
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
    results = known()
    found: list[Compiled] = []

    def run(self, *args, grid, warmup, **kwargs):
        key, result = launched(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(Compiled(name, self.fn.__module__, self.fn.__name__, key, result))

    def found_or_compiled(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> tuple[str, Result]:
        key = _key(source, target, options)
        if key in results and name != SAMPLE:
            return key, results[key]
        return key, _measured(compiles(source, target, options), capability)

    driver.set_active(Absent(capability))
    compiles, compiler.compile = compiler.compile, found_or_compiled
    launched, JITFunction.run = JITFunction.run, run
    attention.shared_memory = lambda _: SHARED[capability]  # type: ignore[assignment]
    for name, launch in LAUNCHES.items():  # noqa: B007 (the functions read the name)
        launch.call()
    print(json.dumps([asdict(each) for each in found]))


def _key(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> str:
    """Returns the key of a function: the target, and a hash of all that the compiler's passes begin with."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(dict(options))
    module = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    chosen = sorted((name, value) for name, value in vars(parsed).items() if name != "extern_libs")  # which are paths
    contents = f"{module.str_nodebug()}{chosen}"
    return f"{target.arch} {hashlib.sha256(contents.encode()).hexdigest()[:24]}"


def _measured(kernel: CompiledKernel, capability: int) -> Result:
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
    return Result(
        int(used["REG"]),
        int(used["STACK"]) + int(used["LOCAL"]),
        kernel.metadata.shared,
        newest_products=text.count(_TENSOR_CORES[capability]),
        products=sum(text.count(each) for each in _TENSOR_CORES.values()),
        copies=text.count("cp.async.cg") + text.count("cp.async.bulk"),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
