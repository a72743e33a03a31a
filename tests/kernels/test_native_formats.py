"""Panels hold what the `gguf` package decodes, whatever the file's blocks."""

import ctypes
import subprocess
from collections.abc import Callable

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tenuto.kernels.native.build import SOURCES, VARIANTS, Machine
from tenuto.kernels.native.formats import FORMATS, PanelFormat
from tenuto.kernels.native.grouped import Grouped
from tenuto.kernels.native.library import Matrix
from tenuto.kernels.native.pack import Arena, pack_blocks, pack_floats, pack_quantized
from tests.models.quantize import quantize

HERE = Machine.this()
OUTPUTS, INPUTS = 40, 512
BLOCKS = INPUTS // 32
LOWEST = {
    PanelFormat.Q4_0: -8,
    PanelFormat.Q6_K: -32,
    PanelFormat.Q8_0: -128,
    PanelFormat.Q3_K: -4,
}
"""The minima, in scales, of formats whose panels have none."""
BOOKS = {
    PanelFormat.IQ4_NL: gguf.quants.IQ4_NL.kvalues,
    PanelFormat.IQ4_XS: gguf.quants.IQ4_NL.kvalues,
    PanelFormat.MXFP4: gguf.quants.MXFP4.kvalues,
}
HIGHER_BITS = {PanelFormat.Q5_1: 1, PanelFormat.Q6_K: 2, PanelFormat.Q2_K: 2, PanelFormat.Q3_K: 2}
"""Bits of each weight that are stored by themselves, behind nibbles if a block has them."""
ROUNDED = {Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}
"""Kinds whose scales are rounded to float16."""

needs_avx512 = pytest.mark.skipif(
    HERE.compiler is None or "avx512_bf16" not in HERE.variants(), reason="no compiler, or no AVX-512 with bfloat16"
)
every_kind = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)


