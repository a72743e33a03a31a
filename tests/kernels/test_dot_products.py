"""The sums of integer products that all kernels for quants are made of, in every variant for x86."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tenuto.kernels.native.build import SOURCES, VARIANTS, variant_flags
from tests.exec.kernels import HERE
from tests.kernels.test_avx_vnni import flags_here

BITS = (2, 3, 4, 5, 6, 8)
PROBE = """
#include "attention_quants.h"
template <int BITS> static void sum(const uint8_t *w, const int8_t *x, int32_t *to) {
  Dot dot;
  constexpr int QUADS = quads_at_once(BITS);
  for (int j = 0; j < 8; j += QUADS) {
    u32x16 quads[QUADS];
    for (int q = 0; q < QUADS; q++)
      quads[q] = load<u32x16>(w + 64 * (j + q));
    add_quads<BITS>(dot, quads, x + 4 * j);
  }
  store(to, dot.total<BITS>());
}
template <class Sums> static void sum_quants(const uint8_t *w, const Quants<32> &x, uint32_t *to) {
  Sums sums;
  for (int j = 0; j < 8; j++)
    sums.add({load<u32x16>(w + 64 * j)}, x, 4 * j);
  store(to, sums.total());
}
extern "C" int offset(int) { return Dot::OFFSET; }
extern "C" int key_offset(int) { return KeySums::OFFSET; }
extern "C" void weights(int bits, const uint8_t *w, const int8_t *x, int32_t *to) {
  bits == 2   ? sum<2>(w, x, to)
  : bits == 3 ? sum<3>(w, x, to)
  : bits == 4 ? sum<4>(w, x, to)
  : bits == 5 ? sum<5>(w, x, to)
  : bits == 6 ? sum<6>(w, x, to)
              : sum<8>(w, x, to);
}
extern "C" void keys(const uint8_t *w, const int32_t *x, uint32_t *to) {
  Quants<32> quants;
  quants.set_signed(0, load<i32x16>(x)), quants.set_signed(16, load<i32x16>(x + 16));
  sum_quants<KeySums>(w, quants, to);
}
extern "C" void values(const uint8_t *w, const int32_t *x, uint32_t *to) {
  Quants<32> quants;
  quants.set_unsigned(0, load<i32x16>(x)), quants.set_unsigned(16, load<i32x16>(x + 16));
  sum_quants<ValueSums>(w, quants, to);
}
"""
X86 = [name for name in VARIANTS if "avx2" in VARIANTS[name] and name != "amx"]

pytestmark = pytest.mark.skipif(
    HERE.compiler is None or "avx2" not in HERE.variants(), reason="no compiler, or no AVX2"
)


@pytest.mark.parametrize("variant", X86)
def test_dot_products_are_exact_also_of_the_highest_and_lowest(variant: str, tmp_path: Path) -> None:
    if variant not in {"avx2_vnni", *HERE.variants()}:
        pytest.skip(f"{variant} cannot run here")
    source, made = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text(PROBE)
    flags = flags_here() if variant == "avx2_vnni" else variant_flags(variant)
    command = [str(HERE.compiler), "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *flags, f"-I{SOURCES}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    probe, rng = ctypes.CDLL(str(made)), np.random.default_rng(1)

    def found(call: str, first: np.ndarray, second: np.ndarray, *more: int) -> np.ndarray:
        """Returns the sums of 32 products in each of 16 lanes; `first`: [32, 16], `second`: [32]."""
        quads = np.ascontiguousarray(first.reshape(8, 4, 16).swapaxes(1, 2)).astype(np.uint8)
        out, inputs = np.zeros(16, np.int32), np.ascontiguousarray(second)
        getattr(probe, call)(*more, *(ctypes.c_void_p(array.ctypes.data) for array in (quads, inputs, out)))
        return out

    def numbers_between(low: int, high: int, *shape: int) -> np.ndarray:
        """Returns random numbers, one half of them the lowest or the highest."""
        ends = rng.choice([low, high], shape)
        return np.where(rng.random(shape) < 0.5, ends, rng.integers(low, high + 1, shape)).astype(np.int32)

    for _ in range(50):
        inputs = numbers_between(-127, 127, 32)
        for bits in BITS:
            quants = numbers_between(0, 2**bits - 1, 32, 16)
            offset = probe.offset(0) if bits == 8 else 0
            assert np.array_equal(found("weights", quants, inputs.astype(np.int8), bits), inputs @ (quants - offset))
        query = numbers_between(-127 * 128, 127 * 128, 32)
        assert np.array_equal(found("keys", quants, query), query @ (quants - probe.key_offset(0)))
        values, softmax = numbers_between(-128, 127, 32, 16), numbers_between(0, 127 * 129, 32)
        assert np.array_equal(found("values", values, softmax), softmax @ values)
