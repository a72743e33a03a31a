"""The kernels for Arm, emulated, and for each variant its twin: kernels for x86 that round at the same places."""

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tenuto.base.config import cache_dir
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.kernels.native import build
from tenuto.kernels.native.build import SOURCES, VARIANTS, Machine, library
from tenuto.kernels.native.library import Library, loaded
from tenuto.models.native.program import NativeProgram
from tests.exec.kernels import HERE
from tests.kernels.arm.emulator import ARM, Emulated

SOFTWARE_BF16 = Path(__file__).parent / "software_bf16.h"
CLANG = Machine(ARM.features, shutil.which("clang++"))
CLANG_TARGET = "--target=aarch64-linux-gnu"
"""As `g++` for Arm has installed headers and libraries, clang needs no more than this to find them."""
needs_twins = pytest.mark.skipif(
    not HERE.compiler or "avx2" not in HERE.variants(), reason="there is no compiler, or no AVX2"
)
needs_clang = pytest.mark.skipif(not CLANG.compiler, reason="there is no clang++")


@cache
def emulated(variant: str) -> Emulated:
    """Returns a variant of the kernels for Arm, in an emulated process for all tests."""
    return Emulated(library(cache_dir(), ARM, variant, print))


@cache
def emulated_from_clang(variant: str) -> Emulated:
    """Returns the same, compiled by clang."""
    return Emulated(_compiled(f"{variant}-clang", CLANG, [*flags_of(variant), CLANG_TARGET]))


def twin_of(variant: str) -> str:
    """Returns the name of a variant's twin."""
    return "software_bf16" if "bf16" in VARIANTS[variant] else "avx2"


@cache
def twin(name: str) -> Library:
    """Returns the kernels for x86 of this name. `software_bf16` is AVX2 with the rounding of bfloat16 instructions,
    which few x86 CPUs have."""
    if name == "avx2":
        return loaded(library(cache_dir(), HERE, name, print))
    flags = [*flags_of("avx2", name), f"-I{SOURCES}"]
    return loaded(_compiled(name, HERE, [*flags, "-include", str(SOFTWARE_BF16)], SOFTWARE_BF16.read_text()))


def flags_of(variant: str, name: str | None = None) -> list[str]:
    """Returns the flags with which a variant is compiled. `name`: what the library says it is, by default `variant`."""
    return [*build._FLAGS, f'-DTENUTO_VARIANT="{name or variant}"', *build.variant_flags(variant)]


def _compiled(name: str, machine: Machine, flags: Sequence[str], *also: str) -> Path:
    """Returns the path of kernels in the cache, under a key of sources, flags and `also`."""
    path = cache_dir() / "kernels" / f"{name}-{build._key([*flags, *also])}.so"
    return build._compiled(path, machine, flags, print)


def executor(kernels: Library | Emulated, program: NativeProgram, threads: int = 2) -> ModelExecutor:
    """Returns an executor of a program by these kernels."""
    return ModelExecutor(NativeForward(kernels, program, threads))  # type: ignore[arg-type]
