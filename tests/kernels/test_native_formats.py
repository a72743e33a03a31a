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
from tenuto.kernels.native.library import Matrix
from tenuto.kernels.native.pack import Arena, pack_floats, pack_quantized
from tests.models.quantize import quantize

HERE = Machine.this()
OUTPUTS, INPUTS = 40, 512
BLOCKS = INPUTS // 32
LAYOUTS: dict[PanelFormat, tuple[int, int | None]] = {
    PanelFormat.Q4_0: (4, -8),
    PanelFormat.Q4_1: (4, None),
    PanelFormat.Q5_1: (5, None),
    PanelFormat.Q6_K: (6, -32),
    PanelFormat.Q8_0: (8, -128),
}
"""For each format, the vectors of a block, and its minimum in scales, or `None` if panels have minima."""
EXACT = {Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0}

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


def weights_of(matrix: Matrix) -> np.ndarray:
    """Returns the weights of a quantized matrix as `weight_formats.h` describes them, float32 [outputs, inputs]."""
    panels, (vectors, lowest) = panels_of(matrix), LAYOUTS[PanelFormat(matrix.format)]
    end = BLOCKS * vectors * 64
    quads = panels[:, :end].reshape(-1, BLOCKS, vectors, 16, 4).transpose(0, 3, 1, 2, 4).reshape(-1, BLOCKS, vectors, 4)
    quants: np.ndarray = quads
    if vectors < 8:
        quants = np.concatenate((quads[:, :, :4] & 15, quads[:, :, :4] >> 4), axis=2)
        if vectors == 5:
            quants = quants | (quads[:, :, 4:] >> np.arange(8)[:, None] & 1) << 4
        if vectors == 6:
            quants = quants | (quads[:, :, [4] * 4 + [5] * 4] >> np.arange(0, 16, 2)[:, None] % 8 & 3) << 4
    halves = panels[:, end:].copy().view(np.float16).astype(np.float32)[:, : 2 * BLOCKS * 16]
    scales, *second = (
        halves.reshape(len(panels), -1, BLOCKS, 16).transpose(1, 0, 3, 2).reshape(-1, len(quads), BLOCKS, 1)
    )
    quants = quants.reshape(-1, BLOCKS, 32)
    if lowest is None:
        return (scales * quants + second[0]).reshape(-1, INPUTS)[: matrix.outputs]
    if second:
        scales = np.repeat(np.concatenate((scales, second[0]), axis=2), 16, axis=2)
    return (scales * (quants + np.float32(lowest))).reshape(-1, INPUTS)[: matrix.outputs]


def tolerance(kind: Kind, data: np.ndarray) -> np.ndarray:
    """Returns the allowed error of each weight, [outputs, inputs]: 0, or that of rounding scale and minimum to
    float16."""
    blocks = FORMATS[kind].split(data.reshape(len(data), -1, gguf.GGML_QUANT_SIZES[kind][1]))
    scales, *second = (np.abs(values.astype(np.float32)) for values in blocks.float16s)
    highest = scales * 32
    for values in second:
        highest += values * (32 if kind is Kind.Q6_K else 1)
    return np.repeat(highest * (0 if kind in EXACT else 2**-11), 32, axis=1)


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
  for (int p = 0, blocks = w->inputs / BLOCK; p < w->panels; p++)
    for (int b = 0; b < blocks; b++, out += 1024)
      with_format(w->format, [&](auto format) {
        amx::unpack<decltype(format)>(w->data + p * w->stride, blocks, b, out, [](int) {});
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
    assert abs((found[large] / exact[large]).mean() - 1) < 2e-4


@needs_avx512
def test_tiles_receive_float16_weights_as_bfloat16(unpack_all: Callable[..., int]) -> None:
    values, arena = np.random.default_rng(1).standard_normal((OUTPUTS, INPUTS)).astype(np.float16), Arena()
    matrix = pack_floats([values.view(np.uint16)], OUTPUTS, INPUTS, PanelFormat.F16, arena)
    found = unpacked(unpack_all, matrix, arena)
    assert (np.abs(found - values) <= np.abs(values) * LAST_PLACE).all()
    assert abs((found / values).mean() - 1) < 2e-4


def test_a_damaged_block_gives_some_weights_but_no_error() -> None:
    for kind in FORMATS:
        size = INPUTS // gguf.GGML_QUANT_SIZES[kind][0] * gguf.GGML_QUANT_SIZES[kind][1]
        raw = np.random.default_rng(2).integers(0, 256, (16, size), np.uint8)
        assert pack_quantized(raw, kind, Arena()).outputs == len(raw)
