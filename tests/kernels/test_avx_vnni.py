"""The kernels for AVX-VNNI compute what those for AVX2 compute, bit by bit.

Where the CPU lacks the instruction, they are compiled with `software_vnni.h`, which computes the same with others.
"""

import ctypes
import subprocess
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tenuto.base.config import cache_dir
from tenuto.exec.model_executor import ModelExecutor
from tenuto.kernels.native import build
from tenuto.kernels.native.build import SOURCES, Machine, library, variant_flags
from tenuto.kernels.native.formats import PanelFormat
from tenuto.kernels.native.library import Library
from tests.exec.driver import Driver, logits_of
from tests.exec.kernels import HERE
from tests.exec.test_native_forward import EVERY_FORMAT, native, save_in, text

IN_SOFTWARE = Path(__file__).parent / "software_vnni.h"
ABLE = Machine(HERE.features | {"avx_vnni"}, HERE.compiler)
STEPS = (1, 2, 3, 4, 5, 7, 16, 60, 1, 40)
"""Numbers of tokens, so that all kernels of products and attention compute."""
BITS = (2, 3, 4, 5, 6, 8)

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


PROBE = """
#include "simd.h"
static_assert(KeyDot::OFFSET == %d, "of the other instructions");
template <class D, int BITS> static void sum(const uint8_t *w, const int8_t *x, int32_t *to) {
  D dot;
  for (int j = 0; j < 8; j++)
    dot.template add<BITS>(load<u32x16>(w + 64 * j), x + 4 * j);
  store(to, dot.template total<BITS>());
}
extern "C" int offset(int) { return Dot::OFFSET; }
extern "C" void weights(int bits, const uint8_t *w, const int8_t *x, int32_t *to) {
  bits == 2   ? sum<Dot, 2>(w, x, to)
  : bits == 3 ? sum<Dot, 3>(w, x, to)
  : bits == 4 ? sum<Dot, 4>(w, x, to)
  : bits == 5 ? sum<Dot, 5>(w, x, to)
  : bits == 6 ? sum<Dot, 6>(w, x, to)
              : sum<Dot, 8>(w, x, to);
}
extern "C" void keys(const uint8_t *w, const int8_t *x, int32_t *to) { sum<KeyDot, 8>(w, x, to); }
extern "C" void values(const uint8_t *w, const uint8_t *x, int32_t *to) {
  UnsignedDot dot;
  for (int j = 0; j < 8; j++)
    dot.add(load<u32x16>(w + 64 * j), x + 4 * j);
  store(to, dot.total());
}
"""


@pytest.mark.parametrize(("variant", "key_offset"), [("avx2", 128), ("avx2_vnni", 0)])
def test_dot_products_of_bytes_are_exact_also_of_the_highest_and_lowest(
    variant: str, key_offset: int, tmp_path: Path
) -> None:
    source, made = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text(PROBE % key_offset)
    flags = flags_here() if variant == "avx2_vnni" else variant_flags(variant)
    command = [str(HERE.compiler), "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *flags, f"-I{SOURCES}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    probe, rng = ctypes.CDLL(str(made)), np.random.default_rng(1)

    def found(call: str, first: np.ndarray, second: np.ndarray, *more: int) -> np.ndarray:
        """Returns the sums of 32 products in each of 16 lanes; `first`: [32, 16], `second`: [32]."""
        quads = np.ascontiguousarray(first.reshape(8, 4, 16).swapaxes(1, 2)).astype(np.uint8)
        out, inputs = np.zeros(16, np.int32), second.astype(np.uint8)
        getattr(probe, call)(*more, *(ctypes.c_void_p(array.ctypes.data) for array in (quads, inputs, out)))
        return out

    def bytes_between(low: int, high: int, *shape: int) -> np.ndarray:
        """Returns random numbers, one half of them the lowest or the highest."""
        ends = rng.choice([low, high], shape)
        return np.where(rng.random(shape) < 0.5, ends, rng.integers(low, high + 1, shape))

    for _ in range(50):
        inputs, unsigned = bytes_between(-127, 127, 32), bytes_between(0, 127, 32)
        for bits in BITS:
            quants = bytes_between(0, 2**bits - 1, 32, 16)
            offset = probe.offset(0) if bits == 8 else 0
            assert np.array_equal(found("weights", quants, inputs, bits), inputs @ (quants - offset))
        assert np.array_equal(found("keys", quants, inputs), inputs @ (quants - key_offset))
        values = bytes_between(-128, 127, 32, 16)
        assert np.array_equal(found("values", values, unsigned), unsigned @ values)


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
