"""The variants of the native kernels that can run here, and the effect of their rounding."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tenuto.kernels.native.build import VARIANTS, Machine

HERE = Machine.this()
any_variant = bool(HERE.compiler and HERE.variants())
needs_variant = pytest.mark.skipif(not any_variant, reason="there are no native kernels here")
NATIVE = [
    pytest.param(
        name, marks=[] if HERE.compiler and name in HERE.variants() else pytest.mark.skip(f"{name} cannot run here")
    )
    for name in VARIANTS
]
"""Parameters for all variants; those that cannot run here are skipped."""
EXACT = next((name for name in VARIANTS if name in HERE.variants() and name != "amx"), "auto")
"""The best variant here with which no bit depends on what else is in a step; see `allowed_behind`."""
FLOAT32 = ("avx512_vnni", "avx512", "avx2_vnni", "avx2")
"""The variants for x86 that multiply queries and softmax weights as float32."""
every_variant = pytest.mark.parametrize("variant", NATIVE)
KERNELS = [*NATIVE, "torch"]
"""Parameters for all kernels, including PyTorch."""


def allowed_behind(compute: str) -> float:
    """Returns how far below the highest logit a sampled token's may be when its history is recomputed in other steps.
    `compute`: a variant, or an engine's description of its kernels. With `amx`, up to four tokens a step are multiplied
    by another kernel than more, and both round; PyTorch rounds differently with other shapes; otherwise no bit
    changes."""
    if "amx" in compute:
        return 0.5
    return 1e-9 if any(name in compute for name in VARIANTS) else 2e-3


def cores_of_threads() -> list[list[int]]:
    """Returns the cores that each thread of this process may run on. On Linux only."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            found.append(sorted(os.sched_getaffinity(int(thread.name))))
    return found
