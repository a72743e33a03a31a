"""The variants of the native kernels that can run here, and how far they round."""

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
"""Parameters: every variant there is; those that cannot run here are skipped."""
every_variant = pytest.mark.parametrize("variant", NATIVE)
KERNELS = [*NATIVE, "torch"]
"""Parameters: whatever can compute."""


def allowed_behind(compute: str) -> float:
    """How far below the highest logit a sampled token's may be when its history is computed again in other steps.
    `compute`: a variant, or what an engine says computes. With `amx` up to four tokens a step are multiplied by another
    kernel than more, and either rounds; PyTorch rounds differently with other shapes; else no step changes a bit."""
    if "amx" in compute:
        return 0.5
    return 1e-9 if any(name in compute for name in VARIANTS) else 2e-3
