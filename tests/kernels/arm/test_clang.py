"""Kernels for Arm that clang compiles, as on macOS, compute what those for x86 compute."""

import subprocess

import pytest

from tenuto.kernels.native.build import SOURCES
from tests.kernels.arm.emulator import NEON, needs_emulator
from tests.kernels.arm.test_neon_models import assert_same_rounding, logits_of_beginnings, stage_of
from tests.kernels.arm.twins import (
    CLANG,
    CLANG_TARGET,
    emulated_from_clang,
    executor,
    flags_of,
    needs_clang,
    needs_twins,
)

pytestmark = [needs_emulator, needs_twins, needs_clang]
RICHEST, *OTHERS = NEON


@pytest.mark.parametrize(
    "name", ["dense, 8-bit keys", "windows, caps, norms behind layers", "gated delta nets, experts"]
)
def test_models_give_the_logits_of_x86(name: str) -> None:
    stage = stage_of(name)
    found = logits_of_beginnings(executor(emulated_from_clang(RICHEST), stage.program))
    assert_same_rounding(found, stage.expected(RICHEST))


@pytest.mark.parametrize("variant", OTHERS)
def test_every_other_variant_is_accepted(variant: str) -> None:
    command = [str(CLANG.compiler), *flags_of(variant), CLANG_TARGET, "-fsyntax-only", str(SOURCES / "forward.cpp")]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
