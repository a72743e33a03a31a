"""The product of a few rows on a GPU is that of the reference, and a row's result is its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tenuto.kernels.gpu.linear import linear
from tests.kernels.gpu.conftest import DEVICE, TYPES, bound_of


@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 3, 4, 5, 16, 17, 40]),
    inputs=st.sampled_from([1, 7, 64, 256, 300, 1024]),
    outputs=st.sampled_from([1, 15, 48, 101]),
    biased=st.booleans(),
    dtype=st.sampled_from(TYPES),
)
def test_rows_are_multiplied_by_matrices_of_any_shape(rows, inputs, outputs, biased, dtype) -> None:
    generator = torch.Generator().manual_seed(rows + inputs)
    x = torch.randn(rows, inputs + 5, generator=generator).to(dtype)[:, :inputs]
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    found = linear(x.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE)).cpu()
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == dtype
    bound = bound_of(dtype, 2e-3, 1e-5)
    scale = max(inputs, 1) ** 0.5
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound * scale)


def test_a_wide_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 40, generator=generator), torch.randn(16_401, 40, generator=generator)
    for rows in (2, 6):
        found = linear(x[:rows].to(DEVICE), weight.to(DEVICE))
        torch.testing.assert_close(found.cpu(), x[:rows] @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [0.0, torch.nan])
def test_a_rows_result_does_not_depend_on_the_others(dtype: torch.dtype, bad: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 700, generator=generator) for n in (33, 60))
    if DEVICE.type == "cpu":  # tiles of other shapes are rounded otherwise by the interpreter, but not whole numbers
        x, weight = (4 * x).round(), (4 * weight).round()
    x, weight = x.to(dtype).to(DEVICE), weight.to(dtype).to(DEVICE)
    together = linear(x, weight)
    for many in (1, 4, 5, 16, 17):
        assert torch.equal(linear(x[:many], weight), together[:many])
    spoilt = x.clone()
    spoilt[3] = bad
    others = [i for i in range(33) if i != 3]
    assert torch.equal(linear(spoilt, weight)[others], together[others])
