"""The kernels for AVX-VNNI compute what those for AVX2 compute, bit by bit.

Where the CPU lacks the instruction, they are compiled with `software_vnni.h`, which computes the same with others.
"""

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tenuto.base.config import cache_dir
from tenuto.exec.model_executor import ModelExecutor
from tenuto.kernels.native import build
from tenuto.kernels.native.build import Machine, library, variant_flags
from tenuto.kernels.native.formats import PanelFormat
from tenuto.kernels.native.library import Library
from tests.exec.driver import Driver, logits_of
from tests.exec.kernels import HERE
from tests.exec.test_native_forward import EVERY_FORMAT, native, save_in, text

IN_SOFTWARE = Path(__file__).parent / "software_vnni.h"
ABLE = Machine(HERE.features | {"avx_vnni"}, HERE.compiler)
STEPS = (1, 2, 3, 4, 5, 7, 16, 60, 1, 40)
"""Numbers of tokens, so that all kernels of products and attention compute."""

pytestmark = pytest.mark.skipif(
    HERE.compiler is None or "avx2" not in HERE.variants(), reason="no compiler, or no AVX2"
)


def flags_here() -> list[str]:
    """Returns compiler flags with which the kernels for AVX-VNNI run on this CPU."""
    if "avx2_vnni" in HERE.variants():
        return variant_flags("avx2_vnni")
    contents = sha256(IN_SOFTWARE.read_bytes()).hexdigest()[:8]  # so that a change compiles the kernels again
    return [*variant_flags("avx2"), "-include", str(IN_SOFTWARE), f"-DIN_SOFTWARE_{contents}"]


def test_the_kernels_compile_and_load() -> None:
    """Also on a CPU that cannot run them."""
    made = library(cache_dir(), ABLE, "avx2_vnni", print)
    assert Library(made).variant == "avx2_vnni"


@pytest.mark.parametrize("stored", EVERY_FORMAT, ids=lambda stored: stored.name)
def test_logits_equal_those_of_avx2(
    stored: Kind | PanelFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"avx2": variant_flags("avx2"), "avx2_vnni": flags_here()}
    monkeypatch.setattr(build, "variant_flags", flags.__getitem__)
    path = save_in(tmp_path, stored)
    for kept_as in ("auto", "int8"):
        ours, theirs = (
            logits_in_steps(native(path, variant, machine=ABLE, kv_cache_dtype=kept_as)) for variant in reversed(flags)
        )
        assert torch.equal(ours, theirs)


def logits_in_steps(executor: ModelExecutor) -> torch.Tensor:
    driver = Driver(executor, 20, 1)
    found = [logits_of(executor, driver.plan([(0, text(count, count), count)])).clone() for count in STEPS]
    executor.close()
    return torch.cat(found)
