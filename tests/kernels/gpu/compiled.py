"""The kernels for GPUs as they are compiled on a machine without one.

Compiling them all takes minutes, making their intermediate representation seconds. `compiled.json` therefore keeps the
compiler's results under a hash of that representation, and only kernels without a result are compiled.
`python -m tests.kernels.gpu.compiled` writes the file anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may use, by compute capability; for 80 what all of its generation have."""


KNOWN = Path(__file__).with_suffix(".json")

SAMPLE = "attention of gpt-oss"
"""The launch that is compiled even if its results are known."""


@dataclass(frozen=True, slots=True)
class Result:
    """Properties of a compiled Triton function. `stack`: bytes of local memory per thread, which registers spill to.
    `products`, `copies`: numbers of the instructions that multiply on tensor cores, of the newest generation and of
    any, and that copy to shared memory asynchronously."""

    registers: int
    stack: int
    shared: int
    newest_products: int
    products: int
    copies: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A Triton function as a launch needs it. `key`: of its intermediate representation, its options and its target."""

    launch: str
    module: str
    kernel: str
    key: str
    result: Result


def known() -> dict[str, Result]:
    """Returns the known results by key; none with another version of Triton than theirs."""
    kept = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    if kept.pop("triton", None) != version("triton"):
        return {}
    return {key: Result(*numbers) for key, numbers in kept.items()}


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
    return [Compiled(**each | {"result": Result(**each["result"])}) for each in json.loads(done.stdout)]


def main() -> None:
    """Writes the results of all launches. Without the file it compiles them all, in about ten minutes."""
    with TemporaryDirectory() as cache:
        found = {each.key: each.result for capability in SHARED for each in compiled(capability, Path(cache))}
    lines = [f'"{key}": {json.dumps(astuple(result))}' for key, result in sorted(found.items())]
    KNOWN.write_text("{\n" + ",\n".join([f'"triton": "{version("triton")}"', *lines]) + "\n}\n")


if __name__ == "__main__":
    main()
