"""The loops that measure multiplications compile for every variant, and multiply."""

import shutil
import subprocess
from pathlib import Path

import pytest

from bench.multiplications import compiled, multiplications
from tenuto.kernels.native.build import VARIANTS, Machine

THIS = Machine.this()
INSTRUCTIONS = {
    "amx": "tdpbf16ps",
    "avx512_bf16": "vpdpbusd",
    "avx512_vnni": "vpdpbusd",
    "avx512": "vpmaddubsw",
    "avx2_vnni": "vpdpbusd",
    "avx2": "vpmaddubsw",
}


@pytest.mark.skipif(THIS.compiler is None, reason="there is no C++ compiler")
@pytest.mark.skipif("avx2" not in THIS.features, reason="the compiler is not one for x86")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no disassembler")
@pytest.mark.parametrize(("variant", "instruction"), INSTRUCTIONS.items())
def test_a_loop_has_the_multiplications_of_its_variant(variant: str, instruction: str, tmp_path: Path) -> None:
    code = subprocess.run(
        ["objdump", "-d", str(compiled(variant, tmp_path))], capture_output=True, text=True, check=True
    )
    assert code.stdout.count(instruction) >= 4


@pytest.mark.skipif(not THIS.variants(), reason="no native kernels run here")
def test_multiplications_are_counted() -> None:
    assert set(THIS.variants()) <= set(VARIANTS)
    plain = [variant for variant in THIS.variants() if variant != "amx"]
    assert all(multiplications(variant, 1) > 0 for variant in plain)
