"""Products with quantized weights on GPUs are those with the weights they stand for."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Kind
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenuto.base.errors import ModelError
from tenuto.kernels.gpu.quantized import linear
from tenuto.kernels.native.formats import FORMATS, PanelFormat
from tenuto.kernels.native.grouped import Grouped
from tenuto.kernels.quantized import Numbers
from tenuto.models.quantized_places import QuantizedPlace, type_of
from tenuto.models.weights import StoredWeight
from tests.kernels.gpu.conftest import DEVICE, TYPES, bound_of
from tests.kernels.gpu.matrices import quantized


@example(
    numbers=Numbers.INT8, rows=17, inputs=352, outputs=15, group=16, biased=False, minima=True, dtype=torch.float16
)
@example(
    numbers=Numbers.INT4, rows=5, inputs=352, outputs=70, group=128, biased=False, minima=True, dtype=torch.float32
)
@settings(max_examples=25, deadline=None)
@given(
    numbers=st.sampled_from(Numbers),
    rows=st.sampled_from([0, 1, 3, 5, 16, 17, 33, 70]),
    inputs=st.sampled_from([32, 96, 256, 352, 1056]),
    outputs=st.sampled_from([1, 15, 70, 130]),
    group=st.sampled_from([16, 32, 64, 128, 0]),
    biased=st.booleans(),
    minima=st.booleans(),
    dtype=st.sampled_from(TYPES),
)
def test_rows_are_multiplied_by_quantized_matrices_of_any_shape(
    numbers, rows, inputs, outputs, group, biased, minima, dtype
) -> None:
    generator = torch.Generator().manual_seed(rows + inputs)
    x = torch.randn(rows, inputs + 8, generator=generator).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    weight, expected = quantized(numbers, outputs, inputs, group or inputs, minima)
    found = linear(x.to(DEVICE), weight, None if bias is None else bias.to(DEVICE)).cpu()
    wanted = x.double() @ expected.T
    wanted = wanted if bias is None else wanted + bias.double()
    # kernels have integers as floats from 2**11 on, so weights as exact as 2**-12 of a step between their numbers
    bound = bound_of(dtype, 2e-3, 1e-4)
    scale = float(expected.square().mean().sqrt()) * inputs**0.5
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound * scale * 2)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_rows_product_with_a_quantized_matrix_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(70, 256, generator=generator).to(dtype).to(DEVICE)
    weight, _ = quantized(Numbers.INT4, 40, 256, 64, minima=True)
    spoilt = x.clone()
    spoilt[3] = torch.nan
    for rows in (5, 16, 20, 70):
        others = [i for i in range(rows) if i != 3]
        assert torch.equal(linear(spoilt[:rows], weight)[others], linear(x[:rows], weight)[others])


def grouped(numbers: PanelFormat, group: int, halves: bool) -> StoredWeight:
    """Returns a random matrix [35, 192], as a safetensors file's becomes one."""
    generator = np.random.default_rng(group)
    kind = Grouped(numbers, group, halves)
    shape, groups = (35, 192), -(-192 // group)
    data = generator.integers(0, 256, (35, 6 * numbers.quant_bytes), dtype=np.uint8)
    if numbers is PanelFormat.FP8:
        data &= 0xBF
    scales = generator.uniform(0.5, 1.5, (35, groups)).astype(np.float16).astype(np.float32)
    signed = scales * (-8 if numbers is PanelFormat.INT4 else -128)
    minima = [] if numbers is PanelFormat.FP8 else [signed if halves else signed + scales * np.float32(2.5)]
    whole = np.concatenate([data, *(each.view(np.uint8) for each in (scales, *minima))], axis=1)
    return StoredWeight(kind, shape, lambda: whole)


UNITS = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
"""Where blocks of these types have their float16 units."""
ROUNDED = {Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS}
"""Types whose scales, units times codes, are rounded to float16."""


def ggml(kind: Kind) -> StoredWeight:
    """Returns a random matrix [35, 512], as a GGUF file has it."""
    values = np.random.default_rng(1).normal(size=(35, 512)).astype(np.float32)
    if kind in UNITS:  # the package cannot make it
        block, size = GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(2).integers(0, 256, (35, 512 // block, size), dtype=np.uint8)
        for at in UNITS[kind]:
            blocks[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        data = blocks.reshape(35, -1)
    else:
        data = quants.quantize(values, kind)
    return StoredWeight(kind, (35, 512), lambda: data)


STORED = {
    "4 bits": grouped(PanelFormat.INT4, 64, halves=True),
    "4 bits with zeros": grouped(PanelFormat.INT4, 32, halves=False),
    "4 bits, a scale for each output": grouped(PanelFormat.INT4, 192, halves=True),
    "8 bits": grouped(PanelFormat.INT8, 192, halves=True),
    "8 bits with zeros": grouped(PanelFormat.INT8, 64, halves=False),
    "FP8": grouped(PanelFormat.FP8, 128, halves=False),
    **{kind.name: ggml(kind) for kind in FORMATS},
}


@pytest.mark.parametrize("name", STORED)
def test_stored_weights_keep_their_bits_and_mean_the_same(name: str) -> None:
    stored = STORED[name]
    outputs, inputs = stored.shape
    kind = type_of(stored.kind, inputs)
    assert kind is not None
    matrix = kind.empty(2 * outputs, DEVICE)
    for part in range(2):
        QuantizedPlace(matrix, part * outputs, outputs).fill(stored)
    found = linear(torch.eye(inputs, device=DEVICE), matrix).cpu().T
    expected = torch.from_numpy(stored.decode())
    bound = 2e-3 if stored.kind in ROUNDED else 5e-4 if "4" in name else 1e-4  # of the scales, which are about 1
    for part in range(2):
        torch.testing.assert_close(found[part * outputs : (part + 1) * outputs], expected, rtol=bound, atol=bound)
    assert matrix.bytes < 2 * outputs * inputs * 1.4 * matrix.numbers.bits / 8 + 2 * outputs * 256


def test_scales_with_which_weights_overflow_are_an_error() -> None:
    stored = STORED["FP8"]
    kind = type_of(stored.kind, 192)
    assert kind is not None
    whole = stored.read().copy()
    whole[3, 192:196] = np.array([200.0], np.float32).view(np.uint8)
    with pytest.raises(ModelError, match="FP8 has stored scales that are not below 128"):
        QuantizedPlace(kind.empty(35, DEVICE), 0, 35).fill(StoredWeight(stored.kind, stored.shape, lambda: whole))
    stored = STORED["MXFP4"]
    kind = type_of(stored.kind, 512)
    assert kind is not None
    blocks = stored.read().reshape(35, 16, 17).copy()
    for scale in (190, 191, 255):
        blocks[3, 4, 0] = scale
        place = QuantizedPlace(kind.empty(35, DEVICE), 0, 35)
        weight = StoredWeight(stored.kind, stored.shape, lambda: blocks.reshape(35, -1))
        if scale == 190:
            place.fill(weight)
            continue
        with pytest.raises(ModelError, match="FP4 has stored scales that are not below 191"):
            place.fill(weight)


def test_weights_of_a_type_that_the_kernels_do_not_know_are_decoded() -> None:
    assert type_of(Kind.BF16, 256) is None
    assert type_of(None, 256) is None
    assert type_of(STORED["4 bits"].kind, 48) is None