def encoded(kind: Kind, outputs: int = OUTPUTS) -> np.ndarray:
    """Makes wild weights: rows of sizes from 1e-3 to 1e2, with some zeros and very different groups of 16."""
    rng = np.random.default_rng(kind)
    values = rng.standard_normal((outputs, INPUTS // 16, 16)) * rng.choice([0, 0.01, 0.3, 1, 1], (1, INPUTS // 16, 1))
    values = values * np.logspace(-3, 2, outputs)[:, None, None]
    return quantize(values.reshape(outputs, INPUTS).astype(np.float32), kind)


def panels_of(matrix: Matrix) -> np.ndarray:
    size = matrix.panels * matrix.stride
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(matrix.data)).reshape(matrix.panels, -1)


def quants_of(blocks: np.ndarray, panel_format: PanelFormat) -> np.ndarray:
    """Returns the quants of blocks, uint8 [..., 4 * vectors] in the order of an output's vectors, as [..., 32]."""
    vectors, bits = blocks.reshape(*blocks.shape[:-1], -1, 4), HIGHER_BITS.get(panel_format, 0)
    if panel_format.quant_bytes == 32:
        return blocks
    if panel_format.quant_bytes >= 16:
        low, behind = np.concatenate((vectors[..., :4, :] & 15, vectors[..., :4, :] >> 4), axis=-2), 4
    else:
        low, behind = np.zeros((*vectors.shape[:-2], 8, 4), np.uint8), 0
    for at in range(8 * (bits > 0)):
        vector = vectors[..., behind + at * bits // 8, :]
        low[..., at, :] |= (vector >> at * bits % 8 & 2**bits - 1) << behind
    if panel_format is PanelFormat.Q3_K:
        low |= (vectors[..., 2:, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 2
    return low.reshape(*blocks.shape[:-1], 32)


def scales_of(panel_format: PanelFormat, arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and minima of the halves of blocks, float32 [outputs, blocks, 2], that a panel's arrays, each
    [outputs, blocks], stand for."""
    scales, minima = np.zeros((2, *arrays[0].shape, 2), np.float32)
    match panel_format, arrays:
        case PanelFormat.Q2_K, [first, second, unit, depth]:
            for half, codes in enumerate((first, second)):
                scales[..., half], minima[..., half] = unit * (codes % 16), -depth * (codes // 16)
        case PanelFormat.Q3_K, [first, second, unit]:
            scales[..., 0], scales[..., 1] = unit * (first - 128), unit * (second - 128)
        case PanelFormat.IQ4_XS, [codes, unit]:
            scales[:] = (unit * (codes - 128))[..., None]
        case PanelFormat.MXFP4, [exponents]:
            scales[:] = np.ldexp(np.float32(1), exponents.astype(int) - 128)[..., None]
        case PanelFormat.Q6_K, [first, second]:
            scales[..., 0], scales[..., 1] = first, second
        case _, [scale, *minimum]:
            scales[:] = scale[..., None]
            if minimum:
                minima[:] = minimum[0][..., None]
    return scales, minima


def weights_of(matrix: Matrix) -> np.ndarray:
    """Returns the weights of a quantized matrix as `weight_formats.h` describes them, float32 [outputs, inputs]."""
    panels, panel_format, count = panels_of(matrix), PanelFormat(matrix.format), matrix.inputs // 32
    at = count * panel_format.quant_bytes * 16
    blocks = panels[:, :at].reshape(-1, count, panel_format.quant_bytes // 4, 16, 4).transpose(0, 3, 1, 2, 4)
    quants = quants_of(blocks.reshape(-1, count, panel_format.quant_bytes), panel_format).astype(np.float32)
    arrays = []
    for kind, fixed in panel_format.scales:
        shared = fixed or 2**matrix.group
        end = at + -(-count // shared) * 16 * kind.itemsize
        values = panels[:, at:end].copy().view(kind).reshape(len(panels), -1, 16).swapaxes(1, 2)
        arrays.append(
            np.repeat(values.reshape(len(quants), -1).astype(np.float32), min(shared, count), axis=1)[:, :count]
        )
        at = end
    scales, minima = scales_of(panel_format, arrays)
    if panel_format in BOOKS:
        quants = np.array(BOOKS[panel_format], np.float32)[quants.astype(int)]
    each = np.repeat(scales, 16, axis=2)
    found = each * (quants + np.float32(LOWEST.get(panel_format, 0))) + np.repeat(minima, 16, axis=2)
    return found.reshape(-1, matrix.inputs)[: matrix.outputs]


def tolerance(kind: Kind, data: np.ndarray) -> np.ndarray:
    """Returns the allowed error of each weight, [outputs, inputs]: 0, or that of rounding scale and minimum to
    float16."""
    if kind not in ROUNDED:
        return np.zeros((len(data), INPUTS))
    blocks = FORMATS[kind].split(data.reshape(len(data), -1, gguf.GGML_QUANT_SIZES[kind][1]))
    scales, second = (np.abs(values.astype(np.float32)) for values in blocks.scales)
    return np.repeat((scales * 32 + second * (32 if kind is Kind.Q6_K else 1)) * 2**-11, 32, axis=1)


@every_kind
def test_panels_hold_what_the_gguf_package_decodes(kind: Kind) -> None:
    data, arena = encoded(kind), Arena()
    exact, found = gguf.quants.dequantize(data, kind), weights_of(pack_quantized(data, kind, arena))
    assert (np.abs(found - exact) <= tolerance(kind, data)).all()


def test_a_matrix_packed_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data, arena = encoded(Kind.Q4_K), Arena()
    whole = panels_of(pack_quantized(data, Kind.Q4_K, arena))
    monkeypatch.setattr("tenuto.kernels.native.pack._AT_ONCE", 1)
    assert np.array_equal(panels_of(pack_quantized(data, Kind.Q4_K, arena)), whole)


PROBE = """
#include "matmul.h"
extern "C" void unpack_all(const Matrix *w, uint8_t *out) {
  for (int p = 0; p < w->panels; p++)
    for (int b = 0; b < w->inputs / BLOCK; b++, out += 1024)
      with_format(w->format, [&](auto format) {
        amx::unpack<decltype(format)>(Panel(*w, p), b, out, [](int) {});
      });
}
"""


LAST_PLACE = 2**-7 - 0.0028
"""The largest relative error: weights are truncated to bfloat16 after being enlarged by 0.28 %, the average loss."""


@pytest.fixture(scope="module")
def unpack_all(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """The function that unpacks panels for AMX's tiles; it runs without them."""
    directory = tmp_path_factory.mktemp("probe")
    source, made = directory / "probe.cpp", directory / "probe.so"
    source.write_text(PROBE)
    flags = [f"-m{feature}" for feature in VARIANTS["amx"]]
    command = [str(HERE.compiler), "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *flags, f"-I{SOURCES}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    return ctypes.CDLL(str(made)).unpack_all


def unpacked(unpack_all: Callable[..., int], matrix: Matrix, arena: Arena) -> np.ndarray:
    out = arena.array((matrix.panels * BLOCKS * 1024,))
    unpack_all(ctypes.byref(matrix), ctypes.c_void_p(out.ctypes.data))
    pairs = out.view(np.uint16).reshape(matrix.panels, INPUTS // 2, 16, 2).astype(np.uint32) << 16
    return pairs.view(np.float32).transpose(0, 2, 1, 3).reshape(-1, INPUTS)[:OUTPUTS]


@every_kind
@needs_avx512
def test_tiles_receive_the_panels_weights_as_bfloat16(unpack_all: Callable[..., int], kind: Kind) -> None:
    data, arena = encoded(kind), Arena()
    matrix = pack_quantized(data, kind, arena)
    found, exact = unpacked(unpack_all, matrix, arena), weights_of(matrix)
    least = np.abs(exact).max(axis=1, keepdims=True) * 2**-11
    assert (np.abs(found - exact) <= np.abs(exact) * LAST_PLACE + least).all()
    large = np.abs(exact) > least
    few = kind is Kind.TQ2_0  # values, whose losses average less well
    assert abs((found[large] / exact[large]).mean() - 1) < (1e-3 if few else 2e-4)


@needs_avx512
def test_tiles_receive_float16_weights_as_bfloat16(unpack_all: Callable[..., int]) -> None:
    values, arena = np.random.default_rng(1).standard_normal((OUTPUTS, INPUTS)).astype(np.float16), Arena()
    matrix = pack_floats([values.view(np.uint16)], OUTPUTS, INPUTS, PanelFormat.F16, arena)
    found = unpacked(unpack_all, matrix, arena)
    assert (np.abs(found - values) <= np.abs(values) * LAST_PLACE).all()
    assert abs((found / values).mean() - 1) < 2e-4


GROUPED = [
    Grouped(PanelFormat.INT4, 64),
    Grouped(PanelFormat.INT4, 32, halves=True),
    Grouped(PanelFormat.INT8, INPUTS),
    Grouped(PanelFormat.INT8, 128, halves=True),
    Grouped(PanelFormat.FP8, 128),
    Grouped(PanelFormat.FP8, INPUTS),
]


def grouped(kind: Grouped) -> tuple[np.ndarray, Matrix, Arena]:
    """Makes random weights of a type of safetensors files: returns them, decoded, and their panels."""
    rng, groups, arena = np.random.default_rng(3), -(-INPUTS // kind.group), Arena()
    quants = rng.integers(0, 256, (OUTPUTS, BLOCKS * kind.numbers.quant_bytes), np.uint8)
    if kind.numbers is PanelFormat.FP8:
        quants[(quants & 0x7F) == 0x7F] = 0
    scales = rng.uniform(0.5, 1, (OUTPUTS, groups)) * np.logspace(-3, 2, OUTPUTS)[:, None]
    scales = scales.astype(np.float16 if kind.halves else np.float32).astype(np.float32)
    zero = 8 if kind.numbers is PanelFormat.INT4 else 128
    zeros = np.full_like(scales, zero) if kind.halves else rng.integers(0, 2 * zero, scales.shape).astype(np.float32)
    arrays = [scales, -zeros * scales][: len(kind.numbers.scales)]
    rows = np.concatenate((quants, *(each.view(np.uint8) for each in arrays)), axis=1)
    matrix = pack_blocks(rows, INPUTS, kind.conversion(INPUTS), arena, kind.group // 32)
    return kind.decode(rows, INPUTS), matrix, arena


@pytest.mark.parametrize("kind", [kind for kind in GROUPED if kind.numbers is not PanelFormat.FP8], ids=str)
def test_panels_hold_weights_that_groups_of_inputs_scale(kind: Grouped) -> None:
    exact, matrix, _ = grouped(kind)
    assert np.array_equal(weights_of(matrix), exact)
    assert matrix.group == (31 if kind.group == INPUTS else (kind.group // 32).bit_length() - 1)


@needs_avx512
@pytest.mark.parametrize("kind", GROUPED, ids=str)
def test_tiles_receive_weights_that_groups_of_inputs_scale(unpack_all: Callable[..., int], kind: Grouped) -> None:
    exact, matrix, arena = grouped(kind)
    found, least = unpacked(unpack_all, matrix, arena), np.abs(exact).max(axis=1, keepdims=True) * 2**-11
    assert (np.abs(found - exact) <= np.abs(exact) * LAST_PLACE + least).all()
    large = np.abs(exact) > least
    assert abs((found[large] / exact[large]).mean() - 1) < 2e-4


def test_a_damaged_block_gives_some_weights_but_no_error() -> None:
    for kind in FORMATS:
        size = INPUTS // gguf.GGML_QUANT_SIZES[kind][0] * gguf.GGML_QUANT_SIZES[kind][1]
        raw = np.random.default_rng(2).integers(0, 256, (16, size), np.uint8)
        assert pack_quantized(raw, kind, Arena()).outputs == len(raw)
