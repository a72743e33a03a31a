"""The kernels for Arm, emulated, and for each variant its twin: kernels for x86 that round at the same places."""

from functools import cache
from pathlib import Path

import pytest

from tenuto.base.config import cache_dir
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.kernels.native import build
from tenuto.kernels.native.build import SOURCES, VARIANTS, library
from tenuto.kernels.native.library import Library, loaded
from tenuto.models.native.program import NativeProgram
from tests.exec.kernels import HERE
from tests.kernels.arm.emulator import ARM, Emulated

SOFTWARE_BF16 = Path(__file__).parent / "software_bf16.h"
needs_twins = pytest.mark.skipif(
    not HERE.compiler or "avx2" not in HERE.variants(), reason="there is no compiler, or no AVX2"
)


@cache
def emulated(variant: str) -> Emulated:
    """Returns a variant of the kernels for Arm, in an emulated process for all tests."""
    return Emulated(library(cache_dir(), ARM, variant, print))


def twin_of(variant: str) -> str:
    """Returns the name of a variant's twin."""
    return "software_bf16" if "bf16" in VARIANTS[variant] else "avx2"


@cache
def twin(name: str) -> Library:
    """Returns the kernels for x86 of this name. `software_bf16` is AVX2 with the rounding of bfloat16 instructions,
    which few x86 CPUs have."""
    if name == "avx2":
        return loaded(library(cache_dir(), HERE, name, print))
    flags = [*build._FLAGS, f'-DTENUTO_VARIANT="{name}"', *build.variant_flags("avx2"), f"-I{SOURCES}"]
    key = build._key([*flags, SOFTWARE_BF16.read_text()])
    path = cache_dir() / "kernels" / f"{name}-{key}.so"
    return loaded(build._compiled(path, HERE, [*flags, "-include", str(SOFTWARE_BF16)], print))


def executor(kernels: Library | Emulated, program: NativeProgram, threads: int = 2) -> ModelExecutor:
    """Returns an executor of a program by these kernels."""
    return ModelExecutor(NativeForward(kernels, program, threads))  # type: ignore[arg-type]
